"""Calls to all members, watched: from failed references and signs of life to one cause, the first real one and not the
cascade of lost peers behind it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from actors.folder import RunFolder
from actors.health import PATIENCE, all_wait, standing_still
from actors.nodes import Nodes, Place, Sight
from actors.progress import BETWEEN, EVALUATION, START, STARTING, Position
from actors.stage_group import MemberHandle
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import MemberError, ZeroppError
from zeropp_ray.layout import Member
from zeropp_ray.schedule import Action

T = TypeVar("T")
Event = dict[str, Any]
Programs = Sequence[Sequence[Action]]

SETTLE_S = 1.0  # how long a death behind lost peers is waited for; Ray notices a killed process in 0.02 to 0.04 s
TICK_S = 0.5  # how often signs of life are looked for, at most: shorter steps never are
PAUSE_S = 1.0  # how much later than asked this process may come back from a wait
STEPS = 10  # of how many the longest tells how long an instruction may take
LATE_S = 30.0  # how long after the transfers' own time limit a call is given up


class MemberFault(ZeroppError):
    """A call to the members failed. The text is the run's error if it ends for that.

    ``cause``: death, stop, hang, node, slow, error (a member raised something) or disconnect (a connection broke, with
    all members alive). ``lost``: the members that need a successor. ``at`` and ``evidence``: in words. ``trace``: of an
    error, for the log. ``noticed_s``: how long ago the first of the lost was last seen to live; it was hit after that.
    """

    def __init__(
        self,
        text: str,
        cause: str,
        lost: Sequence[Member] = (),
        *,
        at: str = "",
        evidence: str = "",
        trace: str = "",
        noticed_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.cause, self.lost, self.at, self.evidence, self.trace = cause, tuple(lost), at, evidence, trace
        self.noticed_s = noticed_s


class Watch:
    """Waits for calls to members and says what went wrong."""

    def __init__(self, config: RunConfig, members: list[MemberHandle], nodes: Nodes, folder: RunFolder) -> None:
        """``members``: as they are at any time."""
        self._config, self._members, self._nodes, self._folder = config, members, nodes, folder
        self._suspected: set[Member] = set()
        self._unseen: dict[Member, float] = {}  # since when the nodes of these have not answered
        self.step_s: deque[float] = deque(maxlen=STEPS)  # what the last ones took

    def collect(self, calls: list[Any], *, timeout_s: float, programs: Programs) -> Generator[Event, None, list[Any]]:
        """The results of one call per member, in member order; on the way events about members that stand still.

        Raises MemberFault with the one cause as soon as any call fails, when a member stands still for too long, and
        when all take longer than ``timeout_s`` and :data:`LATE_S`. ``programs``: of the step at hand, by stage, to name
        the instruction a member was in.
        """
        began = looked = time.monotonic()
        tick = min(TICK_S, self._config.recovery.suspect_s / 2)
        while True:
            try:
                return ray.get(calls, timeout=tick)
            except GetTimeoutError:
                # If this process stood still, as all do when a machine is suspended, members get time to beat first.
                stood_still, looked = time.monotonic() - looked > tick + PAUSE_S, time.monotonic()
                if not stood_still:
                    yield from self.check(calls, programs)
                if time.monotonic() - began > timeout_s + LATE_S:
                    raise self._late(calls, timeout_s, programs) from None
            except RayError:
                raise self._diagnose(calls, programs) from None

    def beyond_help(self, members: Sequence[MemberHandle], *, waiting: bool) -> set[Member]:
        """Those of ``members`` that have given no sign of life for ``recovery.hang_s``, and if ``waiting`` is set those
        that still wait for a transfer.
        """
        sights = self._patiently(self._sights(members))
        lost = {each.member for each in standing_still(sights, set(), self._config.recovery.hang_s, math.inf)}
        stuck = {me for me, sight in sights.items() if sight is not None and sight.at is not None and sight.at.waiting}
        return lost | stuck if waiting else lost

    # -- signs of life ------------------------------------------------------------------------------------------------

    def _sights(self, members: Sequence[MemberHandle]) -> dict[Member, Sight | None]:
        by_node: dict[str, list[MemberHandle]] = {}
        sights: dict[Member, Sight | None] = {}
        for member in members:
            if member.identity is None:
                sights[member.me] = Sight(STARTING, stopped=False)
            else:
                by_node.setdefault(member.identity.node_id, []).append(member)
        for node, here in by_node.items():
            places = [self._place(member) for member in here]
            seen = self._nodes.look(node, places)
            sights |= {member.me: seen[i] if seen else None for i, member in enumerate(here)}
        return sights

    def _place(self, member: MemberHandle) -> Place:
        identity = member.identity
        assert identity is not None
        return Place(identity.pid, identity.started, self._folder.progress_of(member.me, identity.pid))

    def _patiently(self, sights: Mapping[Member, Sight | None]) -> dict[Member, Sight | None]:
        """A node is lost if it has not answered for ``recovery.hang_s``: its agent may be about to start."""
        now, limit = time.monotonic(), self._config.recovery.hang_s
        self._unseen = {me: self._unseen.get(me, now) for me, sight in sights.items() if sight is None}
        early = {me for me, since in self._unseen.items() if now - since < limit}
        return {me: Sight(None, stopped=False) if me in early else sight for me, sight in sights.items()}

    def check(self, calls: list[Any], programs: Programs) -> Generator[Event, None, None]:
        """Look for members that stand still while ``calls`` are out: events about them, or MemberFault."""
        limits = self._config.recovery
        waiting = set(ray.wait(calls, num_returns=len(calls), timeout=0)[1])
        busy = {member.me for member, call in zip(self._members, calls, strict=True) if call in waiting}
        sights = self._patiently(self._sights(self._members))
        # One instruction may take long in a large model; what it takes is known once a step was seen.
        longest = PATIENCE * max(self.step_s) if self.step_s else self._config.resources.step_timeout_s
        stuck = standing_still(sights, busy, limits.hang_s, max(limits.hang_s, longest))
        by_me = {member.me: member for member in self._members}
        if stuck:
            seen = {each.member: each for each in stuck}
            places = {me: _describe(me, _at(sights[me]), programs) for me in seen}
            texts = [f"{by_me[me]} stands still in {places[me]}: {each.evidence}" for me, each in seen.items()]
            first = stuck[0]
            raise MemberFault(
                "; ".join(texts),
                first.cause,
                list(seen),
                at=places[first.member],
                evidence=first.evidence,
                noticed_s=_silent_s(sights[first.member]),
            )
        if lost := all_wait(sights, busy, max(limits.hang_s, longest)):
            raise MemberFault(f"a connection is broken: {lost}", "disconnect", at=_step_of(sights), evidence=lost)
        suspects = standing_still(sights, busy, limits.suspect_s, max(limits.suspect_s, longest))
        for each in suspects:
            if each.member not in self._suspected:
                where = _describe(each.member, _at(sights[each.member]), programs)
                more = f"it is {'replaced' if limits.enabled else 'given up'} if that goes on"
                yield {"kind": "log", "text": f"{by_me[each.member]} stands still in {where}: {each.evidence}; {more}"}
        self._suspected = {each.member for each in suspects}

    # -- causes -------------------------------------------------------------------------------------------------------

    def _late(self, calls: list[Any], timeout_s: float, programs: Programs) -> MemberFault:
        waiting = set(ray.wait(calls, num_returns=len(calls), timeout=0)[1])
        busy = [member for member, call in zip(self._members, calls, strict=True) if call in waiting]
        sights = self._sights(busy)
        blamed = [m.me for m in busy if not (_at(sights[m.me]) or STARTING).waiting]
        places = "; ".join(
            f"{member} is in {_describe(member.me, _at(sights[member.me]), programs)}" for member in busy
        )
        text = f"no answer within {timeout_s + LATE_S:g} s: {places}"
        return MemberFault(text, "hang" if blamed else "disconnect", blamed, at=_step_of(sights), evidence=text)

    def _diagnose(self, calls: list[Any], programs: Programs) -> MemberFault:
        """The cause behind the first failed call: a dead member before an error of its own before a lost peer."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            ready, waiting = ray.wait(calls, num_returns=len(calls), timeout=0.02)
            failures = {
                member.me: (member, failure)
                for member, call in zip(self._members, calls, strict=True)
                if call in ready and (failure := _failure(call)) is not None
            }
            dead = [member for member, failure in failures.values() if _is_death(failure)]
            own = [each for each in failures.values() if not _peer_lost(each[1])]
            if own or not waiting or time.monotonic() > deadline:
                break
        if not own:  # Ray tells the end of a node seconds later
            seen = self._sights(self._members)
            if None in seen.values():  # twice: an agent may be slow once
                seen = self._sights(self._members)
            dead = [member for member in self._members if (at := seen[member.me]) is None or not at.alive]
        if dead:
            sights = self._sights(dead)
            places = {me: _describe(me, _at(sight), programs) for me, sight in sights.items()}
            texts = "; ".join(f"{member} died in {places[member.me]}" for member in dead)
            lost = any(sight is None for sight in sights.values())
            why, first = "its node is gone" if lost else "its process was killed or crashed", dead[0].me
            return MemberFault(
                f"{texts}: {why}",
                "node" if lost else "death",
                list(places),
                at=places[first],
                evidence=why,
                noticed_s=_silent_s(sights[first]),
            )
        member, error = (own or list(failures.values()))[0]
        sight = self._sights([member])[member.me]
        place, trace = _describe(member.me, _at(sight), programs), _trace(calls)
        if _peer_lost(error):
            why = "a connection broke, and all members are alive"
            return MemberFault(f"{error}: {why}", "disconnect", at=place, evidence=f"{why}: {error}", trace=trace)
        if isinstance(error, ZeroppError):
            trace = getattr(error, "trace", "") or trace
            return MemberFault(str(error), "error", at=place, evidence=str(error), trace=trace)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return MemberFault(f"{member} failed in {place}: {text}", "error", at=place, evidence=text, trace=trace)


def quietly(watched: Generator[Event, None, T]) -> T:
    """What a generator of events returns, such as watched calls that do not take long: the events are not told."""
    while True:
        try:
            next(watched)
        except StopIteration as done:
            return done.value


def _at(sight: Sight | None) -> Position | None:
    return None if sight is None else sight.at or STARTING


def _silent_s(sight: Sight | None) -> float | None:
    """How long ago a member last gave a sign of life."""
    at = _at(sight)
    return None if at is None else min(at.age_s, at.beat_age_s)


def _describe(me: Member, at: Position | None, programs: Programs) -> str:
    """``step 7 at 1B3 (instruction 40 of 96)``."""
    if at is None:
        return "a place that is not known (its node is gone)"
    if at.step == START:
        return "its start, before the first step"
    if at.step == BETWEEN:
        return "what comes between steps"
    step = "the evaluation" if at.step == EVALUATION else f"step {at.step}"
    program = programs[me.p]
    if at.position >= len(program):
        return f"{step}, after its last instruction"
    return f"{step} at {program[at.position]} (instruction {at.position + 1} of {len(program)})"


def _step_of(sights: Mapping[Member, Sight | None]) -> str:
    steps = [sight.at.step for sight in sights.values() if sight is not None and sight.at is not None]
    return f"step {max(steps)}" if steps and max(steps) > 0 else "no step"


def _is_death(failure: BaseException) -> bool:
    return isinstance(failure, RayError) and not isinstance(failure, RayTaskError)


def _peer_lost(error: BaseException) -> bool:
    from zeropp_ray.comm.base import PeerLost

    return isinstance(error, PeerLost) or (isinstance(error, MemberError) and error.peer_lost)


def _trace(calls: list[Any]) -> str:
    """The traceback that came with the first failed call, as Ray prints it."""
    for call in calls:
        try:
            ray.get(call, timeout=0)
        except RayTaskError as error:
            return str(error)
        except (RayActorError, GetTimeoutError):
            continue
    return ""


def _failure(call: Any) -> BaseException | None:
    """What a finished call raised: RayActorError for a dead actor, else the error that the member itself raised."""
    try:
        ray.get(call)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, BaseException) else error
    except RayError as error:
        return error
    return None
