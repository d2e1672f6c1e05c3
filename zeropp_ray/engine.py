"""Runs one rank's program: the flat list of instructions that the schedule engine made and checked.

The engine knows no schedule and makes no choice. It keeps what a running step holds (:class:`RunningStep`), so that an
abort drops all of it as one object, and counts what it does, so that the plan can be held against it.
"""

from __future__ import annotations

import traceback
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from zeropp_ray.comm.base import Counters, Links, PeerLost, Transfer
from zeropp_ray.device import CPU, in_range, upload
from zeropp_ray.errors import MemberError
from zeropp_ray.layout import Layout, Member
from zeropp_ray.schedule import Action, Op
from zeropp_ray.sharding import FlatParameters, PendingReduce
from zeropp_ray.split_backward import WeightQueue

IGNORED = -100  # a label that counts neither in the loss nor in the number of tokens

Microbatches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Micro-batch ``m`` of the step at hand: ids and labels, both int64 [b, s]."""


@dataclass
class Chunk:
    """One chunk of this stage: how to run it, and the sets of parameters that it uses."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    sets: list[FlatParameters]
    first: bool  # takes ids
    last: bool  # gives logits
    backward: bool  # whether a parameter before it is trained, so that the gradient of its input is wanted
    in_place: bool  # whether its forward may change the tensor that it is given

    @property
    def trained(self) -> list[FlatParameters]:
        return [flat for flat in self.sets if flat.trained]


@dataclass(frozen=True)
class Sums:
    """What a step adds up at one member: the loss *sum* in nats (of fp32 sums of micro-batches, added in fp64) and the
    valid tokens; zero except in the last stage.
    """

    loss: float
    tokens: int


@dataclass
class Measured:
    """Peaks of one step, counted where they happen."""

    live_chunks: int = 0  # chunk activations, between their F, or RF, and their W
    peak_live_chunks: int = 0
    peak_chunk_inputs: int = 0  # of recomputed chunks, between their F and their RF
    resident_elements: int = 0
    peak_resident_elements: int = 0


@dataclass
class RunningStep:
    """Everything that a step holds while it runs. Keys are (chunk, micro-batch)."""

    recomputed: set[int] = field(default_factory=set)  # chunks whose program has an RF
    chunk_inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # theirs, from F to RF
    input_gradients: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    graphs: dict[tuple[int, int], GradientEdge | None] = field(default_factory=dict)
    arriving: dict[tuple[str, int, int], tuple[torch.Tensor, Transfer]] = field(default_factory=dict)
    arrived: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    produced: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    leaving: dict[tuple[str, int, int], tuple[torch.Tensor, Transfer]] = field(default_factory=dict)
    reducing: list[PendingReduce] = field(default_factory=list)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0
    reduces_left: Counter[FlatParameters] = field(default_factory=Counter)

    def messages(self) -> Iterator[torch.Tensor]:
        """What crosses chunk boundaries, from the post of a receive to the use, and from the maker to the drain."""
        yield from (tensor for tensor, _ in (*self.arriving.values(), *self.leaving.values()))
        yield from (*self.arrived.values(), *self.produced.values())


class _Entry(torch.autograd.Function):
    """Where a chunk's graph begins: makes an arrived tensor part of a graph, and catches the gradient that comes out.

    The tensor becomes an ordinary, non-leaf one without a copy, so that a user's block may work on it in place, as it
    may in one process.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, caught: list[torch.Tensor]) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.caught = caught
        return x

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, None, None]:
        ctx.caught.append(dx)
        return None, None, None


class Engine:
    """One member's engine.

    Args:
        me, layout: where this member stands.
        chunks: its chunks in the order of their own index.
        weights: where their deferred layers stash.
        links: its groups.
        activation: shape and dtype of what crosses a chunk boundary, [b, s, h].
        live_limit, input_limit: most chunk activations, and inputs of recomputed chunks, that it may hold at a time.
        device: where all of it lies and is computed; micro-batches come on the CPU.
        ranges: whether each instruction is an NVTX range, for a profiler to show.
    """

    def __init__(
        self,
        *,
        me: Member,
        layout: Layout,
        chunks: Sequence[Chunk],
        weights: WeightQueue,
        links: Links,
        counters: Counters,
        activation: tuple[tuple[int, int, int], torch.dtype],
        live_limit: int,
        input_limit: int,
        device: torch.device = CPU,
        ranges: bool = False,
    ) -> None:
        self.me, self.layout, self.chunks, self.links, self.counters = me, layout, chunks, links, counters
        self.sets = list(dict.fromkeys(flat for chunk in chunks for flat in chunk.sets))
        self.weights = weights
        self._shape, self._dtype = activation
        self._live_limit, self._input_limit, self._device = live_limit, input_limit, device
        owned = layout.owned(me.p)
        # What a chunk hands to another one of this stage: the output of v to v + 1, or the input gradient to v - 1.
        self._local = {("F", v) for v, c in enumerate(owned) if c + 1 in owned}
        self._local |= {("B", v) for v, c in enumerate(owned) if c - 1 in owned}
        self.measured = Measured()
        self.step = RunningStep()
        self._microbatches: Microbatches = lambda m: (_ for _ in ()).throw(LookupError(m))
        self._training = True
        # Lets a chunk's graph begin at a tensor that has no history.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._do: dict[Op, Callable[[Action], None]] = {
            Op.GATHER: self._gather,
            Op.RELEASE: self._release,
            Op.REDUCE: self._reduce,
            Op.RECV: self._recv,
            Op.WAIT: self._wait,
            Op.SEND: self._send,
            Op.DRAIN: self._drain,
            Op.F: self._forward,
            Op.RF: self._recompute,
            Op.B: self._backward,
            Op.W: self._weight_gradient,
        }
        if ranges:
            self._do = {op: in_range(do) for op, do in self._do.items()}

    def run(
        self,
        program: Sequence[Action],
        microbatches: Microbatches,
        *,
        training: bool,
        progress: Callable[[int], None] = lambda position: None,
    ) -> Sums:
        """Run ``program`` once. Afterwards, if ``training``, every gradient is reduced over the stage, the stages that
        share it and the replicas.

        ``progress`` is called with the position of each instruction before it starts, and with ``len(program)`` at the
        end. Raises MemberError naming member and instruction.
        """
        self.step = step = RunningStep()
        self.measured = Measured()
        self._microbatches, self._training = microbatches, training
        if training:
            for flat in self.sets:
                flat.zero_gradient()
        for action in program:
            if action.op is Op.REDUCE:
                step.reduces_left.update(self.chunks[action.chunk].trained)
            elif action.op is Op.RF:
                step.recomputed.add(action.chunk)
        position, action = 0, program[0]
        try:
            with torch.no_grad():  # but where a graph is made
                for position, action in enumerate(program):
                    progress(position)
                    self._do[action.op](action)
                progress(len(program))
                self._finish_reduces()
                if training:
                    self._exchange_shared()
                    self._reduce_over_replicas()
                self.links.settle()
        except Exception as error:
            where = f"{action} (instruction {position + 1} of {len(program)})"
            cause = " ".join(str(error).split())
            lost = isinstance(error, PeerLost)
            raise MemberError(f"{self.me} failed in {where}: {cause}", lost, traceback.format_exc()) from error
        self._assert_empty()
        return Sums(sum(step.losses[m].item() for m in sorted(step.losses)), step.tokens)

    def abort(self) -> None:
        """Drop what a step left, if it did not end; shards, moments and model stay. Not while one runs."""
        self.step = RunningStep()
        self.weights.clear()
        for flat in self.sets:
            flat.drop_running_step()

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _gather(self, action: Action) -> None:
        counters, measured = self.counters, self.measured
        counters.gathers += 1
        for flat in self.chunks[action.chunk].sets:
            if not flat.gather():
                continue
            if flat.shared:
                counters.shared_gathers += 1
                counters.shared_gathered_bytes += flat.gathered_bytes
            else:
                counters.gathered_bytes += flat.gathered_bytes
            measured.resident_elements += flat.padded
            measured.peak_resident_elements = max(measured.peak_resident_elements, measured.resident_elements)

    def _release(self, action: Action) -> None:
        for flat in self.chunks[action.chunk].sets:
            if flat.release():
                self.measured.resident_elements -= flat.padded

    def _reduce(self, action: Action) -> None:
        self._finish_reduces()
        step, counters = self.step, self.counters
        counters.reduces += 1
        for flat in self.chunks[action.chunk].trained:
            step.reduces_left[flat] -= 1
            step.reducing.append(flat.reduce(last=step.reduces_left[flat] == 0))
            if flat.shared:
                counters.shared_reduces += 1
                counters.shared_reduced_bytes += flat.reduced_bytes
            else:
                counters.reduced_bytes += flat.reduced_bytes
        if self.links.stage.size == 1:  # nothing to wait for: the buffer serves the next chunk too
            self._finish_reduces()

    def _finish_reduces(self) -> None:
        while self.step.reducing:
            self.step.reducing.pop(0).wait()

    def _exchange_shared(self) -> None:
        """Add up the reduced gradients of what several stages use, in the order of the stages: the same bytes at each.

        Each sends its own to all others that use it, member to member of equal shard and replica. All go through the
        sets in one order, so that no two wait for each other's next one.
        """
        pipeline, posted = self.links.pipeline, []
        for flat in sorted(self.sets, key=lambda flat: flat.number):
            others = [stage for stage in flat.stages if stage != self.me.p]
            if not (flat.trained and others):
                continue
            parts = {stage: torch.empty_like(flat.gradient) for stage in others}
            mine = parts[self.me.p] = flat.gradient.clone()
            tag = self._tag(self.layout.stages * self.layout.chunks - 1, flat.number)  # the end, which nothing crosses
            incoming, outgoing = {stage: parts[stage] for stage in others}, dict.fromkeys(others, mine)
            posted.append((flat, parts, pipeline.exchange(incoming, outgoing, tag)))
            self.counters.shared_exchanges += 1
            self.counters.shared_exchanged_bytes += mine.nbytes * len(others)
        for flat, parts, transfers in posted:
            for transfer in transfers:
                transfer.wait()
            flat.gradient.zero_()
            for stage in flat.stages:
                flat.gradient.add_(parts[stage])

    def _reduce_over_replicas(self) -> None:
        group = self.links.replicas
        if group.size == 1:
            return
        posted: list[Transfer] = []
        for flat in self.sets:
            if not flat.trained:
                continue
            posted.append(flat.sum_over(group))
            if len(posted) > 1:  # each holds what comes from all replicas, so not all of them at a time
                posted.pop(0).wait()
            self.counters.replica_reduces += 1
            self.counters.replica_reduced_bytes += flat.owned_gradient.nbytes * (group.size - 1)
        for transfer in posted:
            transfer.wait()

    def refresh(self, *, frozen: bool = False) -> None:
        """After an update of the master weights: those that are computed with follow. ``frozen``: of frozen ones too.

        Raises MemberError.
        """
        group, counters = self.links.replicas, self.counters
        posted = [(flat, flat.refresh(group)) for flat in self.sets if flat.trained or frozen]
        for flat, transfer in posted:
            if transfer is None:
                continue
            try:
                transfer.wait()
            except PeerLost as error:
                raise MemberError(f"{self.me} failed in the gather of updated weights: {error}", True) from error
            counters.replica_gathers += 1
            counters.replica_gathered_bytes += flat.shard.nbytes // group.size * (group.size - 1)

    # -- pipeline edges -----------------------------------------------------------------------------------------------

    def _edge(self, kind: str, chunk: int, microbatch: int, *, outgoing: bool) -> tuple[int, int]:
        """(peer stage, tag) of a transfer.

        The tag names the boundary that is crossed, so that both ends agree on it.
        """
        here = self.layout.model_chunk(self.me.p, chunk)
        after_here = outgoing == (kind == "F")  # the boundary behind this chunk, or the one before it
        there = here + 1 if after_here else here - 1
        return self.layout.stage_of(there), self._tag(min(here, there), microbatch) + (kind == "B")

    def _tag(self, boundary: int, number: int) -> int:
        """Of transfer ``number`` over a boundary, the one behind model chunk ``boundary``; the next tag is free too."""
        return (number * self.layout.stages * self.layout.chunks + boundary) * 2

    def _recv(self, action: Action) -> None:
        peer, tag = self._edge(action.kind, action.chunk, action.microbatch, outgoing=False)
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        key = (action.kind, action.chunk, action.microbatch)
        self.step.arriving[key] = (tensor, self.links.pipeline.receive(tensor, peer, tag))
        self.counters.receives += 1
        self.counters.received_bytes += tensor.nbytes

    def _wait(self, action: Action) -> None:
        key = (action.kind, action.chunk, action.microbatch)
        tensor, transfer = self.step.arriving.pop(key)
        transfer.wait()
        self.step.arrived[key] = tensor

    def _send(self, action: Action) -> None:
        peer, tag = self._edge(action.kind, action.chunk, action.microbatch, outgoing=True)
        key = (action.kind, action.chunk, action.microbatch)
        tensor = self.step.produced.pop(key)
        self.step.leaving[key] = (tensor, self.links.pipeline.send(tensor, peer, tag))
        self.counters.sends += 1
        self.counters.sent_bytes += tensor.nbytes

    def _drain(self, action: Action) -> None:
        self.step.leaving.pop((action.kind, action.chunk, action.microbatch))[1].wait()

    def _hand_on(self, kind: str, chunk: int, microbatch: int, tensor: torch.Tensor) -> None:
        """Keep what was produced for its SEND; where the next chunk is here too, it takes it directly."""
        if (kind, chunk) not in self._local:
            self.step.produced[(kind, chunk, microbatch)] = tensor
        elif kind == "F":  # a copy: the chunk that takes it may work on it in place, and this one may have saved it
            self.step.arrived[(kind, chunk + 1, microbatch)] = tensor.clone()
        else:
            self.step.arrived[(kind, chunk - 1, microbatch)] = tensor

    # -- compute ------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        step, chunk = self.step, self.chunks[action.chunk]
        c, m = action.chunk, action.microbatch
        x = upload(self._microbatches(m)[0], self._device) if chunk.first else step.arrived.pop(("F", c, m))
        if c in step.recomputed:
            y = self._keep_input(c, m, x)
        elif self._training:
            self._enliven()
            y = self._make_graph(c, m, x)
        else:
            y = self._apply(chunk, m, x)
        if chunk.last:
            step.losses[m] = y.detach()
            step.tokens += int((self._microbatches(m)[1] != IGNORED).sum())
            return
        if y.shape != self._shape or y.dtype != self._dtype:
            raise ValueError(
                f"chunk {c} gave {y.dtype} {tuple(y.shape)}, {self._dtype} {self._shape} was expected: what a part "
                "hands on is of one shape, and in train.dtype"
            )
        self._hand_on("F", c, m, y.detach().contiguous())

    def _recompute(self, action: Action) -> None:
        """The forward once more, from the same input, for the graph. Loss and tokens were counted in F."""
        step, chunk = self.step, self.chunks[action.chunk]
        c, m = action.chunk, action.microbatch
        self._enliven()
        x = step.chunk_inputs.pop((c, m))
        if chunk.backward or chunk.trained:
            self._make_graph(c, m, x)
        else:  # all is frozen up to here
            step.graphs[c, m] = None

    def _apply(self, chunk: Chunk, m: int, x: torch.Tensor) -> torch.Tensor:
        """A chunk's forward: the activation for the next chunk, or, of the last one, the loss sum."""
        for flat in chunk.sets:
            flat.ready()
        y = chunk.forward(x)
        if not chunk.last:
            return y
        logits = y if y.dtype == torch.float64 else y.float()
        labels = upload(self._microbatches(m)[1], self._device)
        return functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED, reduction="sum"
        )

    def _make_graph(self, c: int, m: int, x: torch.Tensor) -> torch.Tensor:
        """A forward that B can follow."""
        step, chunk = self.step, self.chunks[c]
        with torch.enable_grad():
            if chunk.backward:
                x = _Entry.apply(x, self._anchor, step.input_gradients.setdefault((c, m), []))
            y = self._apply(chunk, m, x)
        # Only the graph is kept: once it was sent, the output itself is nobody's. There is none if all is frozen.
        step.graphs[c, m] = get_gradient_edge(y) if y.requires_grad else None
        return y

    def _enliven(self) -> None:
        """Another chunk activation comes, and stays up to its W."""
        measured = self.measured
        measured.live_chunks += 1
        if measured.live_chunks > self._live_limit:
            raise RuntimeError(f"{measured.live_chunks} chunk activations are live, the limit is {self._live_limit}")
        measured.peak_live_chunks = max(measured.peak_live_chunks, measured.live_chunks)

    def _keep_input(self, c: int, m: int, x: torch.Tensor) -> torch.Tensor:
        """A forward that RF will repeat."""
        step, chunk = self.step, self.chunks[c]
        step.chunk_inputs[c, m] = x
        if len(step.chunk_inputs) > self._input_limit:
            raise RuntimeError(f"{len(step.chunk_inputs)} chunk inputs are kept, the limit is {self._input_limit}")
        self.measured.peak_chunk_inputs = max(self.measured.peak_chunk_inputs, len(step.chunk_inputs))
        before = x._version
        y = self._apply(chunk, m, x.clone() if chunk.in_place else x)
        if x._version != before:
            raise ValueError(f"chunk {c} changed its input in place, as it did not when the model was tried; clone it")
        return y

    def _backward(self, action: Action) -> None:
        step, chunk = self.step, self.chunks[action.chunk]
        c, m = action.chunk, action.microbatch
        for flat in chunk.sets:
            flat.ready()
        dy = None if chunk.last else step.arrived.pop(("B", c, m))
        graph = step.graphs.pop((c, m))
        with self.weights.recording((c, m)):
            if graph is not None:
                torch.autograd.backward([graph], None if dy is None else [dy])
        for flat in chunk.trained:
            flat.collect()
        if not chunk.first:
            (dx,) = step.input_gradients.pop((c, m), None) or (self._no_gradient(),)
            self._hand_on("B", c, m, dx.contiguous())

    def _no_gradient(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def _weight_gradient(self, action: Action) -> None:
        views = ChainMap(*[flat.open_gradient() for flat in self.chunks[action.chunk].trained])
        self.weights.run((action.chunk, action.microbatch), views)
        self.measured.live_chunks -= 1

    def _assert_empty(self) -> None:
        step = self.step
        left = [
            step.chunk_inputs,
            step.input_gradients,
            step.graphs,
            step.arriving,
            step.arrived,
            step.produced,
            step.leaving,
            step.reducing,
        ]
        assert not any(left), f"{self.me}: a step left {left}"
        assert not self.weights, f"{self.me}: weight gradients left"
        assert not self.measured.resident_elements, f"{self.me}: parameters left resident"
