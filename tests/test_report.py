"""Pictures of a schedule: they show what the replay says, are complete in themselves, and can be read."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess
from bisect import bisect_right
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from jobs.schedule import schedule
from zeropp_ray.errors import ConfigError
from zeropp_ray.report import colors, to_html, to_svg, to_trace
from zeropp_ray.report.timeline import lanes
from zeropp_ray.schedule import COMPUTE, POLICIES, Costs, Op, Program, Sizes, compile_forward, compile_program, resolve

SVG = "{http://www.w3.org/2000/svg}"
UNEVEN = (1, 1.3, 0.7, 0.25)


def program(stages: int = 4, microbatches: int = 16, policy: str = "zeropp", **choices: Any) -> Program:
    chunks = choices.pop("chunks", POLICIES[policy].chunks or 2)
    costs = Costs.uniform(stages * chunks, *choices.pop("cost", UNEVEN), *choices.pop("besides", ()))
    if choices.get("overlap") is not None:
        costs = dataclasses.replace(costs, overlap=choices.pop("overlap"))
    return compile_program(resolve(stages, chunks, microbatches, costs=costs, policy=policy, **choices))


CASES = {
    **{policy: {"policy": policy} for policy in POLICIES},
    "all-choices": {"chunks": 3, "unit": 5, "prefetch": True, "recompute": "selective", "reduce": "step"},
    "whole-step": {"unit": 4, "besides": (0.8, 3, 0.5, 0.4), "prefetch": True},
    "alone": {"unit": 4, "besides": (0.8, 3, 0.5, 0.4), "chunks": 1, "overlap": False},
    "least": {"stages": 1, "chunks": 1, "microbatches": 1, "recompute": "full"},
}


@pytest.mark.parametrize("choices", CASES.values(), ids=CASES)
def test_what_is_held_over_time_has_the_peaks_of_the_replay(choices: dict[str, Any]) -> None:
    made = program(**choices)
    timeline, ranks = lanes(made)
    for p, lane in enumerate(ranks):
        assert max(value for _, value in lane.live) == pytest.approx(timeline.peak_activations[p])
        assert max(value for _, value in lane.inputs) == pytest.approx(timeline.peak_inputs[p] / made.spec.chunks)
        assert max(value for _, value in lane.resident_chunks) == timeline.peak_resident[p]
        in_flight = made.spec.costs.tasks_alone == 0  # buffers then, while the next one is open
        assert 0 <= max(value for _, value in lane.open_buffers) - timeline.peak_gradient_buffers[p] <= in_flight
        for curve in (lane.live, lane.waiting, lane.inputs, lane.resident_chunks, lane.open_buffers):
            assert curve[0][0] == curve[-1][1] == 0
        assert len(lane.resident) == timeline.gathers[p]
        assert len(lane.buffers) == timeline.reduces[p]
        for held in (lane.resident, lane.buffers):  # what is held at one time lies in different rows
            for one, other in itertools.combinations(held, 2):
                assert one.row != other.row or one.end <= other.start or other.end <= one.start


@pytest.mark.parametrize("choices", CASES.values(), ids=CASES)
def test_activations_live_from_the_start_of_their_forward_to_the_end_of_their_weight_gradient(
    choices: dict[str, Any],
) -> None:
    made = program(**choices)
    for lane in lanes(made)[1]:
        times, live = [time for time, _ in lane.live], set[tuple[int, int]]()
        for task in lane.tasks:
            if task.op is Op.RF or (task.op is Op.F and not made.spec.recomputed[task.chunk]):
                live.add((task.chunk, task.microbatch))
            _, value = lane.live[bisect_right(times, (task.start + task.end) / 2) - 1]
            assert value == pytest.approx(len(live) / made.spec.chunks)
            if task.op is Op.W:
                live.remove((task.chunk, task.microbatch))


@pytest.mark.parametrize("choices", CASES.values(), ids=CASES)
def test_the_picture_has_every_task_where_it_runs(choices: dict[str, Any]) -> None:
    made = program(**choices)
    timeline, ranks = lanes(made)
    drawn = ElementTree.fromstring(to_svg(made))
    groups = [g for g in drawn.iter(f"{SVG}g") if g.get("class") == "lane"]
    assert [g.get("data-rank") for g in groups] == [str(p) for p in range(made.spec.stages)]
    for p, (g, lane) in enumerate(zip(groups, ranks, strict=True)):
        axis = float(g[0].get("width", 0))
        tasks = [shape for shape in g if "task" in shape.get("class", "")]
        assert len(tasks) == sum(action.op in COMPUTE for action in made.ranks[p])
        for shape, task in zip(tasks, lane.tasks, strict=True):
            assert shape.get("class") == f"task {task.op}{task.chunk} m{task.microbatch}"
            assert float(shape.get("x", -1)) == pytest.approx(task.start / timeline.makespan * axis, abs=0.01)
            assert float(shape.get("width", 0)) == pytest.approx(
                (task.end - task.start) / timeline.makespan * axis, abs=0.01
            )
        marks = [shape.get("class") for shape in g]
        assert marks.count("gather") == timeline.gathers[p]
        assert marks.count("reduce") == timeline.reduces[p]
        timed = not made.spec.costs.tasks_alone
        assert marks.count("sent") == timed * timeline.gathers[p]
        assert marks.count("sent reduce") == timed * timeline.reduces[p]
        assert marks.count("besides") == timed * 2
    fronts = [path for path in drawn.iter(f"{SVG}path") if path.get("class") == "front" and len(path)]
    assert len(fronts) == len(made.spec.units)
    texts = {text.text for text in drawn.iter(f"{SVG}text")}
    assert {f"rank {p}" for p in range(made.spec.stages)} <= texts
    assert f"makespan {timeline.makespan:.6g}" in texts
    assert f"lower bound {timeline.lower_bound:.6g}" in texts


def test_a_task_says_what_it_is() -> None:
    drawn = to_svg(program(stages=2, microbatches=4, unit=2, cost=(1, 1, 1, 0)))
    assert "<title>forward (F) of chunk 1, micro-batch 2\nrank 0, from 12 to 13\nmodel chunk 2, unit 1</title>" in drawn


def test_memory_by_kind_is_drawn_where_sizes_are_known() -> None:
    costs = Costs.uniform(8, *UNEVEN)
    columns = [tuple(mega * 1e6 for _ in range(8)) for mega in (10, 20, 30, 12, 4)]
    known = dataclasses.replace(costs, sizes=Sizes(*columns))
    without, drawn = (to_svg(compile_program(resolve(4, 2, 12, costs=each))) for each in (costs, known))
    assert "weight inputs" not in without
    panel = drawn[drawn.index("MB on rank") :]
    for kind in ("resident parameters", "gradient buffers", "activations", "weight inputs"):
        assert f">{kind}</text>" in panel
    assert ">chunk inputs</text>" not in panel  # nothing is recomputed
    names = {event["name"] for event in to_trace(compile_program(resolve(4, 2, 12, costs=known)))["traceEvents"]}
    assert "weight inputs (bytes)" in names


def test_a_forward_program_can_be_drawn() -> None:
    made = compile_forward(resolve(2, 2, 8))
    ElementTree.fromstring(to_svg(made))
    assert {event.get("cat") for event in to_trace(made)["traceEvents"]} >= {"F", "memory"}


@pytest.mark.parametrize("draw", [to_svg, to_html])
def test_a_picture_needs_nothing_else(draw: Any) -> None:
    text = draw(program()).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"//|\b(src|href|import|url)\b", text.replace("{  //", "").replace(";  //", ""))


@pytest.mark.parametrize("choices", CASES.values(), ids=CASES)
def test_the_trace_has_every_task_and_no_overlap(choices: dict[str, Any]) -> None:
    made = program(**choices)
    events = json.loads(json.dumps(to_trace(made)))["traceEvents"]
    assert all({"ph", "pid", "tid", "name"} <= event.keys() for event in events)
    slices = [event for event in events if event["ph"] == "X"]
    for p, actions in enumerate(made.ranks):
        names = [event["name"] for event in slices if event["pid"] == p and event["cat"] in {"F", "RF", "B", "W"}]
        assert names == [str(action) for action in actions if action.op in COMPUTE]
        moved = [event["name"] for event in events if event["pid"] == p and event.get("cat") == "collective"]
        assert moved == [str(action) for action in actions if action.op in {Op.GATHER, Op.REDUCE}]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        assert all(one[1] <= other[0] + 1e-6 for one, other in itertools.pairwise(sorted(spans)))
    assert max(end for spans in threads.values() for _, end in spans) == pytest.approx(1000 * made.makespan)
    timed = [event for event in slices if event["cat"] == "collective"]
    assert len(timed) == (0 if made.spec.costs.tasks_alone else sum(made.gathers) + sum(made.reduces))
    besides = [event["name"] for event in slices if event["cat"] == "other" and event["pid"] == 0]
    assert len(besides) == (0 if made.spec.costs.tasks_alone else 2)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == threads.keys()
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert ("chunk inputs kept (micro-batches)" in counters) == any(made.spec.recomputed)
    live = [event["args"]["held"] for event in events if event["ph"] == "C" and event["name"].startswith("live")]
    assert max(live) == pytest.approx(max(made.peak_activations))


# What an eye sees that lacks one kind of cone, in linear light: Machado, Oliveira and Fernandes, A
# Physiologically-based Model for Simulation of Color Vision Deficiency (2009), severity 1.
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(color: colors.Rgb, eye: str) -> tuple[float, float, float]:
    """CIE L*a*b* under D65, where a distance of 2 is just seen."""
    red, green, blue = (
        max(0.0, sum(a * b for a, b in zip(row, colors.linear(color), strict=True))) for row in EYES[eye]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("eye", EYES)
def test_tasks_differ_for_every_eye(eye: str) -> None:
    """Whatever the chunks: ten times what is just seen."""
    shades = {op: [lab(colors.of_task(op, v, 4), eye) for v in range(4)] for op in (Op.F, Op.RF, Op.B, Op.W)}
    for one, other in itertools.combinations(shades, 2):
        for a, b in itertools.product(shades[one], shades[other]):
            assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 > 20, (one, other)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_labels_stand_out(chunks: int) -> None:
    for op, v in itertools.product((Op.F, Op.RF, Op.B, Op.W), range(chunks)):
        color = colors.of_task(op, v, chunks)
        assert colors.contrast(color, colors.on(color)) > 4.5


# --- the command


@pytest.mark.parametrize("form", ["grid", "json", "svg", "html", "trace"])
def test_out_has_what_would_be_printed(form: str, tmp_path: Path) -> None:
    arguments = ["--stages", "2", "--microbatches", "4", "--format", form]
    printed = CliRunner().invoke(schedule, arguments, catch_exceptions=False).output
    file = tmp_path / "step"
    done = CliRunner().invoke(schedule, [*arguments, "--out", str(file)], catch_exceptions=False)
    assert done.output == f"written to {file}\n"
    assert file.read_text(encoding="utf-8").rstrip("\n") == printed.rstrip("\n")


def test_what_cannot_be_drawn_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--format = svg: draws one schedule; leave out --compare"):
        CliRunner().invoke(schedule, ["--compare", "--format", "svg"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--width = 1500: is for --format svg"):
        CliRunner().invoke(schedule, ["--width", "1500", "--format", "html"], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"--out = .*: cannot be written \(No such file or directory\)"):
        CliRunner().invoke(schedule, ["--out", str(tmp_path / "none" / "step.svg")], catch_exceptions=False)


# --- in a browser

# In each picture of the page, goes over a task of micro-batch 3, then off it, and measures every text.
ASK = """
<pre id="answer"></pre>
<script>
const result = [...document.querySelectorAll(".view")].map(view => {
  const found = {}, svg = view.querySelector("svg"), texts = [...svg.querySelectorAll("text")];
  for (const each of document.querySelectorAll(".view")) each.style.display = each == view ? "block" : "none";
  const over = shape => shape.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
  const task = svg.querySelector(".task.m3"), other = svg.querySelector(".task.m2");
  over(task);
  found.over = [tip.hidden, tip.textContent, getComputedStyle(task).opacity, getComputedStyle(other).opacity];
  found.parted = getComputedStyle(task).stroke != "none";
  found.lines = [...svg.querySelectorAll(".live")].map(line => getComputedStyle(line).opacity);
  over(svg.querySelector(".head"));
  found.off = [tip.hidden, getComputedStyle(other).opacity];
  const box = shape => shape.getBoundingClientRect(), all = box(svg);
  const outside = b => b.left < all.left || b.right > all.right || b.bottom > all.bottom;
  found.outside = texts.filter(text => outside(box(text))).map(text => text.textContent);
  const free = texts.filter(text => !text.classList.contains("in")).map(text => [text.textContent, box(text)]);
  const meet = (b, c) => b.left < c.right && c.left < b.right && b.top + 2 < c.bottom && c.top + 2 < b.bottom;
  found.meet = free.flatMap(([name, b], i) =>
    free.slice(i + 1).filter(([, c]) => meet(b, c)).map(([also]) => name + " | " + also));
  const inside = [...svg.querySelectorAll(".lane .in")];
  found.labels = inside.length;
  found.too_wide = inside.filter(text => {
    let shape = text.previousElementSibling;
    while (shape.tagName != "rect" || shape.classList.contains("stripe")) shape = shape.previousElementSibling;
    return box(text).width > box(shape).width;
  }).map(text => text.textContent);
  return found;
});
document.getElementById("answer").textContent = JSON.stringify(result);
</script>
"""


BROWSER = {
    "p4": ({"microbatches": 8}, 1),
    "p4-all-choices": (CASES["all-choices"] | {"microbatches": 60}, 2),
    "p16": ({"stages": 16, "microbatches": 64}, 2),
    "p4-whole-step": (CASES["whole-step"] | {"microbatches": 8}, 1),
    "p16-interleaved": ({"stages": 16, "microbatches": 64, "policy": "interleaved"}, 2),
    "p16-zb-v": ({"stages": 16, "microbatches": 32, "policy": "zb-v"}, 2),
}


@pytest.mark.full
@pytest.mark.parametrize(("choices", "pictures"), BROWSER.values(), ids=BROWSER)
def test_the_page_in_a_browser(choices: dict[str, Any], pictures: int, tmp_path: Path) -> None:
    """The pointer gets its answer, and texts lie neither over each other, nor outside, nor over the edge of a task."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs a browser: chromium, chromium-browser or google-chrome, such as by apt-get install chromium")
    made = program(**choices)
    page = tmp_path / "step.html"
    page.write_text(to_html(made).replace("</html>", f"{ASK}</html>"), encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", profile, "--window-size=1600,1000", "--dump-dom"]
    done = subprocess.run(
        [chromium, *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer = re.search(r'<pre id="answer">(.+?)</pre>', done.stdout, re.DOTALL)
    assert answer, done.stderr[-2000:]
    views = json.loads(html.unescape(answer[1]))
    assert len(views) == pictures  # two: whole and wide
    for view in views:
        hidden, said, over, pale = view["over"]
        assert not hidden
        assert said.startswith("forward (F) of chunk 0, micro-batch 3\nrank 0, from ")
        assert (over, pale) == ("1", "0.3")
        assert sorted(view["lines"]) == ["0.15"] * (made.spec.stages - 1) + ["1"]
        assert view["off"] == [True, "1"]
        assert view["outside"] == view["meet"] == view["too_wide"] == []
    assert views[-1]["labels"] > 0
    assert views[0]["parted"] == (pictures == 1)  # and has not the style of the wide one
