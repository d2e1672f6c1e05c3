"""Members in plain processes, driven by the test:

real gloo groups, no Ray. And data that the reference can be given too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeropp_ray.checkpoint import run_id
from zeropp_ray.checkpoint.manifest import VERSION, FileEntry, Manifest, Progress, entries, folder_name, publish
from zeropp_ray.checkpoint.reader import CHECKPOINTS, open_checkpoint
from zeropp_ray.comm.base import Links
from zeropp_ray.comm.connect import connect
from zeropp_ray.comm.gloo import Rendezvous
from zeropp_ray.config import RunConfig
from zeropp_ray.device import pick, prepare
from zeropp_ray.errors import MemberError
from zeropp_ray.layout import Member
from zeropp_ray.member import StageMember
from zeropp_ray.metrics.step_memory import held
from zeropp_ray.models.hf import initial_weights
from zeropp_ray.planner.plan import Plan, make_plan
from zeropp_ray.vote import Decision, Vote, decide

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.harness"])

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """Random tokens by global sample number, so that every layout and the reference see the same ones.

    ``ignored``: labels are left out in unequal number per sample, and all of those of the samples in ``blank``.
    """

    vocab: int
    seq_len: int
    per_step: int
    seed: int = 1
    ignored: bool = False
    blank: tuple[int, ...] = ()

    def sample(self, number: int) -> Batch:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        tokens = torch.randint(self.vocab, (self.seq_len + 1,), generator=random)
        tokens = tokens.sort().values if number % 2 else tokens  # something to learn
        labels = tokens[1:].clone()
        if self.ignored:
            labels[: number * 5 % self.seq_len] = -100
        if number % self.per_step in self.blank:
            labels[:] = -100
        return tokens[:-1], labels

    def batch(self, numbers: Sequence[int]) -> Batch:
        ids, labels = zip(*(self.sample(number) for number in numbers), strict=True)
        return torch.stack(ids), torch.stack(labels)

    def step(self, step: int, size: int) -> list[Batch]:
        """All samples of step 0, 1, … as the reference's micro-batches of ``size``."""
        first = step * self.per_step
        return [self.batch(range(i, i + size)) for i in range(first, first + self.per_step, size)]


class MemberSamples:
    """What member (f, r) reads of them."""

    def __init__(self, samples: Samples, config: RunConfig, f: int, r: int) -> None:
        self._samples, self._parallel, self._f, self._r = samples, config.parallel, f, r
        self.validation_rounds = 2

    def microbatch(self, step: int, m: int) -> Batch:
        p = self._parallel
        first = step * self._samples.per_step + ((m * p.replicas + self._r) * p.shards + self._f) * p.microbatch_size
        return self._samples.batch(range(first, first + p.microbatch_size))

    def validation_microbatch(self, round: int, m: int) -> Batch:
        return self.microbatch(1000 + round, m)


def _serve(
    pipe: Any, config: RunConfig, plan: Plan, me: Member, at: Rendezvous, samples: Samples, sabotage: Any
) -> None:
    torch.set_num_threads(1)
    try:
        if sabotage is not None:
            sabotage(me)
        member = _joined(config, plan, me, at, samples)
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            try:
                answer = _call(member, *request)
            except MemberError as error:
                if not error.peer_lost:
                    raise
                member.abort()  # whoever waits for this one comes free
                answer = error
            pipe.send(answer)
    except EOFError:
        return
    except BaseException:
        pipe.send(RuntimeError(traceback.format_exc()))


def _joined(config: RunConfig, plan: Plan, me: Member, at: Rendezvous, samples: Samples) -> StageMember:
    prepare(config.resources, config.train)
    member = StageMember(config, plan, me, MemberSamples(samples, config, me.f, me.r), pick(config.resources))
    member.join(_connected(member, at))
    return member


def _connected(member: StageMember, at: Rendezvous) -> Links:
    return connect(at, member.plan.layout, member.me, host="127.0.0.1", device=member.device)


def _call(member: StageMember, method: str, arguments: Sequence[Any]) -> Any:
    return globals()[method](member, *arguments) if method in globals() else getattr(member, method)(*arguments)


def gradients(member: StageMember) -> list[tuple[str, int, torch.Tensor]]:
    return [(name, start, piece.clone().cpu()) for name, start, piece in member.named_shards("gradients")]


def weights(member: StageMember) -> list[tuple[str, int, torch.Tensor]]:
    return [(name, start, piece.clone().cpu()) for name, start, piece in member.named_shards("weights")]


def save(member: StageMember, folder: Path) -> list[FileEntry]:
    return member.save(member.copies(), folder, member.checkpoint_group)


def load(member: StageMember, folder: Path) -> None:
    member.load(open_checkpoint(folder))


def shared(member: StageMember) -> list[tuple[str, int, torch.Tensor]]:
    """The member's pieces of weights and moments that chunks share, whoever answers for them."""
    found = []
    for flat in member.engine.sets:
        for slot in flat.slots if flat.shared else []:
            pieces = {"weights": flat.master[flat.place(slot)], **member._optimizer.moments(flat, slot)}
            found += [(f"{what} {slot.name}", flat.first(slot), p.clone()) for what, p in pieces.items()]
    return found


def count_forwards(member: StageMember) -> None:
    """From now on :func:`forwards` knows how often each chunk's forward ran."""
    for index, chunk in zip(member.plan.layout.owned(member.me.p), member.engine.chunks, strict=True):
        chunk.forward = _Counted(index, chunk.forward)


class _Counted:
    def __init__(self, index: int, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.index, self.forward, self.calls = index, forward, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.forward(x)


def forwards(member: StageMember) -> dict[int, int]:
    """By model chunk."""
    return {chunk.forward.index: chunk.forward.calls for chunk in member.engine.chunks}


def imported(member: StageMember, module: str) -> bool:
    return module in sys.modules


def state_bytes(member: StageMember) -> dict[str, int]:
    """Bytes of what the member holds between steps, by kind of memory."""
    found: dict[str, dict[int, int]] = {}
    for kind, tensor in held(member.engine, member._optimizer, member._copies):
        storage = tensor.untyped_storage()
        found.setdefault(kind, {})[storage._cdata] = storage.nbytes()
    return {kind: sum(storages.values()) for kind, storages in found.items()}


def start_from_the_folder(member: StageMember) -> None:
    weights = initial_weights(member.config)
    assert weights is not None
    member.set_weights(weights.__getitem__)


def state(member: StageMember) -> list[tuple[str, torch.Tensor]]:
    """All that a copy holds, and the shards, which are computed from it."""
    tensors = [("commits", member._optimizer._commits)]
    for flat in member.engine.sets:
        tensors += [("masters", flat.master), ("shard", flat.shard)]
        tensors += [("moments", moment) for moment in member._optimizer._moments.get(flat, {}).values()]
    return [(name, tensor.clone()) for name, tensor in tensors]


def abort_in(member: StageMember, seconds: float) -> None:
    """From another thread, in a while."""
    threading.Timer(seconds, member.abort).start()


def wait_for_nothing(member: StageMember) -> None:
    """That stages send each other."""
    peer = (member.me.p + 1) % member.plan.layout.stages
    member.engine.links.pipeline.receive(torch.zeros(1), peer, 1000 + member.me.p).wait()


def die_in_copy(member: StageMember) -> None:
    """From now on, in the midst of an exchange."""
    member.reached = lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == "copy" else None


def close_copies(member: StageMember) -> None:
    member.engine.links.copies.close()


def shift_frozen(member: StageMember) -> None:
    for flat in member.engine.sets:
        if not flat.trained:
            flat.master.add_(0.01)
    member.engine.refresh(frozen=True)


def nap(member: StageMember, seconds: float) -> None:
    time.sleep(seconds)


def rejoin(member: StageMember, at: Rendezvous) -> None:
    member.abort()
    member.join(_connected(member, at))


@dataclass
class Run:
    """The members of a layout, called together."""

    config: RunConfig
    plan: Plan
    pipes: list[tuple[Member, Any]]
    at: Rendezvous
    start: Callable[[Member, Rendezvous], tuple[Any, Any]] | None = None  # a member: its process, our end of its pipe
    processes: dict[Member, Any] = field(default_factory=dict)
    store: Any = None

    def publish(self) -> None:
        """What the driver puts in the store for an epoch."""
        if self.at.transport == "nccl":
            from zeropp_ray.comm.nccl_forming import publish

            publish(self.store, self.at.epoch, self.plan.layout)

    def kill(self, me: Member) -> None:
        self.processes[me].kill()
        self.processes[me].join()

    def recover(self, lost: Collection[Member]) -> None:
        """New processes in the place of killed ones, and a new epoch of all."""
        assert self.start is not None
        self.at = replace(self.at, epoch=self.at.epoch + 1)
        self.publish()
        for place, (me, pipe) in enumerate(self.pipes):
            if me in lost:
                self.processes[me], pipe = self.start(me, self.at)
                self.pipes[place] = me, pipe
            else:
                pipe.send(("rejoin", (self.at,)))
        self.answers()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        for _, pipe in self.pipes:
            pipe.send((method, arguments))
        return self.answers()

    def answers(self) -> list[Any]:
        answers = [pipe.recv() for _, pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def save(self, run: Path, step: int, commits: int) -> Path:
        """A checkpoint of what is committed, as the driver makes one."""
        partial, final = run / CHECKPOINTS / ".partial", run / CHECKPOINTS / folder_name(step)
        partial.mkdir(parents=True)
        progress = Progress(step=step, commits=commits, samples=step * self.config.parallel.global_batch, tokens=0)
        files = entries(self.call("save", partial))
        if not (run / run_id.FILE).exists():
            run_id.create(run)
        publish(partial, final, Manifest(VERSION, run_id.read(run), progress, self.config.to_dict(), [], {}, files))
        return final

    def whole(self, what: str) -> dict[str, torch.Tensor]:
        """``gradients`` or ``weights`` by full name, flat, put together from what the members answer for."""
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for shards in self.call(what):
            for name, start, piece in shards:
                pieces.setdefault(name, []).append((start, piece))
        return {
            name: torch.cat([piece for _, piece in sorted(found, key=lambda x: x[0])]) for name, found in pieces.items()
        }


class _Here:
    """The only member of its layout, in this process, as a pipe to it."""

    def __init__(self, config: RunConfig, plan: Plan, me: Member, at: Rendezvous, samples: Samples) -> None:
        self._member = _joined(config, plan, me, at, samples)

    def send(self, request: tuple[str, Sequence[Any]]) -> None:
        self._answer = _call(self._member, *request)

    def recv(self) -> Any:
        return self._answer

    def close(self) -> None:
        self._member.abort()


@contextmanager
def members(
    config: RunConfig,
    samples: Samples,
    sabotage: Callable[[Member], None] | None = None,
    *,
    apart: bool = False,
) -> Iterator[Run]:
    """Members that have joined. One that is alone is in this process, unless it has a fault or is to be ``apart``."""
    plan = make_plan(config)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    transport = "nccl" if config.resources.transport == "nccl" else "gloo"
    form_s = 60.0 if transport == "nccl" else 15.0
    at = Rendezvous("127.0.0.1", store.port, epoch=0, timeout_s=60, form_s=form_s, transport=transport)
    started, pipes = [], []
    try:
        if plan.layout.size == 1 and sabotage is None and not apart:
            (me,) = plan.layout.members()
            yield Run(config, plan, [(me, _Here(config, plan, me, at, samples))], at)
            return

        def start(me: Member, at: Rendezvous) -> tuple[Any, Any]:
            ours, theirs = _processes.Pipe()
            process = _processes.Process(
                target=_serve, args=(theirs, config, plan, me, at, samples, sabotage), daemon=True
            )
            process.start()
            theirs.close()
            started.append(process)
            return process, ours

        run = Run(config, plan, pipes, at, start, store=store)
        run.publish()
        for me in plan.layout.members():
            run.processes[me], pipe = start(me, at)
            pipes.append((me, pipe))
        run.answers()
        yield run
    finally:
        for _, pipe in pipes:
            pipe.close()
        for process in started:
            process.join(10)
            process.kill()


@dataclass
class Trained:
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    validation: float
    reports: list[Any]
    plan: Plan


def train(
    config: RunConfig,
    samples: Samples,
    *,
    sabotage: Callable[[Member], None] | None = None,
    decision: Callable[[int, Sequence[Vote], float], Decision] = decide,
) -> Trained:
    """All steps of ``config`` as the driver takes them;

    gradients are the first step's, of the mean loss before clipping.
    """
    with members(config, samples, sabotage) as run:
        last, losses, first = None, [], {}
        for step in range(1, config.train.steps + 1):
            last = decision(step, run.call("advance", step, last), config.train.clip_norm)
            losses.append(last.loss)
            if not first and last.tokens:
                first = {name: gradient / last.tokens for name, gradient in run.whole("gradients").items()}
        run.call("flush", last)
        reports = run.call("report")
        sums = run.call("evaluate")
        validation = sum(loss for loss, _ in sums) / max(1, sum(tokens for _, tokens in sums))
        return Trained(losses, first, run.whole("weights"), validation, reports, run.plan)
