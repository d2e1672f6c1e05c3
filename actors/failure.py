"""From failed references to one cause: the first real error, not the cascade of lost peers behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.progress import Position
from actors.stage_group import MemberHandle
from zeropp_ray.errors import MemberError, ZeroppError
from zeropp_ray.schedule import Action

SETTLE_S = 1.0  # how long the other members' outcomes are waited for; Ray notices a killed process in 0.02 to 0.04 s
LATE_S = 30.0  # how long after the transfers' own time limit a call is given up

Where = Callable[[MemberHandle], Position | None]


def collect(
    members: Sequence[MemberHandle],
    calls: list[Any],
    *,
    timeout_s: float,
    where: Where,
    programs: Sequence[Sequence[Action]],
) -> list[Any]:
    """The results of one call per member, in member order.

    Raises ZeroppError with the one cause as soon as any call fails, and when they take longer than ``timeout_s`` and
    :data:`LATE_S`. ``programs``: of the step at hand, by stage, to name the instruction a member was in.
    """
    try:
        return ray.get(calls, timeout=timeout_s + LATE_S)
    except GetTimeoutError:
        waiting = set(ray.wait(calls, num_returns=len(calls), timeout=0)[1])
        hung = [member for member, call in zip(members, calls, strict=True) if call in waiting]
        stages = "; ".join(f"{member} is in {describe(member, where(member), programs)}" for member in hung)
        raise ZeroppError(f"no answer within {timeout_s + LATE_S:g} s: {stages}") from None
    except (RayActorError, RayTaskError):
        raise diagnose(members, calls, where, programs) from None


def describe(member: MemberHandle, at: Position | None, programs: Sequence[Sequence[Action]]) -> str:
    """``step 7 at 1B3 (instruction 40 of 96)``."""
    if at is None:
        return "a place that is not known (its node is gone)"
    if at.step == 0:
        return "its start, before the first step"
    step = "the evaluation" if at.step < 0 else f"step {at.step}"
    program = programs[member.me.p]
    if at.position >= len(program):
        return f"{step}, after its last instruction"
    return f"{step} at {program[at.position]} (instruction {at.position + 1} of {len(program)})"


def diagnose(
    members: Sequence[MemberHandle], calls: list[Any], where: Where, programs: Sequence[Sequence[Action]]
) -> ZeroppError:
    """The cause behind the first failed call: a dead member before an error of its own before a lost peer."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        ready, waiting = ray.wait(calls, num_returns=len(calls), timeout=0.1)
        failures = {member.me: _failure(call) for member, call in zip(members, calls, strict=True) if call in ready}
        dead = [member for member in members if isinstance(failures.get(member.me), RayActorError)]
        if dead or not waiting or time.monotonic() > deadline:
            break
    if dead:
        places = "; ".join(f"{member} died in {describe(member, where(member), programs)}" for member in dead)
        return ZeroppError(f"{places}: its process was killed or crashed")
    failed = [error for error in failures.values() if error is not None]
    own = [error for error in failed if not (isinstance(error, MemberError) and error.peer_lost)]
    first = (own or failed)[0]
    if isinstance(first, ZeroppError):
        return first
    member = next(member for member in members if failures.get(member.me) is first)
    text = " ".join(f"{type(first).__name__}: {first}".split())
    return MemberError(f"{member} failed in {describe(member, where(member), programs)}: {text}", trace=_trace(calls))


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
    except RayActorError as error:
        return error
    return None
