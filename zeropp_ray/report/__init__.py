"""Pictures of a schedule: its timeline as SVG, as a page that answers to the pointer, and as a trace for Perfetto.

All are drawn from the replay of a program, are one file each, and need nothing from the network.
"""

from zeropp_ray.report.page import to_html
from zeropp_ray.report.svg import to_svg
from zeropp_ray.report.trace import to_trace

__all__ = ["to_html", "to_svg", "to_trace"]
