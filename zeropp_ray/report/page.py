"""The timeline as a page: the same picture, with what is under the pointer said at once, and its micro-batch lit up."""

from __future__ import annotations

from html import escape

from zeropp_ray.report.svg import Picture
from zeropp_ray.schedule.program import Program
from zeropp_ray.schedule.render import title

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>%(title)s</title>
<style>
body { margin: 0; background: #fff; color: #222; font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.view { overflow-x: auto; }
.view svg { display: block; }
#wide, #wide + label { position: relative; top: 8px; left: 12px; }
#wide:checked ~ .whole, #wide:not(:checked) ~ .tasks { display: none; }
#tip { position: fixed; padding: 6px 9px; border-radius: 4px; background: #222; color: #fff; white-space: pre;
  pointer-events: none; line-height: 1.4; }
#tip[hidden] { display: none; }
</style>
<style id="same"></style>
%(pictures)s
<div id="tip" hidden></div>
<script>
const tip = document.getElementById("tip"), same = document.getElementById("same");
for (const title of document.querySelectorAll("svg title")) {  // else the browser would show them too, and late
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
function show(event) {
  const shape = event.target.closest("[data-tip]");
  tip.hidden = !shape;
  const lane = event.target.closest("[data-rank]");
  const microbatch = shape && /\\bm\\d+\\b/.exec(shape.getAttribute("class"));
  same.textContent = (microbatch ? `.task:not(.${microbatch[0]}) { opacity: .3; }` : "")
    + (lane ? `.live:not(.r${lane.dataset.rank}) { opacity: .15; }` : "");
  if (!shape) return;
  tip.textContent = shape.dataset.tip;
  const left = event.clientX + 14, top = event.clientY + 16;
  tip.style.left = Math.max(0, Math.min(left, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = (top + tip.offsetHeight < innerHeight ? top : event.clientY - tip.offsetHeight - 8) + "px";
}
for (const view of document.querySelectorAll(".view")) {
  for (const event of ["pointermove", "pointerdown", "pointerleave"]) view.addEventListener(event, show);
  view.addEventListener("scroll", () => {
    const to = `translate(${view.scrollLeft} 0)`;
    for (const labels of view.querySelectorAll(".labels")) labels.setAttribute("transform", to);
  });
}
</script>
</html>
"""


_WHOLE = 1500  # width in pixels of the picture that shows the whole step at once
_CHOICE = '<input type="checkbox" id="wide"><label for="wide">wide, with the micro-batches written in</label>\n'


def to_html(program: Program) -> str:
    """The page of a program, complete in itself.

    Over a task it says which it is and when, and pales all other micro-batches; over a lane it pales the memory curves
    of the other ranks. A step that is too long to be read at one glance is there twice: at the width of a screen, and
    wide, where the names of the ranks stay in sight when it is scrolled.
    """
    picture = Picture(program)
    if picture.width <= 1.2 * _WHOLE:
        pictures = f'<div class="view">\n{picture.draw()}</div>'
    else:
        whole = Picture(program, _WHOLE)
        pictures = f'{_CHOICE}<div class="view whole">\n{whole.draw()}</div>\n'
        pictures += f'<div class="view tasks">\n{picture.draw()}</div>'
    return _PAGE % {"title": escape(title(program.spec)), "pictures": pictures}
