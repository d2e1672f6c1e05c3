"""Notices that a node of the run is to go, such as a spot instance that is taken back: its *drain* in Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

EVERY_S = 2.0  # between two questions
ANSWER_S = 1.0  # how long an answer may take; it usually takes half a millisecond
LATER_S = 100.0  # between two questions if there was no answer: they may cost a run no more than 1%


class DrainWatch:
    """Asks the cluster now and then which nodes are being drained. Never fails: no answer, no drain."""

    def __init__(self, nodes: Callable[[], Mapping[str, str]]) -> None:
        """``nodes``: those that the run uses now, host by Ray's id. The node of this process is one too."""
        self._nodes = nodes
        self._here = {ray.get_runtime_context().get_node_id(): ray.util.get_node_ip_address()}
        self._next = 0.0

    def check(self) -> str:
        """What is to go and when, in words; empty if nothing is, and between two questions."""
        now = time.monotonic()
        if now < self._next:
            return ""
        try:
            # Ray has no public way to ask; this one has a time limit.
            worker: Any = ray._private.worker.global_worker
            draining: dict[str, int] = worker.gcs_client.get_draining_nodes(timeout=ANSWER_S)
        except Exception:  # of whatever kind: the run needs no answer
            self._next = now + LATER_S
            return ""
        self._next = now + EVERY_S
        used = {**self._nodes(), **self._here}
        return "; ".join(
            f"the cluster drains node {used[node]} (id {node[:12]}), {_when(deadline)}"
            for node, deadline in sorted(draining.items())
            if node in used
        )


def _when(deadline_ms: int) -> str:
    """``deadline_ms``: Unix time in milliseconds; 0: none was given."""
    if not deadline_ms:
        return "which has no deadline"
    return f"which is to be gone in {max(0.0, deadline_ms / 1000 - time.time()):.0f} s"
