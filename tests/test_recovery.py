"""Recovery over Ray, with faults put in: a run ends with the state and the losses of one that met none, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.run import run_training
from tests.test_actors import configuration
from zeropp_ray.checkpoint.reader import latest
from zeropp_ray.errors import NoProgress, ZeroppError
from zeropp_ray.faults import read_faults

pytestmark = pytest.mark.ray

STEPS = 20
QUICK = {"copy_every": 1, "suspect_s": 1.0, "hang_s": 2.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """One for all runs here; processes of it wait to become members."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    yield started.address
    started.shutdown()


class Outcome:
    """What a run came to."""

    def __init__(self, folder: Path, summary: dict[str, Any], told: list[dict[str, Any]]) -> None:
        self.summary, self.told = summary, told
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        self.validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
        self.digest = latest(folder).digest(state=True)
        events = folder / "events.jsonl"
        self.events = [json.loads(line) for line in events.read_text().splitlines()]
        self.recoveries = [event for event in self.events if event["kind"] == "recovery"]


class Runs:
    """Runs on one cluster, each in a folder of its own; those without faults once."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self._folder, self._number = address, folder, 0
        self._twins: dict[str, Outcome] = {}

    def run(self, layout: tuple[int, int, int, int], *faults: str, **more: Any) -> Outcome:
        self._number += 1
        folder = self._folder / f"run{self._number}"
        folder.mkdir()
        more["train"] = {"steps": STEPS, "warmup_steps": 3, "eval_every": 10, **more.get("train", {})}
        more["recovery"] = {**QUICK, **more.get("recovery", {})}
        config = configuration(*layout, run={"name": f"run{self._number}"}, **more)
        told: list[dict[str, Any]] = []
        inject = read_faults(faults, config)
        summary = run_training(config, address=self._address, run_dir=folder, on_event=told.append, inject=inject)
        return Outcome(folder, summary, told)

    def check(self, layout: tuple[int, int, int, int], *faults: str, **more: Any) -> Outcome:
        """Run with the faults: all is as without them, and all have happened."""
        settings = {section: values for section, values in more.items() if section in ("model", "parallel", "train")}
        key = repr((layout, sorted(settings.items())))
        if key not in self._twins:
            self._twins[key] = self.run(layout, **settings)
        twin, hurt = self._twins[key], self.run(layout, *faults, **more)
        assert hurt.losses == twin.losses
        assert [step for step, _ in hurt.losses] == list(range(1, STEPS + 1))
        assert hurt.validation == twin.validation
        assert hurt.digest == twin.digest
        assert not [event for event in hurt.told if "came to another loss" in event.get("text", "")]
        return hurt


@pytest.fixture(scope="module")
def runs(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(cluster, tmp_path_factory.mktemp("runs"))


THREE = (3, 1, 1, 1)
ANYWHERE = ["F", "B", "W", "gather", "release", "reduce", "send", "recv", "vote", "commit", "copy"]


def test_members_killed_stopped_and_hung_in_one_run(runs: Runs) -> None:
    hurt = runs.check(
        THREE,
        "kill stage=0 step=1 at=B",
        "stop stage=1 step=4 at=W",
        "hang stage=2 step=7 at=F",
        "kill stage=1 step=9 at=send nth=3",
        "kill stage=2 step=11 at=commit",
        "net stage=0 step=14 at=B",
        "stop stage=1 step=20 at=checkpoint",  # the save at the end
    )
    causes = [event["cause"] for event in hurt.recoveries]
    assert causes == ["death", "stop", "hang", "death", "death", "disconnect", "stop"]
    assert [event["source"] for event in hurt.recoveries][1:] == ["copies"] * 6
    assert [event["action"] for event in hurt.recoveries] == [*["replace"] * 5, "retry", "replace"]
    first = hurt.recoveries[0]
    assert first["member"].startswith("stage 0 shard 0 replica 0 (process ")
    assert first["at"].startswith("step 1 at 0B0 (instruction ")
    assert "its process is stopped" in hurt.recoveries[1]["evidence"]
    assert "a thread holds the interpreter lock" in hurt.recoveries[2]["evidence"]
    assert hurt.summary["recoveries"] == {"death": 3, "stop": 2, "hang": 1, "disconnect": 1}
    assert 0 < hurt.summary["effective_share"] < 1


@pytest.mark.full
def test_a_short_stop_is_no_fault(runs: Runs) -> None:
    hurt = runs.check(THREE, "stop stage=1 step=5 at=F for=1", recovery={"hang_s": 5.0, "suspect_s": 3.0})
    assert not hurt.recoveries


def test_spares_members_of_one_stage_and_a_fault_during_a_recovery(runs: Runs) -> None:
    hurt = runs.check(
        (2, 2, 2, 1),
        "kill stage=1 member=1 step=9 at=W",
        "kill stage=0 member=0 step=12 at=B; kill stage=0 member=1 step=12 at=B",
        "kill stage=0 member=0 step=16 at=B; kill stage=1 member=1 step=16 at=recovery",
        recovery={"spares": 1, "copy_every": 3},
    )
    assert hurt.recoveries[0]["action"] == "spare"
    assert hurt.recoveries[0]["replayed"] in (2, 5)  # the last copy may not have been whole
    assert {event["source"] for event in hurt.recoveries} == {"copies"}
    assert hurt.summary["replayed_steps"] >= 4


def test_buddies_together_go_back_to_the_checkpoint(runs: Runs) -> None:
    hurt = runs.check(
        (2, 2, 1, 1),
        "kill stage=0 step=13 at=gather; kill stage=1 step=13 at=gather",
        checkpoint={"every_steps": 5},
    )
    assert [event["source"] for event in hurt.recoveries][-1:] == ["checkpoint"]
    assert hurt.recoveries[-1]["from_step"] == 10


def test_without_copies_a_run_begins_anew(runs: Runs) -> None:
    hurt = runs.check((2, 2, 1, 1), "kill stage=0 step=3 at=W", recovery={"copy_every": 0})
    assert [(event["source"], event["replayed"]) for event in hurt.recoveries] == [("start", 2)]


def test_replicas_are_each_other_s_copies(runs: Runs) -> None:
    hurt = runs.check((2, 1, 1, 2), "kill stage=1 member=0 step=5 at=B", "kill stage=0 member=1 step=9 at=commit")
    assert [event["source"] for event in hurt.recoveries] == ["copies", "copies"]


@pytest.mark.full
def test_a_slow_member_is_told_and_replaced_if_that_is_wanted(runs: Runs) -> None:
    fault, factor = "slow=20x stage=1 step=4", {"slow_factor": 4.0}
    told = runs.check((2, 2, 1, 1), fault, recovery=factor)
    assert not told.recoveries
    (line,) = [event["text"] for event in told.told if "is slow" in event.get("text", "")]
    assert line.startswith("stage 1 shard 0 replica 0 (process ")
    replaced = runs.check((2, 2, 1, 1), fault, recovery={**factor, "replace_slow": True})
    assert [event["cause"] for event in replaced.recoveries] == ["slow"]


def test_a_run_without_progress_ends(runs: Runs) -> None:
    faults = [f"kill stage=1 step=5 at={at}" for at in ("F", "recovery")]
    with pytest.raises(NoProgress, match=r"no new step over 1 recoveries in a row .*died in"):
        runs.run((2, 2, 1, 1), *faults, recovery={"max_stuck": 1})


def test_without_recovery_the_first_fault_ends_the_run(runs: Runs) -> None:
    with pytest.raises(ZeroppError, match=r"^stage 1 shard 0 replica 0 \(process \d+ on .*\) died in step 3 at 0F0 "):
        runs.run((2, 1, 1, 1), "kill stage=1 step=3", recovery={"enabled": False})


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "stop", "hang"])
@pytest.mark.parametrize(("layout", "stage"), [*((THREE, p) for p in range(3)), *(((2, 1, 1, 2), p) for p in range(2))])
def test_every_point_of_a_step(runs: Runs, kind: str, layout: tuple[int, int, int, int], stage: int) -> None:
    points = [at for at in ANYWHERE if at != "copy" or layout[3] == 1]  # replicas exchange no copies
    faults = [f"{kind} stage={stage} step={2 + i} at={at}" for i, at in enumerate(points)]
    other = (stage + 1) % layout[0]
    faults += [f"kill stage={other} step=15; {kind} stage={stage} step=15 at=recovery"]
    faults += [f"{kind} stage={stage} step=17 at=checkpoint"]
    # Without evaluations, whose flush would take the commit out of its step.
    hurt = runs.check(layout, *faults, checkpoint={"every_steps": 17}, train={"eval_every": 0})
    assert len(hurt.recoveries) == len(points) + 2
