"""Where the time goes from the command to the first step: a small run, taken apart.

The parts run as they do under ``zeropp train``: the same cluster, and the driver's own :class:`~actors.driver.Run` in
an actor, with a clock between its parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = {
    "model": {"dim": 32, "heads": 2, "seq_len": 32},
    "parallel": {"stages": 2, "chunks": 2, "shards": 2, "microbatches": 4, "microbatch_size": 1},
    "train": {"steps": 3, "eval_sequences": 8},
}
PATIENCE_S = 300.0


def start_up() -> dict[str, float]:
    """Seconds by part, in order. ``all of it`` is a real ``zeropp train``, from its start to the record of its first
    step.
    """
    parts: dict[str, float] = {}
    with _timed(parts, "imports of the command"):
        subprocess.run([sys.executable, "-c", "import jobs.cli, actors.run"], check=True)
    from actors.run import cluster
    from zeropp_ray.config import RunConfig
    from zeropp_ray.data.corpus import load_corpus
    from zeropp_ray.planner.plan import make_plan

    config = RunConfig.from_dict(SETTINGS)
    with _timed(parts, "text and plan"):
        corpus = load_corpus(config)
        plan = make_plan(config)
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        began = time.monotonic()
        with cluster(config, None, lambda event: None):
            parts["Ray"] = time.monotonic() - began
            parts |= _driven(config, plan, corpus, Path(folder))
        parts["all of it"] = _real(Path(folder))
    return parts


@contextmanager
def _timed(parts: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    parts[name] = time.monotonic() - began


def _driven(config: Any, plan: Any, corpus: Any, folder: Path) -> dict[str, float]:
    """The driver's part, by its own clock."""
    import ray

    from actors.driver import Run
    from actors.folder import RunFolder
    from actors.members import Members
    from zeropp_ray.checkpoint import run_id
    from zeropp_ray.checkpoint.resume import identity_of

    class TimedMembers(Members):
        def __init__(self, note: Callable[[str], None], *arguments: Any) -> None:
            super().__init__(*arguments)
            self.note = note

        def place(self) -> None:
            super().place()
            self.note("placement")

        def build(self, members: Any) -> None:
            self.note("members' processes")
            super().build(members)
            self.note("build")

        def join(self, faults: Any = None) -> None:
            super().join(faults)
            self.note("rendezvous")

    class TimedRun(Run):
        """Notes the time at the end of each part. ``called``: when its process was asked for."""

        def __init__(self, called: float, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._members = TimedMembers(self.note, *arguments)
            self.parts: dict[str, float] = {}
            self.last = called
            self.note("driver's process")

        def note(self, part: str) -> None:
            now = time.monotonic()
            self.parts[part] = now - self.last
            self.last = now

        def _after(self, step: int, votes: Any) -> None:
            super()._after(step, votes)
            self.note("first step" if step == 1 else "a later step")

    @ray.remote(num_cpus=0)
    def drive(*arguments: Any) -> dict[str, float]:
        run = TimedRun(*arguments)
        with run.members():
            for _ in run.train():
                pass
        return run.parts

    run_id.create(folder)
    where = RunFolder(folder, folder / "scratch", str(Path.cwd()))
    data = identity_of(corpus)
    return ray.get(drive.remote(time.monotonic(), config, plan, where, data))


def _real(folder: Path) -> float:
    """A run of its own, from the start of its process to the first line of its metrics."""
    settings = [f"--set={section}.{key}={value}" for section, keys in SETTINGS.items() for key, value in keys.items()]
    command = [sys.executable, "-m", "zeropp_ray", "train", "--name=real", f"--set=run.dir={folder}", *settings]
    metrics, began = folder / "real" / "metrics.jsonl", time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        while not (metrics.exists() and metrics.stat().st_size):
            if run.poll() or time.monotonic() - began > PATIENCE_S:
                run.kill()
                raise RuntimeError(f"zeropp train did not reach its first step: {run.stderr and run.stderr.read()}")
            time.sleep(0.01)
        seconds = time.monotonic() - began
        run.communicate()
    return seconds


if __name__ == "__main__":
    print(json.dumps(start_up(), indent=1))
