"""Copies of a member's state in host memory, at the member itself and at its buddy.

The state is what a member owns and what steps change: master weights, moments and the count of commits; frozen
parameters go along. After a commit the main thread copies it, which is all that it pays; on a GPU it only
begins to, and the next update waits for it. A thread then sends the copy
to the buddy, the next one of the ring (:meth:`Layout.ring`), and takes that of the one before, over a group of its own.
Replicas that own the same need no exchange: each holds the others' state already.

There are two versions of each, and the older is overwritten. A version counts once it is whole. If a copy is only
ordered after all members have acknowledged the one before, some step is whole at all of them at any moment::

    member       own 10, 20                          own 10 -> 30
    buddy        guards 10, 20     member dies here: guards 20, and a part of 30, which does not count

After a fault all return to the newest step that is held everywhere, and who lost its copy gets it from its buddy.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zeropp_ray.comm.base import Group, PeerLost, Transfer
from zeropp_ray.device import CPU, Aside
from zeropp_ray.errors import MemberError
from zeropp_ray.layout import Layout, Member
from zeropp_ray.optim import ShardedAdamW
from zeropp_ray.planner.memory import state_elements
from zeropp_ray.sharding import FlatParameters

if TYPE_CHECKING:
    from zeropp_ray.planner.plan import Plan

LEFT_S = 1.0  # how long the exchange of an epoch that is over is waited for


class Holdings(NamedTuple):
    """The steps of the whole copies that a member holds, ascending: of its own state, and of the one it guards."""

    own: tuple[int, ...] = ()
    guarded: tuple[int, ...] = ()


def common_step(layout: Layout, holdings: Mapping[Member, Holdings | None]) -> tuple[int, ...]:
    """The steps, newest first, at which the state of every member is held, by itself or by its buddy. None: a member
    that is lost.
    """
    nothing = Holdings()

    def held(me: Member) -> set[int]:
        if layout.mirrored:
            return {step for other in layout.ring(me) for step in (holdings[other] or nothing).own}
        buddy = layout.buddy(me)
        guarded = (holdings[buddy] or nothing).guarded if buddy is not None else ()
        return {*(holdings[me] or nothing).own, *guarded}

    return tuple(sorted(set.intersection(*map(held, layout.members())), reverse=True))


def missing(holdings: Mapping[Member, Holdings | None], step: int) -> frozenset[Member]:
    """Who has no copy of its own of ``step``, and must receive it."""
    return frozenset(me for me, held in holdings.items() if held is None or step not in held.own)


class _Versions:
    """Two versions of one member's state, flat; what steps do not change is there once."""

    def __init__(self, changing: int, frozen: int, dtype: torch.dtype, aside: Aside) -> None:
        self.steps = [-1, -1]  # of each version; -1: not whole
        self.changing = [aside.empty(changing, dtype) for _ in self.steps]
        self.frozen = aside.empty(frozen, dtype)

    def open(self) -> int:
        """The older version, to be overwritten: it counts no longer."""
        older = self.steps.index(min(self.steps))
        self.steps[older] = -1
        return older

    def whole(self) -> tuple[int, ...]:
        return tuple(sorted({step for step in self.steps if step >= 0}))

    def at(self, step: int) -> torch.Tensor:
        return self.changing[self.steps.index(step)]

    def drop_after(self, step: int) -> None:
        self.steps = [each if each <= step else -1 for each in self.steps]


class Copies:
    """The copies that one member holds. All methods but :meth:`acknowledged` are for its main thread.

    Args:
        enabled: whether copies are kept at all; else nothing is held.
        sets, optimizer: the state, which is copied and put back in place.
        dtype, device: of the masters.
        reached: called with ``"copy"`` by the thread in the midst of each exchange.
    """

    def __init__(
        self,
        plan: Plan,
        me: Member,
        sets: Sequence[FlatParameters],
        optimizer: ShardedAdamW,
        *,
        dtype: torch.dtype,
        device: torch.device = CPU,
        enabled: bool,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._layout, self._me, self._reached = plan.layout, me, reached
        self._enabled = enabled
        self._aside = aside = Aside(device)
        self._changing = [*(flat.master for flat in sets if flat.trained), *optimizer.held()]
        self._frozen = [flat.master for flat in sets if not flat.trained]
        self._own = _Versions(*(state_elements(plan, me.p) if enabled else (0, 0)), dtype, aside)
        guarded = plan.layout.guarded(me) if enabled else None
        self._guarded = None if guarded is None else _Versions(*state_elements(plan, guarded.p), dtype, aside)
        self._has_frozen = False  # in its own copy
        self._gave_frozen = False  # to the buddy of this epoch
        self._thread: threading.Thread | None = None
        self._failed: MemberError | None = None

    def join(self, group: Group) -> None:
        """Exchange over the group of a new epoch. That of the one before is closed, so its exchange ends soon; or not
        before its time limit, if gloo has forgotten a send. Then it is left alone, and what it does counts no longer.
        """
        self._wait(LEFT_S)
        self._group, self._gave_frozen, self._failed = group, False, None

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Copy the state, which is that of committed ``step``, over the older version, and begin to exchange it."""
        assert self._enabled, "recovery.copy_every = 0"
        self._wait()
        version = self._own.open()
        with self._aside.copying():
            _pack(self._changing, self._own.changing[version])
            if not self._has_frozen:
                _pack(self._frozen, self._own.frozen)
                self._has_frozen = True
        self._own.steps[version] = step
        if self._guarded is not None:
            arguments = (self._group, self._guarded, self._own.changing[version], step)
            self._thread = threading.Thread(target=self._exchange, args=arguments, name="copies", daemon=True)
            self._thread.start()

    def before_update(self) -> None:
        """The state is about to change: not before it is copied."""
        self._aside.hold()

    def _exchange(self, group: Group, guarded: _Versions, outgoing: torch.Tensor, step: int) -> None:
        version = guarded.open()
        try:
            self._aside.finish()
            before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
            coming, going = [guarded.changing[version]], [outgoing]
            if not self._gave_frozen:
                coming, going = [*coming, guarded.frozen], [*going, self._own.frozen]
            posted = [group.receive(part, before, 2 * step + i) for i, part in enumerate(coming) if part.numel()]
            self._reached("copy")
            posted += [group.send(part, after, 2 * step + i) for i, part in enumerate(going) if part.numel()]
            for transfer in posted:
                transfer.wait()
            if group is self._group:
                guarded.steps[version], self._gave_frozen = step, True
        except Exception as error:
            if group is self._group:
                self._failed = self._error("the exchange of copies", error)

    def _error(self, doing: str, error: Exception) -> MemberError:
        text = f"{self._me} failed in {doing}: {' '.join(str(error).split())}"
        return MemberError(text, isinstance(error, PeerLost), traceback.format_exc())

    def _wait(self, at_most_s: float | None = None) -> None:
        """Until the exchange at hand is over."""
        if self._thread is not None:
            self._thread.join(at_most_s)
            self._thread = None

    def acknowledged(self) -> int:
        """The newest step whose copies are whole here, of its own state and of the one it guards; -1: none.

        Raises MemberError if an exchange failed.
        """
        if self._failed is not None:
            raise self._failed
        own, guarded = self.holdings()
        return max({*own} & {*guarded}, default=-1)

    def holdings(self) -> Holdings:
        """What is whole here. Where nothing is sent, the own versions are all that there are to guard."""
        self._aside.finish()
        own = self._own.whole()
        return Holdings(own, own if self._guarded is None else self._guarded.whole())

    @torch.no_grad()
    def restore(self, step: int, missing: frozenset[Member]) -> None:
        """Put the state of ``step`` back. Those in ``missing`` receive their copy of it. Called at all members.

        Versions newer than ``step`` are dropped. Raises MemberError if another member is lost meanwhile.
        """
        self._wait()
        group, ring, own = self._group, self._layout.ring(self._me), self._own
        for versions in (own, self._guarded):
            if versions is not None:
                versions.drop_after(step)
        version, posted = -1, list[Transfer]()
        try:
            for rank, lost in enumerate(ring):
                if lost not in missing:
                    continue
                behind = (number % len(ring) for number in range(rank + 1, rank + len(ring)))
                giver = next(other for other in behind if ring[other] not in missing)
                if lost == self._me:
                    version = own.open()
                    parts = own.changing[version], own.frozen
                    posted += [group.receive(part, giver, tag) for tag, part in enumerate(parts) if part.numel()]
                elif giver == group.rank:
                    given = self._guarded or own
                    parts = given.at(step), given.frozen
                    posted += [group.send(part, rank, tag) for tag, part in enumerate(parts) if part.numel()]
            for transfer in posted:
                transfer.wait()
        except PeerLost as error:
            raise self._error("a restore", error) from error
        if self._me in missing:
            own.steps[version], self._has_frozen = step, True
        _unpack(own.at(step), self._changing)
        _unpack(own.frozen, self._frozen)

    def forget(self) -> None:
        """Drop all copies: the state came from elsewhere."""
        self._wait()
        self._has_frozen = False
        for versions in (self._own, self._guarded):
            if versions is not None:
                versions.drop_after(-1)

    def held(self) -> Iterator[torch.Tensor]:
        """All tensors of the copies."""
        for versions in (self._own, self._guarded):
            if versions is not None:
                yield from (*versions.changing, versions.frozen)


def _pack(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        part.copy_(tensor.view(-1), non_blocking=True)


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.view(-1).copy_(part)
