"""Judgements without processes: who stands still, who is slow, what is recovered from and from where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.failure import Watch, _peer_lost
from actors.folder import RunFolder
from actors.health import SLOW_STEPS, Slowness, all_wait, standing_still
from actors.nodes import Nodes, Sight
from actors.progress import BETWEEN, EVALUATION, START, Position, ProgressFile, read_progress
from actors.recovery import History, Source, choose_source, judge
from actors.worker import StageWorker
from zeropp_ray.comm.base import PeerLost
from zeropp_ray.config import RecoverySection, RunConfig
from zeropp_ray.errors import ConfigError, MemberError, NoProgress, ZeroppError
from zeropp_ray.layout import Member
from zeropp_ray.schedule import compile_program, resolve

A, B = Member(0, 0, 0), Member(1, 0, 0)


def sight(
    age_s: float, beat_age_s: float = 0.1, *, step: int = 3, waiting: bool = False, stopped: bool = False
) -> Sight:
    return Sight(Position(step, 5, age_s, beat_age_s, 7 + waiting, 7), stopped)


FINE = sight(0.2)


@pytest.mark.parametrize(
    ("seen", "cause", "words"),
    [
        (sight(9.0, 9.0, stopped=True), "stop", "no sign of life for 9.0 s, its process is stopped"),
        (sight(9.0, 9.0), "hang", "no sign of life for 9.0 s, its process runs: a thread holds the interpreter lock"),
        (sight(0.1, 9.0, waiting=True), "hang", "no sign of life"),
        (sight(21.0), "hang", "in one instruction for 21.0 s, and waits for nobody"),
        (sight(21.0, step=EVALUATION), "hang", "in one instruction"),
        (sight(99.0, 31.0, step=START), "hang", "no sign of life for 31.0 s"),
        (FINE._replace(alive=False), "death", "its process is gone"),
        (None, "node", "its node does not answer"),
    ],
)
def test_who_stands_still(seen: Sight | None, cause: str, words: str) -> None:
    (stuck,) = standing_still({A: FINE, B: seen}, {A, B}, limit_s=5, instruction_s=20)
    assert (stuck.member, stuck.cause) == (B, cause)
    assert stuck.evidence.startswith(words)


@pytest.mark.parametrize(
    "seen",
    [
        sight(19.0),  # a long instruction
        sight(99.0, waiting=True),  # waits for somebody else
        sight(99.0, step=START),
        sight(9.0, 9.0, step=START),  # imports
        sight(99.0, step=BETWEEN),  # between steps the driver may take its time
        Sight(None, stopped=False),  # has not begun
    ],
)
def test_who_does_not(seen: Sight) -> None:
    assert not standing_still({A: FINE, B: seen}, {A, B}, limit_s=5, instruction_s=20)


def test_who_is_done_is_not_blamed_for_its_place_but_for_its_silence() -> None:
    assert not standing_still({A: FINE, B: sight(99.0)}, {A}, limit_s=5, instruction_s=20)
    assert standing_still({A: FINE, B: sight(99.0, 9.0)}, {A}, limit_s=5, instruction_s=20)


def test_a_node_is_lost_when_it_has_not_answered_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("actors.failure.time.monotonic", lambda: clock[0])
    watch = Watch(RunConfig.from_dict({"recovery": {"suspect_s": 2, "hang_s": 5}}), [], Nodes(), RunFolder(*3 * [""]))
    seen = []
    for clock[0], sights in ((0, {A: FINE, B: None}), (4, {A: FINE, B: FINE}), (6, {B: None}), (12, {B: None})):
        seen.append(watch._patiently(sights)[B])
    assert seen == [Sight(None, stopped=False), FINE, Sight(None, stopped=False), None]


def test_a_message_is_lost_if_all_wait() -> None:
    waits = sight(9.0, waiting=True)
    assert all_wait({A: waits, B: waits}, {A, B}, 5) == "all 2 that are not done have waited for a transfer for 9.0 s"
    assert all_wait({A: waits, B: FINE}, {A}, 5).startswith("all 1 ")
    for other in (sight(9.0), sight(1.0, waiting=True)):
        assert not all_wait({A: waits, B: other}, {A, B}, 5)


def test_slow_is_told_once_against_the_plan_and_the_peers() -> None:
    evidence = "3.0 times as long as its peers for what the plan gives it (F 1.0 times, B 5.0 times, W 1.0 times)"
    planned = {A: {"F": 1.0, "B": 2.0, "W": 1.0}, B: {"F": 2.0, "B": 4.0, "W": 2.0}}  # twice the work
    slowness = Slowness(planned, 2.0)
    even = {A: {"F": 0.1, "B": 0.2, "W": 0.1}, B: {"F": 0.2, "B": 0.4, "W": 0.2}}
    slow = {A: even[A], B: {"F": 0.2, "B": 2.0, "W": 0.2}}
    assert not [found for _ in range(9) for found in slowness.slow(even)]
    told = [found for _ in range(3 * SLOW_STEPS) for found in slowness.slow(slow)]
    assert told == [(B, f"for 5 steps {evidence}")]
    slowness.slow(even)
    assert [found for _ in range(SLOW_STEPS) for found in slowness.slow(slow)], "slow again"
    slowness.slow(even)
    assert not [found for _ in range(SLOW_STEPS - 1) for found in slowness.slow(slow)]
    assert not Slowness(planned, 0.0).slow(slow)


def test_budgets_by_cause() -> None:
    limits = RecoverySection(max_deaths=3, max_hangs=1, max_stuck=100)
    history = History()
    for cause, lost in (("death", 1), ("node", 2), ("hang", 1), ("disconnect", 0)):
        judge(cause, lost, "step 3", "it died", history, limits)
    with pytest.raises(ZeroppError, match=r"^it died; recovery\.max_deaths = 3 is used up$"):
        judge("death", 1, "step 3", "it died", history, limits)
    with pytest.raises(ZeroppError, match=r"^it stopped; recovery\.max_hangs = 1 is used up$"):
        judge("stop", 1, "step 3", "it stopped", history, limits)
    with pytest.raises(ZeroppError, match=r"^it died$"):
        judge("death", 1, "step 3", "it died", History(), RecoverySection(enabled=False))


def test_an_error_is_tried_again_once() -> None:
    history = History()
    judge("error", 0, "step 3 at 0F0", "boom", history, RecoverySection())
    history.advanced()
    judge("error", 0, "step 3 at 0F0", "boom", history, RecoverySection())  # long ago
    judge("error", 0, "step 9 at 0F0", "boom", history, RecoverySection())
    with pytest.raises(ZeroppError, match=r"^boom \(for the second time, in the same place\)$"):
        judge("error", 0, "step 9 at 0F0", "boom", history, RecoverySection())


def test_no_progress_ends_a_run() -> None:
    history, limits = History(), RecoverySection(max_stuck=2)
    for _ in range(5):
        judge("death", 1, "step 3", "it died", history, limits)
        judge("death", 1, "step 3", "it died", history, limits)
        history.advanced()
    judge("death", 1, "step 3", "it died", history, limits)
    judge("death", 1, "step 3", "it died", history, limits)
    with pytest.raises(
        NoProgress, match=r"no new step over 2 recoveries in a row .* the last fault: it died"
    ) as caught:
        judge("death", 1, "step 3", "it died", history, limits)
    assert caught.value.exit_code == 70


def test_the_newest_state_is_taken() -> None:
    old, new = (4, Path("old")), (9, Path("new"))
    assert choose_source([7, 6], old) == Source("copies", 7)
    assert choose_source([7, 6], new) == Source("checkpoint", *new)
    assert choose_source([0], None) == Source("copies", 0)
    assert choose_source([], old) == Source("checkpoint", *old)
    assert choose_source([], None) == Source("start", 0)


def test_limits_are_ordered() -> None:
    with pytest.raises(ConfigError, match=r"recovery\.hang_s = 5\.0: must be above recovery\.suspect_s = 10"):
        RecoverySection(hang_s=5.0)
    values = {"recovery": {"hang_s": 30.0}, "resources": {"step_timeout_s": 20.0}}
    with pytest.raises(ConfigError, match=r"recovery\.hang_s = 30: must be below resources\.step_timeout_s = 20"):
        RunConfig.from_dict(values)
    values["recovery"]["enabled"] = False  # type: ignore[assignment]
    RunConfig.from_dict(values)


def test_a_position_is_read_while_its_writer_cannot_answer(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "none") is None
    program = compile_program(resolve(stages=1, chunks=1, microbatches=1)).ranks[0]
    file = ProgressFile(tmp_path / "member")
    file.beat(3, 2)
    file.begin(4)
    for position in range(len(program) + 1):
        file(position)
    at = read_progress(tmp_path / "member")
    assert at is not None
    assert (at.step, at.position, at.waiting) == (4, len(program), True)
    assert 0 <= at.age_s < 5
    assert 0 <= at.beat_age_s < 5
    seconds = file.seconds(program)
    assert set(seconds) == {"F", "RF", "B", "W"}
    assert seconds["F"] > 0
    assert seconds["RF"] == 0


@pytest.mark.parametrize("error", [MemberError("x", peer_lost=True), PeerLost("x")])
def test_a_lost_peer_is_nobody_s_own_error(error: Exception) -> None:
    assert _peer_lost(error)
    assert not _peer_lost(MemberError("x"))


def test_who_left_a_step_is_not_blamed_for_its_place_in_it(tmp_path: Path) -> None:
    worker = StageWorker.__ray_metadata__.modified_class()  # type: ignore[attr-defined]
    worker._progress, worker._member = ProgressFile(tmp_path / "member"), SimpleNamespace(drop_step=lambda: None)
    worker._begin(step=5)
    worker._progress(3)
    worker.drop_step()
    at = read_progress(tmp_path / "member")
    assert at is not None
    assert at.step == BETWEEN
