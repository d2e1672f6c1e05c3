"""Many faults in one run: it ends as if undisturbed, and nothing piles up on the way."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.run import run_training
from tests.test_actors import configuration
from zeropp_ray.checkpoint.reader import latest
from zeropp_ray.faults import read_faults

pytestmark = [pytest.mark.ray, pytest.mark.full]

STEPS = 340
FAULTS = "random seed=3 rate=0.17"


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    """Samples of what the processes of a run hold, taken after each recovery."""
    import ray

    samples: list[dict[str, int]] = []

    def sample(folder: Path) -> None:
        (driver,) = re.findall(r"process (\d+)", (folder / ".driver.lock").read_text())
        members = [member["pid"] for member in json.loads((folder / "members.json").read_text())]
        held = {"actors": 0, "members": 0}
        for process in psutil.Process().children(recursive=True):
            held["actors"] += any("ray::StageWorker" in word for word in process.cmdline())
        for name, pids in (("driver", [int(driver)]), ("member", members)):
            processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
            held["members"] += len(processes) if name == "member" else 0
            held[f"{name} files"] = max(process.num_fds() for process in processes)
            held[f"{name} threads"] = max(process.num_threads() for process in processes)
            held[f"{name} MiB"] = max(process.memory_info().rss for process in processes) >> 20
        held["groups"] = sum(group["state"] == "CREATED" for group in ray.util.placement_group_table().values())
        held["shared memory"] = len(list(Path("/dev/shm").iterdir()))
        samples.append(held)

    return sample, samples


def test_fifty_random_faults(tmp_path: Path, watched: Any) -> None:
    sample, samples = watched
    limits = {"copy_every": 1, "suspect_s": 1.0, "hang_s": 2.0, "spares": 1}
    outcomes = []
    for name, faults in (("twin", []), ("hurt", [FAULTS])):
        train = {"steps": STEPS, "warmup_steps": 3, "eval_every": 0}
        config = configuration(2, 2, 2, 1, run={"name": name}, train=train, recovery=limits)
        folder = tmp_path / name
        folder.mkdir()
        inject = read_faults(faults, config)

        def seen(event: dict[str, Any], folder: Path = folder) -> None:
            if event["kind"] == "recovery":
                sample(folder)

        summary = run_training(config, address=None, run_dir=folder, on_event=seen, inject=inject)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        outcomes.append((latest(folder).digest(state=True), [(line["step"], line.get("loss")) for line in lines]))
    assert outcomes[0] == outcomes[1]
    assert sum(summary["recoveries"].values()) >= 50
    third = len(samples) // 3
    print(json.dumps({"first": samples[0], "last": samples[-1], "recoveries": summary["recoveries"]}))
    for what, allowed in (
        ("actors", 0),
        ("groups", 0),
        ("shared memory", 1),
        ("driver files", 10),
        ("driver threads", 4),
        ("member files", 10),
        ("member threads", 4),
        ("driver MiB", 40),
        ("member MiB", 40),
    ):
        early = statistics.median(sample[what] for sample in samples[:third])
        late = statistics.median(sample[what] for sample in samples[-third:])
        assert late <= early + allowed, f"{what}: {early} at first, {late} at last"
