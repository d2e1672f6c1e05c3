"""Colours of tasks and ranks.

Those of tasks differ in lightness as well as in hue, so that they can be told apart without red, green or blue;
``tests/test_report.py`` holds them to that.
"""

from __future__ import annotations

from zeropp_ray.schedule.actions import Op

Rgb = tuple[int, int, int]

_TASKS: dict[Op, Rgb] = {
    Op.F: (0x21, 0x66, 0xAC),  # blue
    Op.RF: (0x92, 0xC5, 0xDE),  # light blue
    Op.B: (0xFF, 0xC2, 0x0A),  # yellow
    Op.W: (0x8C, 0x2D, 0x04),  # brown
}
_PALEST = 0.25  # how much white is in the colour of the first of several chunks
_FIRST_RANK, _MIDDLE_RANK, _LAST_RANK = (0, 34, 78), (124, 123, 120), (214, 184, 60)  # the map "cividis", but its end


def of_task(op: Op, chunk: int, chunks: int) -> Rgb:
    """The colour of a task; the later its chunk, the fuller."""
    return _mix(_TASKS[op], (255, 255, 255), _PALEST * (1 - chunk / max(chunks - 1, 1)) if chunks > 1 else 0.0)


def of_rank(rank: int, stages: int) -> Rgb:
    """The colour of a rank's curve, from dark blue to light yellow."""
    way = 2 * rank / max(stages - 1, 1)
    return _mix(_FIRST_RANK, _MIDDLE_RANK, way) if way < 1 else _mix(_MIDDLE_RANK, _LAST_RANK, way - 1)


def on(background: Rgb) -> Rgb:
    """Black or white, whichever reads better on a background."""
    dark, light = contrast(background, (0, 0, 0)), contrast(background, (255, 255, 255))
    return (0, 0, 0) if dark > light else (255, 255, 255)


def contrast(one: Rgb, other: Rgb) -> float:
    """Contrast ratio of WCAG 2: from 1 to 21, and 4.5 is enough for text."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def linear(color: Rgb) -> tuple[float, float, float]:
    """Light of red, green and blue, 0 to 1, of an sRGB colour."""
    red, green, blue = (c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color)
    return red, green, blue


def css(color: Rgb) -> str:
    """As SVG and CSS write it."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def _luminance(color: Rgb) -> float:
    red, green, blue = linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mix(one: Rgb, other: Rgb, part: float) -> Rgb:
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(one, other, strict=True))
    return red, green, blue
