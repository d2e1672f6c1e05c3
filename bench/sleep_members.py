"""The contestants of :mod:`bench.sleep` in one process: a stage of ours, and a rank of each schedule of PyTorch's.

Both run the sleeping model over gloo on one set of tokens. A process holds all of them, and one steps at a time.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelining
from torch.nn import functional

from bench.sleeping import VOCABULARY, Naps, SentTimes, sharpen_sleep, sleep_for_weights, wake_up
from zeropp_ray.comm.base import Group, Transfer
from zeropp_ray.comm.gloo import Rendezvous, connect
from zeropp_ray.config import RunConfig
from zeropp_ray.layout import Member
from zeropp_ray.member import StageMember
from zeropp_ray.models.build import ModelChunk, build_owned
from zeropp_ray.models.layered import resolve_factory
from zeropp_ray.planner.plan import Plan
from zeropp_ray.schedule import Program


@dataclass(frozen=True)
class Setting:
    """What a process is told once: where to meet, and who takes part."""

    port: int
    ours: Mapping[str, tuple[RunConfig, Plan]]  # by name; their programs come with the costs
    theirs: Mapping[str, str]  # name → class in torch.distributed.pipelining; they run the first of ours' model


@dataclass(frozen=True)
class Pace:
    """Durations in seconds by task ("F", "B", "W"), the delay of messages, and the programs of ours made for both."""

    seconds: dict[str, float]
    delay: float
    programs: dict[str, Program]


@dataclass(frozen=True)
class Stepped:
    """One step at one member."""

    late_s: float  # how much later than it should it began
    ended: float  # time.monotonic
    process_s: float  # CPU time of all its threads: what is no sleep
    loss: float | None  # nats per token, in the last stage
    naps: dict[str, int]
    gathers: int  # with one resident chunk; of theirs what its runtime would make, for nothing is sharded here
    peak_live: float  # whole-stage micro-batches


def serve(pipe: Any, rank: int, setting: Setting, stamps: Any) -> None:
    """Answer the calls of the benchmark until the pipe closes: ``("pace", …)`` and ``("step", name, start)``."""
    try:
        member = _Process(rank, setting, SentTimes(stamps))
        pipe.send(None)
        while True:
            name, *arguments = pipe.recv()
            pipe.send(getattr(member, name)(*arguments))
    except EOFError:
        return
    except BaseException:
        pipe.send(RuntimeError(traceback.format_exc()))


class _Process:
    def __init__(self, rank: int, setting: Setting, sent: SentTimes) -> None:
        torch.set_num_threads(1)
        sharpen_sleep()
        self._naps, self._sent = Naps(), sent
        self._contestants: dict[str, _Ours | _Theirs] = {}
        for epoch, (name, made) in enumerate(setting.ours.items()):
            self._contestants[name] = _Ours(rank, *made, setting.port, epoch, self._naps, sent)
        if sys.platform == "linux":  # as ours: all messages over the loopback interface
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore("127.0.0.1", setting.port, is_master=False)
        config, plan = next(iter(setting.ours.values()))
        stages = config.parallel.stages
        dist.init_process_group("gloo", store=dist.PrefixStore("theirs", store), rank=rank, world_size=stages)
        for name, schedule in setting.theirs.items():
            self._contestants[name] = _Theirs(rank, config, plan, schedule, self._naps, sent)
        gc.collect()
        gc.freeze()  # what is there stays; a collection that walks it takes a tenth of a second

    def pace(self, pace: Pace) -> None:
        """Sleep for so long from now on."""
        self._naps.seconds, self._sent.delay = pace.seconds, pace.delay
        for name, program in pace.programs.items():
            self._contestants[name].take(program)  # type: ignore[union-attr]

    def step(self, name: str, start: float, *arguments: Any) -> Any:
        """One step of contestant ``name``, begun at ``start`` by every member."""
        self._naps.taken.clear()
        time.sleep(max(0.0, start - time.monotonic()))
        late = time.monotonic() - start
        process = time.process_time()
        loss, gathers, live, answer = self._contestants[name].step(*arguments)
        ended, process = time.monotonic(), time.process_time() - process
        gc.collect()  # of this step; in nobody's time
        return Stepped(late, ended, process, loss, dict(self._naps.taken), gathers, live), answer


class _Tokens:
    """The same micro-batches in every step."""

    validation_rounds = 0

    def __init__(self, config: RunConfig) -> None:
        n, b, s = config.parallel.microbatches, config.parallel.microbatch_size, config.model.seq_len
        tokens = torch.randint(VOCABULARY, (n * b, s + 1), generator=torch.Generator().manual_seed(1))
        self.ids, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self._microbatches = list(zip(self.ids.split(b), self.labels.split(b), strict=True))

    def microbatch(self, step: int, m: int) -> tuple[Tensor, Tensor]:
        return self._microbatches[m]

    validation_microbatch = microbatch


class _Ours:
    """A :class:`StageMember` as it runs in training; only its layers sleep, and its messages wait for the delay."""

    def __init__(
        self, rank: int, config: RunConfig, plan: Plan, port: int, epoch: int, naps: Naps, sent: SentTimes
    ) -> None:
        me = Member(rank, 0, 0)
        self._member = StageMember(config, plan, me, _Tokens(config))
        at = Rendezvous(host="127.0.0.1", port=port, epoch=epoch, timeout_s=120)
        links = connect(at, plan.layout, me, host="127.0.0.1")
        _delay_messages(links.pipeline, sent)
        self._member.join(links)
        wake_up(self._member._owned.model, naps, weight_nap=False)
        sleep_for_weights(self._member.engine.weights, naps)
        self._steps = 0

    def take(self, program: Program) -> None:
        self._member.plan = replace(self._member.plan, program=program)

    def step(self, decision: Any) -> tuple[float | None, int, float, Any]:
        self._steps += 1
        member, before = self._member, self._member.counters.gathers
        vote = member.advance(self._steps, decision)
        live = member.engine.measured.peak_live_chunks / member.plan.layout.chunks
        loss = vote.loss_sum / vote.tokens if vote.tokens else None
        return loss, member.counters.gathers - before, live, vote


def _delay_messages(group: Group, sent: SentTimes) -> None:
    """Let what ``group`` receives be usable only some time after it was sent. A tag names one message of a step."""
    send, receive = group.send, group.receive

    def stamped(tensor: Tensor, peer: int, tag: int) -> Transfer:
        sent.stamp(tag)
        return send(tensor, peer, tag)

    def delayed(tensor: Tensor, peer: int, tag: int) -> Transfer:
        return _Delayed(receive(tensor, peer, tag), sent, tag)

    group.send, group.receive = stamped, delayed  # type: ignore[method-assign]


class _Delayed:
    def __init__(self, transfer: Transfer, sent: SentTimes, message: int) -> None:
        self._transfer, self._sent, self._message = transfer, sent, message

    def wait(self) -> None:
        self._transfer.wait()
        self._sent.wait(self._message)


class _Theirs:
    """One rank of a schedule of PyTorch, run by PyTorch's runtime, with AdamW as ours has it."""

    def __init__(self, rank: int, config: RunConfig, plan: Plan, schedule: str, naps: Naps, sent: SentTimes) -> None:
        cls: Any = getattr(pipelining, schedule)
        V, P, N = config.parallel.chunks, config.parallel.stages, config.parallel.microbatches
        owned = [v * P + (P - 1 - rank if v % 2 and is_v_shaped(schedule) else rank) for v in range(V)]
        factory, train = resolve_factory(config.model), config.train
        model = build_owned(factory, plan.description, plan.ranges, owned, seed=config.run.seed)
        wake_up(model.model, naps, weight_nap=True)
        stages = [_DelayedStage(_Chunk(model.chunks[c]), c, P * V, sent) for c in owned]
        self._schedule = cls(stages, N, loss_fn=_loss)
        self._first, self._last = 0 in owned, P * V - 1 in owned
        self._tokens = _Tokens(config)
        self._optimizer = torch.optim.AdamW(
            [parameter for stage in stages for parameter in stage.submod.parameters()],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
        order = self._schedule.pipeline_order[rank]
        self._gathers, self._peak_live = gathers_at_one_resident(order), peak_live(order) / V

    def step(self) -> tuple[float | None, int, float, None]:
        losses: list[Tensor] = []
        arguments = (self._tokens.ids,) if self._first else ()
        target: dict[str, Any] = {"target": self._tokens.labels, "losses": losses} if self._last else {}
        self._schedule.step(*arguments, **target, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss = torch.stack(losses).mean().item() if losses else None
        return loss, self._gathers, self._peak_live, None


class _Chunk(nn.Module):
    """A model chunk as a module that holds its parameters."""

    def __init__(self, chunk: ModelChunk) -> None:
        super().__init__()
        self._chunk = chunk
        self.parts = nn.ModuleList(chunk.model.blocks[i] for i in chunk.blocks)
        self.parts.extend([chunk.model.embed] * chunk.first + [chunk.model.head] * chunk.last)

    def forward(self, x: Tensor) -> Tensor:
        return self._chunk(x)


class _DelayedStage(PipelineStage):
    """A pipeline stage whose messages are usable only some time after they were sent.

    Micro-batch ``m`` crossing the boundary behind model chunk ``c`` is message ``2 (m C + c)``, its gradient the next.
    """

    def __init__(self, module: nn.Module, index: int, chunks: int, sent: SentTimes) -> None:
        super().__init__(module, index, chunks, torch.device("cpu"))
        self._sent = sent

    def _message(self, boundary: int, m: int) -> int:
        return 2 * (m * self.num_stages + boundary)

    def get_fwd_send_ops(self, m: int) -> list[dist.P2POp]:
        self._sent.stamp(self._message(self.stage_index, m))
        return super().get_fwd_send_ops(m)

    def get_bwd_send_ops(self, m: int) -> list[dist.P2POp]:
        self._sent.stamp(self._message(self.stage_index - 1, m) + 1)
        return super().get_bwd_send_ops(m)

    def forward_one_chunk(self, m: int, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        if not self.is_first:
            self._sent.wait(self._message(self.stage_index - 1, m))
        return super().forward_one_chunk(m, *arguments, **options)

    def backward_one_chunk(self, m: int, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        if not self.is_last:
            self._sent.wait(self._message(self.stage_index, m) + 1)
        return super().backward_one_chunk(m, *arguments, **options)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def is_v_shaped(schedule: str) -> bool:
    """Whether odd chunks run backwards over the stages."""
    return "V" in schedule


def peak_live(order: Sequence[Any]) -> int:
    """Most chunk activations, from ``F`` to ``W`` or to the full backward, that a rank of PyTorch's holds at once."""
    live = most = 0
    for action in order:
        if action is not None:
            live += action.computation_type is pipelining.FORWARD
            most = max(most, live)
            live -= action.computation_type in (pipelining.FULL_BACKWARD, pipelining.BACKWARD_WEIGHT)
    return most


def gathers_at_one_resident(order: Sequence[Any]) -> int:
    """All-gathers that PyTorch's runtime makes on a rank per step if one stage's parameters may be unsharded at a time;
    by its own lowering.
    """
    lowered = pipelining._add_unshard_reshard(list(order), max_active_stages=1)
    return sum(action.computation_type is pipelining.UNSHARD for action in lowered)
