"""Who is to blame when nothing moves, and who is slow: judged from what was seen, by functions that do nothing.

A member that is stopped, or of which a thread holds the interpreter lock, no longer beats. One that hangs otherwise
beats, but its program stands still while it waits for nobody. If everyone waits for somebody, a connection is broken.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from actors.nodes import Sight
from actors.progress import OPS as TIMED
from actors.progress import START
from zeropp_ray.layout import Member

SLOW_STEPS = 5  # so many in a row make a member slow
OPS = tuple(op.name for op in TIMED)
START_S = 30.0  # how long a member that starts may give no sign of life: imports hold the interpreter lock
PATIENCE = 10  # times the longest step so far: how long one instruction may take, if that is longer than the limit


@dataclass(frozen=True)
class Stuck:
    """A member that stands still: ``cause`` stop, hang, death or node, and the evidence in words."""

    member: Member
    cause: str
    evidence: str


def standing_still(
    sights: Mapping[Member, Sight | None], busy: set[Member], limit_s: float, instruction_s: float
) -> list[Stuck]:
    """The members that hold up the others. ``sights``: None where the node does not answer; ``busy``: those that have
    not finished the call at hand, ``limit_s``: how long a sign of life may be missing, ``instruction_s``: how long one
    instruction may take.
    """
    found = []
    for member, sight in sights.items():
        if sight is None:
            found.append(Stuck(member, "node", "its node does not answer"))
            continue
        if not sight.alive:
            found.append(Stuck(member, "death", "its process is gone"))
            continue
        at = sight.at
        if at is None:
            continue
        if at.beat_age_s > (max(limit_s, START_S) if at.step == START else limit_s):
            cause, why = (
                ("stop", "is stopped") if sight.stopped else ("hang", "runs: a thread holds the interpreter lock")
            )
            found.append(Stuck(member, cause, f"no sign of life for {at.beat_age_s:.1f} s, its process {why}"))
        elif member in busy and at.runs and not at.waiting and at.age_s > instruction_s:
            found.append(Stuck(member, "hang", f"in one instruction for {at.age_s:.1f} s, and waits for nobody"))
    return found


def all_wait(sights: Mapping[Member, Sight | None], busy: set[Member], limit_s: float) -> str:
    """The evidence that a message is lost: for ``limit_s`` all busy members have waited for one; else empty."""
    seen = [sight.at for me, sight in sights.items() if me in busy and sight is not None and sight.at is not None]
    if not seen or not all(at.runs and at.waiting and at.age_s > limit_s for at in seen):
        return ""
    return f"all {len(seen)} that are not done have waited for a transfer for {min(at.age_s for at in seen):.1f} s"


class Slowness:
    """Compares what each member's instructions take with the plan and with its peers, step by step."""

    def __init__(self, planned: Mapping[Member, Mapping[str, float]], factor: float) -> None:
        """``planned``: of each member the cost of its F, RF, B and W in a step, in any one unit."""
        self._planned, self._factor = planned, factor
        self._in_a_row: Counter[Member] = Counter()

    def slow(self, seconds: Mapping[Member, Mapping[str, float]]) -> list[tuple[Member, str]]:
        """The members that have been slow for :data:`SLOW_STEPS` steps, with the evidence; each is told once, until it
        is faster again. ``seconds``: by member and instruction, of the last step.
        """
        if not self._factor or len(seconds) < 2:
            return []
        rates = {m: self._rate(m, taken, OPS) for m, taken in seconds.items()}
        found = []
        for member, rate in rates.items():
            times = rate / max(statistics.median(other for m, other in rates.items() if m != member), 1e-12)
            self._in_a_row[member] = self._in_a_row[member] + 1 if times > self._factor else 0
            if self._in_a_row[member] == SLOW_STEPS:
                found.append((member, self._evidence(member, times, seconds)))
        return found

    def forget(self) -> None:
        """Begin anew: members were replaced, or steps are taken again."""
        self._in_a_row.clear()

    def _rate(self, member: Member, seconds: Mapping[str, float], ops: tuple[str, ...]) -> float:
        planned = sum(self._planned[member].get(op, 0) for op in ops)
        return sum(seconds.get(op, 0) for op in ops) / planned if planned else 0.0

    def _evidence(self, member: Member, times: float, seconds: Mapping[Member, Mapping[str, float]]) -> str:
        by_op = {}
        for op in OPS:
            peers = [rate for m in seconds if m != member and (rate := self._rate(m, seconds[m], (op,)))]
            if peers and (mine := self._rate(member, seconds[member], (op,))):
                by_op[op] = mine / statistics.median(peers)
        worst = ", ".join(f"{op} {value:.1f} times" for op, value in by_op.items())
        return f"for {SLOW_STEPS} steps {times:.1f} times as long as its peers for what the plan gives it ({worst})"
