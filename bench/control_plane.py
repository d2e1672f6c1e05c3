"""The driver's round over many members: actors that compute nothing and vote at once, so only control is left."""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 4  # actors that start together; each start is a process
LEAST_FREE_BYTES = 3 * 2**30  # of this machine's memory: no further batch is started with less
WARM_UP_ROUNDS = 10


@dataclass(frozen=True)
class Rounds:
    """Of one number of members."""

    members: int
    seconds: list[float]  # from the calls to the decision, by round
    process_s: float  # the driver's CPU time, per round
    member_bytes: int  # memory of a member's process, its part of what processes share included; 0 if not known
    start_s: float  # from the first member's start to the last one's answer


def control_plane(counts: Sequence[int], rounds: int) -> Iterator[Rounds]:
    """``rounds`` rounds at each of the ascending ``counts`` of members, all on a Ray cluster of their own.

    A round is what ``actors.driver`` does per step: one call per member that carries the last decision, all votes
    collected, the decision made. Ends early, with what it has, when the machine's memory runs low.
    """
    from actors.failure import Watch, quietly
    from actors.folder import RunFolder
    from actors.nodes import Nodes
    from actors.stage_group import MemberHandle
    from zeropp_ray.config import RunConfig
    from zeropp_ray.layout import Member
    from zeropp_ray.vote import decide

    with _cluster() as ray:
        voter = _voter(ray)
        handles: list[MemberHandle] = []
        watch = Watch(RunConfig(), handles, Nodes(), RunFolder(Path(), Path(), ""))
        start = time.monotonic()
        for count in counts:
            while len(handles) < count:
                if free_bytes() < LEAST_FREE_BYTES:
                    return
                batch = range(len(handles), min(count, len(handles) + BATCH))
                new = [MemberHandle(Member(p, 0, 0), voter.remote()) for p in batch]
                ray.get([member.actor.advance.remote(0, None) for member in new])
                handles += new
            started = time.monotonic() - start
            decision, process = None, 0.0
            seconds: list[float] = []
            for step in range(1, 1 + WARM_UP_ROUNDS + rounds):
                if step == 1 + WARM_UP_ROUNDS:
                    process = time.process_time()
                    seconds.clear()
                began = time.monotonic()
                calls = [member.actor.advance.remote(step, decision) for member in handles]
                votes = quietly(watch.collect(calls, timeout_s=60, programs=()))
                decision = decide(step, votes, 1.0)
                seconds.append(time.monotonic() - began)
            process = time.process_time() - process
            memory = ray.get([member.actor.memory.remote() for member in handles])
            yield Rounds(count, seconds, process / rounds, int(statistics.mean(memory)), started)


@contextmanager
def _cluster() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


def _voter(ray: Any) -> Any:
    from zeropp_ray.vote import Decision, Vote

    @ray.remote(num_cpus=0)
    class Voter:
        """As a StageWorker without a member, so that its process has no torch."""

        def advance(self, step: int, decision: Decision | None) -> Vote:
            return Vote(1.0, 1, 1.0, 0.0)

        def memory(self) -> int:
            return _proc("/proc/self/smaps_rollup", "Pss:") or 0

    return Voter


def free_bytes() -> int:
    """Memory of this machine that processes can still take; a lot where that is not told."""
    return _proc("/proc/meminfo", "MemAvailable:") or 2**60


def _proc(file: str, name: str) -> int | None:
    """A line of a file of Linux that is in KiB, as bytes."""
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
