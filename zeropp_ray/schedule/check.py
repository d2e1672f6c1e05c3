"""The last pass: proof that a program is complete, ordered, within its stated memory and free of deadlock.

The ranks' lists are run without times and with rendezvous semantics: a posted send completes only against its posted
receive, ``WAIT`` and ``DRAIN`` block until it does, and nothing else blocks. Running an action that can run never keeps
another from running, so if this run reaches the end of every list, every run does, whatever the real durations.

One column (one member per stage) is checked for all ``F × R`` of them. Members of a stage run the same list, columns
exchange transfers only within themselves, and collectives tie the members of a stage at the same position of that list.
Map every member to its stage: each "must come before" between actions of members, collectives included, becomes one
between actions of the single column, where the run has found an order that respects them all. So there is no cycle of
waits among the members either: it would map to one in the column.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn

from zeropp_ray.errors import ScheduleError
from zeropp_ray.schedule.actions import Action, Op, Ranks
from zeropp_ray.schedule.communication import RECEIVE_WINDOW
from zeropp_ray.schedule.spec import Edge, ScheduleSpec

# What a cell (a chunk and a micro-batch of a rank) has gone through: its tasks, and its transfers of each kind.
_F, _B, _W, _RF = 1, 2, 4, 8
_POSTED, _ARRIVED, _USABLE = 1, 2, 4  # its receive: posted, met by the send, waited for
_SENT, _DEPARTED, _DRAINED = 8, 16, 32  # its send: posted, met by the receive, drained
_RECEIVED, _GONE = _POSTED | _ARRIVED | _USABLE, _SENT | _DEPARTED | _DRAINED
_SHOWN = 4  # blocked ranks that the message of a deadlock spells out


def check(ranks: Ranks, spec: ScheduleSpec, in_flight: Mapping[Edge, int], forward_only: bool = False) -> None:
    """Run the lists of all ranks against each other.

    Verified:

    - every ``F``, ``B`` and ``W`` runs once, after what it needs; ``B`` and ``W`` of a chunk in micro-batch order, for
      that is the order of summation; ``RF`` once between ``F`` and ``B`` if the chunk is recomputed, else never;
      ``forward_only``: every ``F`` once, nothing else, no live activations
    - parameters are resident for ``F``, ``RF`` and ``B``, gathered only when absent, of one chunk at a time (two with
      prefetch)
    - at most one gradient buffer is open, and is reduced once per chunk and unit; or at most one per chunk, and each is
      reduced once in the step
    - every transfer is posted, met and waited for once, in the same order at both ends of its edge
    - sends in flight stay within ``in_flight``, receives ahead within :data:`RECEIVE_WINDOW`, live activations and the
      inputs of recomputed chunks within their limits
    - no rank waits for ever, and nothing is left at the end

    Raises:
        ScheduleError: naming rank, position and action, and what is missing; for a deadlock, what each blocked rank
            waits for.
    """
    _Check(ranks, spec, in_flight, forward_only).run()


class _Rank:
    """What a rank holds, and how far it is."""

    def __init__(self, index: int, actions: Sequence[Action], spec: ScheduleSpec, forward_only: bool) -> None:
        self.index, self.actions, self.position = index, actions, 0
        self.incoming = {kind: [spec.incoming(index, v, kind) for v in range(spec.chunks)] for kind in "FB"}
        self.outgoing = {kind: [spec.outgoing(index, v, kind) for v in range(spec.chunks)] for kind in "FB"}
        self.local = {kind: [spec.local(index, v, kind) for v in range(spec.chunks)] for kind in "FB"}
        # Per cell v·N + m. What never takes place counts as done, so at the end every bit is set.
        never = [_RF | _B | _W if forward_only else _RF * (not recomputed) for recomputed in spec.recomputed]
        self.tasks = bytearray(bits for bits in never for _ in range(spec.microbatches))
        self.transfers: dict[str, bytearray] = {}
        for kind in "FB":
            hops = zip(self.incoming[kind], self.outgoing[kind], strict=True)
            none = forward_only and kind == "B"
            done = [_RECEIVED * (none or not source) | _GONE * (none or not target) for source, target in hops]
            self.transfers[kind] = bytearray(bits for bits in done for _ in range(spec.microbatches))
        self.next_b = [0] * spec.chunks
        self.next_w = [0] * spec.chunks
        self.resident: set[int] = set()
        self.open: list[int] = []  # the chunks whose gradient buffers are open
        self.live = 0  # chunk activations
        self.inputs = 0  # of recomputed chunks
        self.blocked: tuple[str, int] | None = None  # kind and cell of the transfer that it waits for

    def fail(self, problem: str) -> NoReturn:
        raise ScheduleError(f"rank {self.index}, position {self.position}: {self.actions[self.position]} {problem}")


class _Channel:
    """An edge while it runs. Posted transfers that have not met yet are kept in order."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.in_flight = 0  # sends not drained
        self.ahead = 0  # receives not waited for
        self.sends: deque[tuple[int, int]] = deque()  # cell at the sender, cell at the receiver
        self.receives: deque[int] = deque()  # cell at the receiver


class _Check:
    def __init__(self, ranks: Ranks, spec: ScheduleSpec, in_flight: Mapping[Edge, int], forward_only: bool) -> None:
        self.spec, self.n, self.limit, self.forward_only = spec, spec.microbatches, spec.live_chunks, forward_only
        self.ranks = [_Rank(p, actions, spec, forward_only) for p, actions in enumerate(ranks)]
        self.todo = deque(self.ranks)
        hops = [hop for rank in self.ranks for kind in "FB" for hop in rank.outgoing[kind] if hop]
        self.channels = {hop.edge: _Channel(in_flight.get(hop.edge, 0)) for hop in hops}
        self.sum_starts = {start for start, _ in spec.reduce_bounds}
        self.sum_stops = {stop for _, stop in spec.reduce_bounds}
        self.of_cell = {
            Op.F: self.forward,
            Op.RF: self.recompute,
            Op.B: self.backward,
            Op.W: self.weight,
            Op.RECV: self.receive,
            Op.WAIT: self.wait,
            Op.SEND: self.send,
            Op.DRAIN: self.drain,
        }
        self.of_chunk = {Op.GATHER: self.gather, Op.RELEASE: self.release, Op.REDUCE: self.reduce}

    def run(self) -> None:
        while self.todo:
            self.advance(self.todo.popleft())
        stuck = [rank for rank in self.ranks if rank.blocked]
        if stuck:
            raise ScheduleError(self.deadlock(stuck))
        for rank in self.ranks:
            self.finish(rank)

    def advance(self, rank: _Rank) -> None:
        """Run a rank to its end, or to a transfer that it has to wait for."""
        while rank.position < len(rank.actions):
            op, v, m, kind = rank.actions[rank.position]
            if not 0 <= v < self.spec.chunks:
                rank.fail(f"names a chunk that is not there; a stage has {self.spec.chunks}")
            if run := self.of_chunk.get(op):
                run(rank, v)
            elif not 0 <= m < self.n:
                rank.fail(f"names a micro-batch that is not there; a step has {self.n}")
            elif self.of_cell[op](rank, v, m, v * self.n + m, kind):
                rank.blocked = (kind, v * self.n + m)
                return
            rank.position += 1

    # Each returns whether the rank has to wait, and changes nothing if so.

    def forward(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        if rank.tasks[cell] & _F:
            rank.fail("runs twice")
        if v not in rank.resident:
            rank.fail("runs without the chunk's parameters")
        if not rank.transfers["F"][cell] & _USABLE:
            rank.fail("runs before the WAIT for its input")
        if rank.local["F"][v] and not rank.tasks[cell - self.n] & _F:
            rank.fail(f"runs before {Action(Op.F, v - 1, m)}, whose output it takes")
        rank.tasks[cell] |= _F
        if not rank.tasks[cell] & _RF:
            rank.inputs += 1
            if rank.inputs > self.spec.input_limit:
                rank.fail(f"keeps {rank.inputs} chunk inputs; the program states {self.spec.input_limit}")
        elif not self.forward_only:
            self.enliven(rank)
        return False

    def recompute(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        if self.forward_only:
            rank.fail("has no place in a forward-only program")
        if not self.spec.recomputed[v]:
            rank.fail("recomputes what its F keeps")
        if rank.tasks[cell] & _RF:
            rank.fail("runs twice")
        if v not in rank.resident:
            rank.fail("runs without the chunk's parameters")
        if not rank.tasks[cell] & _F:
            rank.fail(f"runs before {Action(Op.F, v, m)}")
        rank.tasks[cell] |= _RF
        rank.inputs -= 1
        self.enliven(rank)
        return False

    def enliven(self, rank: _Rank) -> None:
        """Another chunk activation is there, up to its W."""
        rank.live += 1
        if rank.live > self.limit:
            rank.fail(f"makes {rank.live} chunk activations live; the memory limit allows {self.limit}")

    def backward(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        if rank.tasks[cell] & _B:
            rank.fail("runs twice" if not self.forward_only else "has no place in a forward-only program")
        if v not in rank.resident:
            rank.fail("runs without the chunk's parameters")
        if not rank.tasks[cell] & _F:
            rank.fail(f"runs before {Action(Op.F, v, m)}")
        if not rank.tasks[cell] & _RF:
            rank.fail(f"runs before {Action(Op.RF, v, m)}")
        if not rank.transfers["B"][cell] & _USABLE:
            rank.fail("runs before the WAIT for its output's gradient")
        if rank.local["B"][v] and not rank.tasks[cell + self.n] & _B:
            rank.fail(f"runs before {Action(Op.B, v + 1, m)}, whose gradient it takes")
        if m != rank.next_b[v]:
            rank.fail(
                f"is out of order: {Action(Op.B, v, rank.next_b[v])} comes next, gradients are summed by micro-batch"
            )
        rank.next_b[v] += 1
        rank.tasks[cell] |= _B
        return False

    def weight(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        if rank.tasks[cell] & _W:
            rank.fail("runs twice" if not self.forward_only else "has no place in a forward-only program")
        if not rank.tasks[cell] & _B:
            rank.fail(f"runs before {Action(Op.B, v, m)}")
        if m != rank.next_w[v]:
            rank.fail(
                f"is out of order: {Action(Op.W, v, rank.next_w[v])} comes next, gradients are summed by micro-batch"
            )
        if v not in rank.open:
            rank.open.append(v)
            if len(rank.open) > self.spec.gradient_buffers:
                rank.fail(f"opens a second gradient buffer: chunk {rank.open[0]} is not reduced yet")
        elif m in self.sum_starts:
            rank.fail("starts a unit, and the unit before it is not reduced yet")
        rank.next_w[v] += 1
        rank.tasks[cell] |= _W
        rank.live -= 1
        return False

    def gather(self, rank: _Rank, v: int) -> None:
        if v in rank.resident:
            rank.fail("gathers a chunk that is resident")
        rank.resident.add(v)
        if len(rank.resident) > 1 + self.spec.prefetch:
            rank.fail(f"makes {len(rank.resident)} chunks resident; the program states {1 + self.spec.prefetch}")

    def release(self, rank: _Rank, v: int) -> None:
        if v not in rank.resident:
            rank.fail("releases a chunk that is not resident")
        rank.resident.remove(v)

    def reduce(self, rank: _Rank, v: int) -> None:
        if v not in rank.open:
            rank.fail("has no gradient buffer to reduce: no W of the chunk since the last REDUCE")
        if rank.next_w[v] not in self.sum_stops:
            rank.fail(f"comes inside a {self.spec.reduce}: {Action(Op.W, v, rank.next_w[v])} has not run")
        rank.open.remove(v)

    def receive(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        if (hop := rank.incoming[kind][v]) is None:
            rank.fail("receives what no other rank sends")
        if rank.transfers[kind][cell] & _POSTED:
            rank.fail("is posted twice")
        rank.transfers[kind][cell] |= _POSTED
        channel = self.channels[hop.edge]
        channel.ahead += 1
        if channel.ahead > RECEIVE_WINDOW:
            rank.fail(f"puts {channel.ahead} receives ahead on edge {hop.edge}; the program states {RECEIVE_WINDOW}")
        channel.receives.append(cell)
        self.match(rank, hop.edge, channel)
        return False

    def send(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        if (hop := rank.outgoing[kind][v]) is None:
            rank.fail("sends what no other rank takes")
        if rank.transfers[kind][cell] & _SENT:
            rank.fail("is posted twice")
        if not rank.tasks[cell] & (_F if kind == "F" else _B):
            rank.fail("is posted before what it sends is made")
        rank.transfers[kind][cell] |= _SENT
        channel = self.channels[hop.edge]
        channel.in_flight += 1
        if channel.in_flight > channel.bound:
            rank.fail(
                f"puts {channel.in_flight} sends in flight on edge {hop.edge}; the program states {channel.bound}"
            )
        channel.sends.append((cell, hop.chunk * self.n + m))
        self.match(rank, hop.edge, channel)
        return False

    def match(self, rank: _Rank, edge: Edge, channel: _Channel) -> None:
        """Complete the oldest send of an edge against its oldest receive, and wake who waits for it."""
        if not (channel.sends and channel.receives):
            return
        sent, due = channel.sends.popleft()
        cell = channel.receives.popleft()
        source, destination = self.ranks[edge.source], self.ranks[edge.destination]
        if cell != due:
            send, receive = self.named(Op.SEND, sent, edge.kind), self.named(Op.RECV, cell, edge.kind)
            rank.fail(f"breaks the order of edge {edge}: {send} of the sender meets {receive} of the receiver")
        source.transfers[edge.kind][sent] |= _DEPARTED
        destination.transfers[edge.kind][cell] |= _ARRIVED
        for other, theirs in ((source, sent), (destination, cell)):
            if other.blocked == (edge.kind, theirs):
                other.blocked = None
                self.todo.append(other)

    def wait(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        done = rank.transfers[kind][cell]
        if (hop := rank.incoming[kind][v]) is None or not done & _POSTED:
            rank.fail("waits for a receive that is not posted")
        if done & _USABLE:
            rank.fail("is waited for twice")
        if not done & _ARRIVED:
            return True
        rank.transfers[kind][cell] |= _USABLE
        self.channels[hop.edge].ahead -= 1
        return False

    def drain(self, rank: _Rank, v: int, m: int, cell: int, kind: str) -> bool:
        done = rank.transfers[kind][cell]
        if (hop := rank.outgoing[kind][v]) is None or not done & _SENT:
            rank.fail("drains a send that is not posted")
        if done & _DRAINED:
            rank.fail("is drained twice")
        if not done & _DEPARTED:
            return True
        rank.transfers[kind][cell] |= _DRAINED
        self.channels[hop.edge].in_flight -= 1
        return False

    def named(self, op: Op, cell: int, kind: str = "") -> Action:
        return Action(op, *divmod(cell, self.n), kind)

    def deadlock(self, stuck: Sequence[_Rank]) -> str:
        """What each blocked rank waits for, and where that one is."""
        lines = []
        for rank in stuck:
            action = rank.actions[rank.position]
            op, v, m, kind = action
            waits = op is Op.WAIT
            hop = (rank.incoming if waits else rank.outgoing)[kind][v]
            assert hop is not None, "a rank waits only on an edge"
            other = self.ranks[hop.edge.source if waits else hop.edge.destination]
            theirs = Action(Op.SEND if waits else Op.RECV, hop.chunk, m, kind)
            at = f"blocked at {other.position}" if other.blocked else "at its end"
            lines.append(
                f"rank {rank.index}, position {rank.position}: {action} waits for {theirs} of rank {other.index}, {at}"
            )
        shown = "; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more ranks" if len(lines) > _SHOWN else "")
        return f"deadlock: {shown}"

    def finish(self, rank: _Rank) -> None:
        """Nothing may be left at the end of a list."""
        left = f"rank {rank.index}, end of its list:"
        for op, bit in ((Op.F, _F), (Op.RF, _RF), (Op.B, _B), (Op.W, _W)):
            for cell, done in enumerate(rank.tasks):
                if not done & bit:
                    raise ScheduleError(f"{left} {self.named(op, cell)} never runs")
        for kind, transfers in rank.transfers.items():
            for op, bit in ((Op.RECV, _POSTED), (Op.WAIT, _USABLE), (Op.SEND, _SENT), (Op.DRAIN, _DRAINED)):
                for cell, done in enumerate(transfers):
                    if not done & bit:
                        raise ScheduleError(f"{left} {self.named(op, cell, kind)} never runs")
        if rank.resident:
            raise ScheduleError(f"{left} the parameters of chunk {min(rank.resident)} are not released")
        if rank.open:
            raise ScheduleError(f"{left} the gradient buffer of chunk {rank.open[0]} is not reduced")
