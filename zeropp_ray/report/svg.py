"""The timeline as SVG: a lane per rank, what is held and moved below it, and memory over time below all.

Plain shapes and texts, so that any viewer shows it; ``<title>`` of a shape says what it is, which browsers show on
hover. Classes are for the page, which lights up what belongs together (``task m3``, ``live r2``) and
keeps ``labels`` in sight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from zeropp_ray.report import colors
from zeropp_ray.report.timeline import Collective, Held, Other, Task, lanes
from zeropp_ray.schedule.actions import Op
from zeropp_ray.schedule.held import Curve, fullest
from zeropp_ray.schedule.program import Program
from zeropp_ray.schedule.render import summary, title
from zeropp_ray.schedule.spec import ScheduleSpec

NAMES = {Op.F: "forward", Op.RF: "forward again", Op.B: "input gradient", Op.W: "weight gradient"}
LETTERS = {Op.F: "F", Op.RF: "R", Op.B: "B", Op.W: "W"}

# In pixels. The time axis is as long as the shortest task needs for the number of its micro-batch, within these bounds.
_NARROWEST, _WIDEST = 1100, 5000
_LEFT, _RIGHT, _EDGE = 92, 120, 16
_LANE, _EXCHANGE, _RESIDENT, _BUFFER, _GAP = 28, 9, 11, 6, 10  # heights
_LIVE, _CHUNKS, _BYTES = 130, 56, 110  # heights of the panels of memory
_SIGN = 6.0  # width of a sign in a task's label; generous
_PARTED = 6  # the least width at which tasks are parted by a white line, which would drown the colour of narrower ones

_SHADES = ("#c7c7c7", "#d9b8a7", "#35618f", "#f2c14e", "#7fb69a")  # of the kinds of memory, each beside the next

_STYLE = """\
text { font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #222; }
.head { font-size: 17px; font-weight: 600; } .note { font-size: 12.5px; } .small { font-size: 10px; fill: #555; }
.rank { font-size: 13px; font-weight: 600; text-anchor: end; } .right { text-anchor: end; }
.labels .small { text-anchor: end; } .middle { text-anchor: middle; }
.in { font-size: 10px; text-anchor: middle; pointer-events: none; } .in.tiny { font-size: 9px; }
.idle { fill: #eee; } .grid { stroke: #ddd; } .edge { stroke: #444; } .bound { stroke: #444; stroke-dasharray: 4 3; }
.front { stroke: #000; stroke-width: 1.6; fill: none; } .stripe { fill: #000; pointer-events: none; }
.even { fill: #d4d4d4; } .odd { fill: #a6a6a6; } .buffer { fill: #d9b8a7; }
.gather { fill: #000; } .reduce { fill: #fff; stroke: #000; stroke-width: 1.2; }
.live { fill: none; stroke-width: 1.5; } .live.most { stroke-width: 3; } .other { fill: none; stroke: #222; }
.resident { stroke: #aaa; stroke-width: 3; } .open { stroke: #8c2d04; stroke-width: 1.5; }
.sent { fill: #000; } .sent.reduce { fill: #fff; stroke: #000; stroke-width: 1; } .besides { fill: #777; }
.dotted { stroke-dasharray: 1.5 2.5; stroke-width: 2; } .kind { stroke: #222; stroke-width: .6; }
.dashed { stroke-dasharray: 5 3; } .halo { stroke: #fff; stroke-width: 3; paint-order: stroke; }
.parted .task { stroke: #fff; stroke-width: .5; }"""


def to_svg(program: Program, width: int = 0) -> str:
    """The picture of a program, complete in itself.

    ``width`` is in pixels, at least 1200; 0 takes what leaves room for the number of a micro-batch in every task, up to
    5212.
    """
    return Picture(program, width).draw()


class Picture:
    """One picture: the scale of time, and where things are from top to bottom."""

    def __init__(self, program: Program, width: int = 0) -> None:
        self.spec: ScheduleSpec = program.spec
        self.timeline, self.lanes = lanes(program)
        durations = [task.end - task.start for lane in self.lanes for task in lane.tasks if task.end > task.start]
        self.makespan = self.timeline.makespan
        self.exchange = _EXCHANGE * any(lane.timed_exchanges for lane in self.lanes)  # the height of their row
        self.digits = len(str(self.spec.microbatches - 1))
        self.shortest = min(durations)
        labelled = (_SIGN * self.digits + 2) * self.makespan / self.shortest
        self.axis = max(width, 1200) - _LEFT - _RIGHT if width else min(max(_NARROWEST, labelled), _WIDEST)
        self.width = _LEFT + self.axis + _RIGHT

    def x(self, time: float) -> float:
        """Where a time is, from the left end of the axis."""
        return time / self.makespan * self.axis

    def draw(self) -> str:
        head, top = self._head()
        heights = [
            _LANE + self.exchange + _RESIDENT * _rows(lane.resident) + _BUFFER * _rows(lane.buffers) + _GAP
            for lane in self.lanes
        ]
        tops = [top + 22 + sum(heights[:p]) for p in range(len(heights))]
        axis = tops[-1] + heights[-1] + 4
        live = axis + 62
        chunks = live + _LIVE + 48
        by_kind = chunks + _CHUNKS + 48
        height = (by_kind + _BYTES if self.timeline.held else chunks + _CHUNKS) + 30
        most = max(range(len(self.lanes)), key=lambda p: self.timeline.peak_activations[p])
        body = [
            *self._grid(tops[0], axis),
            *self._axis(axis),
            *(line for p, y in enumerate(tops) for line in self._rank(p, y)),
            *self._fronts(tops),
            *self._live(live, most),
            *self._chunks(chunks, most),
            *(self._kinds(by_kind) if self.timeline.held else ()),
        ]
        labels = [
            f'<rect x="0" y="{tops[0] - 4:g}" width="{_LEFT - 4}" height="{axis - tops[0]:g}" fill="#fff"/>',
            *(line for p, y in enumerate(tops) for line in self._labels(p, y)),
        ]
        parted = ' class="parted"' if self.x(self.shortest) >= _PARTED else ""
        return "\n".join(
            [
                f'<svg{parted} xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{height:g}" '
                f'viewBox="0 0 {self.width:g} {height:g}" role="img" aria-label="{escape(title(self.spec))}">',
                f"<style>\n{_STYLE}\n{self._colors()}\n</style>",
                f'<rect width="{self.width:g}" height="{height:g}" fill="#fff"/>',
                f'<g transform="translate({_LEFT} 0)">',
                *body,
                "</g>",
                '<g class="labels">',
                *head,
                *labels,
                "</g>",
                "</svg>\n",
            ]
        )

    def _colors(self) -> str:
        """A class for the tasks of each kind and chunk, and one for what is written on them."""
        rules = []
        for op in NAMES:
            for v in range(self.spec.chunks):
                color = colors.of_task(op, v, self.spec.chunks)
                rules.append(f".{op}{v} {{ fill: {colors.css(color)}; }}")
                rules.append(f".on{op}{v} {{ fill: {colors.css(colors.on(color))}; }}")
        return " ".join(rules)

    # --- above

    def _head(self) -> tuple[list[str], float]:
        """Title, numbers and legend; and where the next thing may start."""
        lines = [f'<text class="head" x="{_EDGE}" y="30">{escape(title(self.spec).replace("  ", ": "))}</text>']
        y = 52.0
        for text in (*summary(self.spec, self.timeline), self._costs()):
            word, _, rest = text.partition(" ")
            lines.append(f'<text class="note" x="{_EDGE}" y="{y:g}">{word}</text>')
            lines.append(f'<text class="note" x="{_EDGE + 62}" y="{y:g}">{escape(rest.strip())}</text>')
            y += 17
        x = float(_EDGE)
        y += 10
        for width, draw, text in self._legend():
            needed = width + 7 + 6.1 * len(text) + 22
            if x > _EDGE and x + needed > min(self.width, _NARROWEST + _LEFT + _RIGHT):
                x, y = float(_EDGE), y + 22
            lines += draw(x, y)
            lines.append(f'<text x="{x + width + 7:g}" y="{y + 4:g}">{escape(text)}</text>')
            x += needed
        return lines, y + 22

    def _costs(self) -> str:
        costs = self.spec.costs
        if costs.is_uniform:
            each = f"a chunk and micro-batch: F {costs.F[0]:g}, B {costs.B[0]:g}, W {costs.W[0]:g}"
        else:
            each = "F, B and W as measured or estimated for each chunk"
        hops = sorted({f"{hop:g}" for hop in costs.hops} or {f"{costs.comm:g}"}, key=float)
        text = f"costs {each}; a transfer between ranks: {' or '.join(hops)}"
        if any((*costs.gather, *costs.reduce)):
            text += f"; a gather: {_range(costs.gather)}; a reduce: {_range(costs.reduce)}"
        if any((*costs.optimizer, costs.vote)):
            text += f"; an update: {_range(costs.optimizer)} a chunk; the vote: {costs.vote:g}"
        return text

    def _legend(self) -> Iterator[tuple[float, Callable[[float, float], list[str]], str]]:
        """Width of a sign, what draws it around a height, and what it means."""
        spec = self.spec
        shown = range(min(spec.chunks, 4))
        for op, name in NAMES.items():
            if op is Op.RF and not any(spec.recomputed):
                continue

            def swatches(x: float, y: float, op: Op = op) -> list[str]:
                return [
                    f'<rect class="{op}{v}" x="{x + 16 * i:g}" y="{y - 8:g}" width="16" height="16"/>'
                    f'<text class="in on{op}{v}" x="{x + 16 * i + 8:g}" y="{y + 4:g}">{LETTERS[op]}</text>'
                    for i, v in enumerate(shown)
                ]

            chunks = " of chunk 0" + (", 1" if spec.chunks > 1 else "") + (", …" if spec.chunks > 2 else "")
            yield 16 * len(shown), swatches, name + chunks
        if len(spec.units) > 1:
            yield (
                20,
                lambda x, y: [
                    f'<rect class="idle" x="{x:g}" y="{y - 8:g}" width="20" height="16"/>'
                    f'<rect class="stripe" x="{x:g}" y="{y - 8:g}" width="20" height="3"/>'
                ],
                "every second unit",
            )
        yield 4, lambda x, y: [f'<path class="front" d="M{x + 2:g} {y - 9:g}v18"/>'], "a unit starts"
        yield (
            32,
            lambda x, y: [
                f'<rect class="{shade}" x="{x + 16 * i:g}" y="{y - 5:g}" width="16" height="10"/>'
                for i, shade in enumerate(("even", "odd"))
            ],
            "parameters resident, with the chunk",
        )
        if self.exchange:
            yield (
                46,
                lambda x, y: [
                    f'<rect class="sent" x="{x:g}" y="{y - 3:g}" width="20" height="6"/>'
                    f'<rect class="sent reduce" x="{x + 24:g}" y="{y - 3:g}" width="20" height="6"/>'
                ],
                "gather, reduce under way",
            )
        if any(lane.others for lane in self.lanes):
            yield (
                20,
                lambda x, y: [f'<rect class="besides" x="{x:g}" y="{y - 8:g}" width="20" height="16"/>'],
                "update of the weights, vote",
            )
        yield 8, lambda x, y: [_gather(x + 1, y - 5, 10)], "gather"
        yield (
            24,
            lambda x, y: [f'<rect class="buffer" x="{x:g}" y="{y - 3:g}" width="24" height="6"/>'],
            "gradient buffer open",
        )
        yield 8, lambda x, y: [_reduce(x + 4, y)], "reduce"

    # --- the lanes

    def _labels(self, p: int, y: float) -> list[str]:
        lane = self.lanes[p]
        lines = [f'<text class="rank" x="{_LEFT - 12}" y="{y + _LANE / 2 + 5:g}">rank {p}</text>']
        if lane.resident:
            below = y + _LANE + self.exchange + 9
            lines.append(f'<text class="small" x="{_LEFT - 12}" y="{below:g}">parameters</text>')
        if lane.buffers:
            below = y + _LANE + self.exchange + _RESIDENT * _rows(lane.resident) + 8
            lines.append(f'<text class="small" x="{_LEFT - 12}" y="{below:g}">gradients</text>')
        return lines

    def _rank(self, p: int, y: float) -> Iterator[str]:
        lane = self.lanes[p]
        resident = _LANE + self.exchange + 1
        buffers = resident + 1 + _RESIDENT * _rows(lane.resident)
        yield f'<g class="lane" data-rank="{p}" transform="translate(0 {y:g})">'
        yield f'<rect class="idle" width="{self.axis:g}" height="{_LANE}"/>'
        for other in lane.others:
            yield self._other(p, other)
        for task in lane.tasks:
            yield self._task(p, task)
        for span in lane.resident:
            yield from self._resident(p, span, resident + _RESIDENT * span.row)
        for span in lane.buffers:
            text = f"gradient buffer of chunk {span.chunk} open{_when(p, span.start, span.end)}"
            yield self._box("buffer", span.start, span.end, buffers + _BUFFER * span.row, _BUFFER - 2, text)
        for each in lane.collectives:
            yield self._collective(p, each, resident, buffers)
        yield "</g>"

    def _other(self, p: int, other: Other) -> str:
        return self._box("besides", other.start, other.end, 0, _LANE, other.name + _when(p, other.start, other.end))

    def _task(self, p: int, task: Task) -> str:
        op, v, m = task.op, task.chunk, task.microbatch
        kind = f"{op}{v}"
        text = (
            f"{NAMES[op]} ({op}) of chunk {v}, micro-batch {m}{_when(p, task.start, task.end)}\n"
            f"model chunk {self.spec.model_chunk(p, v)}, unit {task.unit}"
        )
        box = self._box(f"task {kind} m{m}", task.start, task.end, 0, _LANE, text)
        width = self.x(task.end) - self.x(task.start)
        if task.unit % 2:
            box += f'<rect class="stripe" x="{_n(self.x(task.start))}" width="{_n(width)}" height="3"/>'
        middle = _n(self.x(task.start) + width / 2)
        if width >= _SIGN * (1 + self.digits) + 4:
            return f'{box}<text class="in on{kind}" x="{middle}" y="19">{LETTERS[op]}{m}</text>'
        if width >= _SIGN * self.digits:
            box += f'<text class="in tiny on{kind}" x="{middle}" y="24">{m}</text>'
        if width >= 10:
            box += f'<text class="in tiny on{kind}" x="{middle}" y="13">{LETTERS[op]}</text>'
        return box

    def _resident(self, p: int, span: Held, y: float) -> Iterator[str]:
        text = f"parameters of chunk {span.chunk} resident{_when(p, span.start, span.end)}"
        yield self._box("odd" if span.chunk % 2 else "even", span.start, span.end, y, _RESIDENT - 1, text)
        if self.x(span.end) - self.x(span.start) >= 16:
            yield f'<text class="in tiny" x="{_n(self.x(span.start) + 11)}" y="{y + 8:g}">{span.chunk}</text>'

    def _collective(self, p: int, each: Collective, resident: float, buffers: float) -> str:
        name = "gather the parameters" if each.op is Op.GATHER else "reduce the gradients"
        said = f"{name} of chunk {each.chunk}{_when(p, each.start, each.end)}"
        text = f"<title>{said}</title>"
        bar = ""
        if each.end > each.start:
            kind = "sent" if each.op is Op.GATHER else "sent reduce"
            bar = self._box(kind, each.start, each.end, _LANE + 2, _EXCHANGE - 4, said)
        if each.op is Op.GATHER:
            shape = _gather(self.x(each.start), resident + _RESIDENT * each.row, _RESIDENT - 1)
        else:
            shape = _reduce(self.x(each.end), buffers + _BUFFER * each.row + (_BUFFER - 2) / 2)
        return bar + shape.replace("/>", f">{text}</path>")

    def _fronts(self, tops: Sequence[float]) -> Iterator[str]:
        """A line through all lanes for each unit, where it starts, with its name above."""
        units = range(len(self.spec.units))
        at = [[self.x(min(t.start for t in lane.tasks if t.unit == k)) for lane in self.lanes] for k in units]
        for k, (first, stop) in enumerate(self.spec.unit_bounds):
            path = " ".join(f"{_n(x)} {y - 3:g} {_n(x)} {y + _LANE + 2:g}" for x, y in zip(at[k], tops, strict=True))
            text = f"unit {k}: micro-batches {first} to {stop - 1}"
            yield f'<path class="front" d="M{path}"><title>{text}</title></path>'
            room = (at[k + 1][0] if k + 1 < len(at) else self.axis) - at[k][0]
            short = next((name for name in (text, f"unit {k}", str(k)) if 6 * len(name) + 6 < room), "")
            yield f'<text class="small" x="{_n(at[k][0] + 3)}" y="{tops[0] - 6:g}">{short}</text>'

    # --- the axis of time

    def _grid(self, top: float, bottom: float) -> Iterator[str]:
        for time in _ticks(self.makespan, self.axis / 90):
            yield f'<path class="grid" d="M{_n(self.x(time))} {top:g}V{bottom:g}"/>'

    def _axis(self, y: float) -> Iterator[str]:
        bound = self.timeline.lower_bound
        yield f'<path class="edge" d="M0 {y:g}H{_n(self.axis)}"/>'
        for time in _ticks(self.makespan, self.axis / 90):
            yield f'<path class="edge" d="M{_n(self.x(time))} {y:g}v4"/>'
            if all(abs(self.x(time) - self.x(end)) > 20 for end in (bound, self.makespan)):  # which have texts there
                yield f'<text class="middle" x="{_n(self.x(time))}" y="{y + 17:g}">{time:g}</text>'
        yield f'<text x="0" y="{y + 34:g}">time, in the unit of the costs</text>'
        yield f'<path class="edge" d="M{_n(self.axis)} {y - 8:g}v30"/>'
        yield f'<text x="{_n(self.axis + 5)}" y="{y + 17:g}">makespan {self.makespan:.6g}</text>'
        yield f'<path class="bound" d="M{_n(self.x(bound))} {y - 8:g}v44"/>'
        yield f'<text class="right" x="{_n(self.x(bound) - 5)}" y="{y + 34:g}">lower bound {bound:.6g}</text>'

    # --- memory

    def _live(self, y: float, most_at: int) -> Iterator[str]:
        spec, most = self.spec, self.timeline.peak_activations
        allowed = spec.live_chunks / spec.chunks
        inputs = [lane.inputs for lane in self.lanes] if any(spec.recomputed) else []
        top = max(allowed, *most, *(value for curve in inputs for _, value in curve))
        yield f'<g class="memory" transform="translate(0 {y:g})">'
        yield from self._panel(_LIVE, top)
        for p in sorted(range(spec.stages), key=lambda p: p == most_at):  # that of the fullest on top
            text = f"rank {p}: at most {most[p]:.6g} live"
            color = colors.css(colors.of_rank(p, spec.stages))
            kind = f"live r{p}{' most' if p == most_at else ''}"
            yield self._curve(self.lanes[p].live, kind, _LIVE, top, text, f' stroke="{color}"')
        if inputs:
            text = f"rank {most_at}: inputs of recomputed chunks, in micro-batches of as many inputs as chunks"
            yield self._curve(inputs[most_at], "other dashed", _LIVE, top, text)
        yield self._curve(
            self.lanes[most_at].waiting, "other dotted", _LIVE, top, f"rank {most_at}: of these, from B to W"
        )
        level = _LIVE * (1 - allowed / _above(top))
        yield f'<path class="bound" d="M0 {level:g}H{_n(self.axis)}"/>'
        yield from self._panel_labels("live activations, in micro-batches of a whole stage", _LIVE, top)
        yield f'<text class="halo" x="4" y="{level - 3:g}">allowed {allowed:.6g}</text>'
        x = 330.0
        for p in sorted({0, spec.stages // 2, spec.stages - 1, most_at}):
            color = colors.css(colors.of_rank(p, spec.stages))
            thick = 3 if p == most_at else 1.5
            text = f"rank {p}" + (f", the fullest: {most[p]:.6g}" if p == most_at else "")
            yield f'<path d="M{x:g} -12h22" stroke="{color}" stroke-width="{thick}"/>'
            yield f'<text x="{x + 28:g}" y="-8">{text}</text>'
            x += 50 + 6.1 * len(text)
        if inputs:
            yield f'<path class="other dashed" d="M{x:g} -12h22"/>'
            yield f'<text x="{x + 28:g}" y="-8">chunk inputs kept by rank {most_at}, 1/V each</text>'
            x += 50 + 6.1 * 40
        yield f'<path class="other dotted" d="M{x:g} -12h22"/>'
        yield f'<text x="{x + 28:g}" y="-8">of these, from B to W</text>'
        yield "</g></g>"

    def _chunks(self, y: float, rank: int) -> Iterator[str]:
        lane = self.lanes[rank]
        most = max(value for _, value in (*lane.resident_chunks, *lane.open_buffers))
        yield f'<g class="memory" transform="translate(0 {y:g})">'
        yield from self._panel(_CHUNKS, most)
        both = (
            (lane.resident_chunks, "other resident", "parameters resident", 330),
            (lane.open_buffers, "other open dashed", "gradient buffers open", 490),
        )
        for curve, kind, text, _ in both:
            yield self._curve(curve, kind, _CHUNKS, most, text)
        yield from self._panel_labels(f"chunks on rank {rank}, of {self.spec.chunks}", _CHUNKS, most)
        for _, kind, text, x in both:
            yield f'<path class="{kind}" d="M{x} -12h22"/>'
            yield f'<text x="{x + 28}" y="-8">{text}</text>'
        yield "</g></g>"

    def _kinds(self, y: float) -> Iterator[str]:
        """Memory by kind, one on the other, of the rank where all of it is most."""
        held = [fullest(lane.held) for lane in self.lanes]
        rank = max(range(len(held)), key=lambda p: sum(held[p].values()))
        curves = {kind: each for kind, each in self.lanes[rank].held.items() if any(value for _, value in each)}
        mega, top = 1e6, sum(held[rank].values()) / 1e6
        yield f'<g class="memory" transform="translate(0 {y:g})">'
        yield from self._panel(_BYTES, top)
        for kind, piled in reversed(_piled(curves)):
            text = f"rank {rank}: {kind}, at most {max(value for _, value in curves[kind]) / mega:.4g} MB"
            area = self._curve([(time, value / mega) for time, value in piled], "kind", _BYTES, top, text)
            yield area.replace('"><title>', f'V{_BYTES}H0z" fill="{_SHADES[list(curves).index(kind)]}"><title>')
        yield from self._panel_labels(f"MB on rank {rank}, at most {top:.4g}", _BYTES, top)
        x = 190.0
        for shade, kind in zip(_SHADES, curves, strict=False):
            yield f'<rect class="kind" x="{x:g}" y="-18" width="14" height="11" fill="{shade}"/>'
            yield f'<text x="{x + 20:g}" y="-8">{kind}</text>'
            x += 34 + 6.1 * len(kind)
        yield "</g></g>"

    def _panel(self, height: float, top: float) -> Iterator[str]:
        """What is behind the curves of a panel that goes up to a little above ``top``."""
        for value in _ticks(_above(top), height / 20, whole=True):
            yield f'<path class="grid" d="M0 {_n(height * (1 - value / _above(top)))}H{_n(self.axis)}"/>'
        for time in _ticks(self.makespan, self.axis / 90):
            yield f'<path class="grid" d="M{_n(self.x(time))} 0V{height:g}"/>'
        yield f'<path class="edge" d="M0 {height:g}H{_n(self.axis)}"/>'

    def _panel_labels(self, name: str, height: float, top: float) -> Iterator[str]:
        """What is written at its left and above, in a group that is left open."""
        yield '<g class="labels">'
        yield f'<rect x="{-_LEFT}" y="-6" width="{_LEFT - 1}" height="{height + 12:g}" fill="#fff"/>'
        yield f'<text x="0" y="-8">{name}</text>'
        for value in _ticks(_above(top), height / 20, whole=True):
            level = height * (1 - value / _above(top))
            yield f'<text class="right" x="-6" y="{_n(level + 4)}">{value:g}</text>'

    def _curve(self, curve: Curve, kind: str, height: float, top: float, text: str, more: str = "") -> str:
        level = [height * (1 - value / _above(top)) for _, value in curve]
        path = f"M{_n(self.x(curve[0][0]))} {_n(level[0])}"
        path += "".join(f"H{_n(self.x(time))}V{_n(to)}" for (time, _), to in zip(curve[1:], level[1:], strict=True))
        path += f"H{_n(self.axis)}"
        return f'<path class="{kind}" d="{path}"{more}><title>{escape(text)}</title></path>'

    def _box(self, kind: str, start: float, end: float, y: float, height: float, text: str) -> str:
        left, width = self.x(start), self.x(end) - self.x(start)
        at = f' y="{y:g}"' if y else ""
        return (
            f'<rect class="{kind}" x="{_n(left)}"{at} width="{_n(width)}" height="{height:g}">'
            f"<title>{escape(text)}</title></rect>"
        )


def _piled(curves: Mapping[str, Curve]) -> list[tuple[str, Curve]]:
    """Each curve on top of those before it."""
    times = sorted({time for each in curves.values() for time, _ in each})
    base, result = [0.0] * len(times), []
    for kind, each in curves.items():
        steps = iter([*each, (math.inf, 0.0)])
        value, (until, following) = 0.0, next(steps)
        for i, time in enumerate(times):
            while until <= time:
                value, (until, following) = following, next(steps)
            base[i] += value
        result.append((kind, list(zip(times, base, strict=True))))
    return result


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _gather(x: float, y: float, height: float) -> str:
    """A triangle that points to what starts here."""
    return f'<path class="gather" d="M{_n(x)} {y:g}l6 {height / 2:g}l-6 {height / 2:g}z"/>'


def _reduce(x: float, y: float) -> str:
    """A diamond around a point."""
    return f'<path class="reduce" d="M{_n(x - 4)} {y:g}l4 -4l4 4l-4 4z"/>'


def _when(rank: int, start: float, end: float) -> str:
    return f"\nrank {rank}, from {start:.6g} to {end:.6g}" if end > start else f"\nrank {rank}, at {start:.6g}"


def _rows(held: Iterable[Held]) -> int:
    return max((span.row + 1 for span in held), default=0)


def _above(top: float) -> float:
    return max(top, 1.0) * 1.08


def _ticks(end: float, count: float, whole: bool = False) -> list[float]:
    """Round numbers from 0 to ``end``, about ``count`` of them; ``whole``: no fractions."""
    raw = end / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    step = max(step, 1.0) if whole else step
    return [i * step for i in range(math.floor(end / step + 1e-9) + 1)]


def _n(value: float) -> str:
    """A number for a path: to a hundredth of a pixel, without zeros at its end."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
