"""What users would pick instead, each in its usual form: a plain loop, DDP, FSDP2, ``torch.distributed.pipelining``,
alone and composed with FSDP2 as torchtitan does it.

A peer is one process of a variant. All are given the same weights, samples, fused AdamW and clip, and the allocator
keeps freed memory for them as it does for ours. Losses are means over a micro-batch divided by the number of them, so
that the gradient is that of the mean over the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.tensor_bytes import Watched, watched
from bench.variant import Place, Variant
from zeropp_ray.allocator import keep_freed_memory
from zeropp_ray.config import RunConfig
from zeropp_ray.data.corpus import load_corpus
from zeropp_ray.data.sampler import Batches
from zeropp_ray.models import build_owned, describe, resolve_factory
from zeropp_ray.models.cut import cut_model
from zeropp_ray.models.describe import ModelDescription


class Part(nn.Module):
    """Consecutive blocks of a model, with the embedding if they are its first and the head if its last."""

    def __init__(self, model: Any, blocks: range, *, recomputed: bool, bfloat16: str) -> None:
        super().__init__()
        self.embed = model.embed if blocks.start == 0 else None
        self.blocks = nn.ModuleList(model.blocks[i] for i in blocks)
        self.head = model.head if blocks.stop == len(model.blocks) else None
        self.recomputed, self.autocast = recomputed, bfloat16 == "autocast"
        if bfloat16 == "masters":
            self.to(torch.bfloat16)

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, torch.bfloat16, enabled=self.autocast):
            h = self.embed(h) if self.embed is not None else h
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False) if self.recomputed else block(h)
            return self.head(h) if self.head is not None else h


class Peer:
    """One process. ``run`` is what is timed; what it returns is this process's part of the last step's loss."""

    def __init__(self, variant: Variant, config: RunConfig, place: Place) -> None:
        self.variant, self.config, self.parallel, self.place = variant, config, config.parallel, place
        torch.set_num_threads(1)
        keep_freed_memory()
        self.device = torch.device(place.device)
        if self.device.type == "cuda":
            if place.size > torch.cuda.device_count():
                raise RuntimeError(
                    f"{place.size} processes need as many GPUs, and {torch.cuda.device_count()} are here"
                )
            self.device = torch.device("cuda", place.rank)
            torch.cuda.set_device(self.device)
        if place.size > 1:
            store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
        f = place.rank % self.parallel.shards
        self.data = Batches(self.config, load_corpus(self.config), f, 0)
        self.build(*whole_model(self.config))

    def build(self, model: Any, description: ModelDescription) -> None:
        """Make the parts, the optimizer and whatever wraps them."""
        raise NotImplementedError

    def step(self, step: int) -> Tensor:
        """Train on step 0, 1, …; this process's part of the loss, which the parts of all add up to."""
        raise NotImplementedError

    def run(self, first: int, steps: int) -> float:
        for step in range(first, first + steps):
            loss = self.step(step)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return float(loss)

    def watch(self, step: int) -> tuple[float, Watched]:
        """One step, watched; not for timing."""
        with watched() as found:
            loss = self.step(step)
        return float(loss), found

    # -- pieces -------------------------------------------------------------------------------------------------------

    def microbatches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        each = (self.data.microbatch(step, m) for m in range(self.parallel.microbatches))
        return [(ids.to(self.device), labels.to(self.device)) for ids, labels in each]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """A micro-batch's part of the mean loss over this process's samples of a step."""
        mean = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return mean / self.parallel.microbatches

    def part(self, model: Any, blocks: range, recomputed: bool) -> Part:
        return Part(model, blocks, recomputed=recomputed, bfloat16=self.variant.bfloat16).to(self.device)

    def optimize(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the optimizer of ``parameters``, which in bf16 with masters are fp32 copies of the model's."""
        train = self.config.train
        self.computed = self.parameters = list(parameters)
        if self.variant.bfloat16 == "masters":
            self.parameters = [nn.Parameter(p.detach().float()) for p in self.computed]
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=True
        )

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.train.clip_norm)

    @torch.no_grad()
    def update(self) -> None:
        masters = self.parameters is not self.computed
        if masters:
            for master, p in zip(self.parameters, self.computed, strict=True):
                master.grad, p.grad = p.grad.float(), None  # type: ignore[union-attr]
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if masters:
            torch._foreach_copy_([*self.computed], [*self.parameters])


class Plain(Peer):
    """A loop over micro-batches in one process. With several processes, each trains alone on its own samples."""

    def build(self, model: Any, description: ModelDescription) -> None:
        whole = self.part(model, range(len(model.blocks)), recomputed=self.variant.recompute != "")
        self.model = self.wrapped(whole)
        self.optimize(self.model.parameters())

    def wrapped(self, model: Part) -> nn.Module:
        return model

    def synchronising(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; gradients of the ``last`` are summed over the processes."""
        return nullcontext()

    def step(self, step: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        batches = self.microbatches(step)
        for m, (ids, labels) in enumerate(batches, 1):
            with self.synchronising(last=m == len(batches)):
                loss = self.loss(self.model(ids), labels)
                loss.backward()
            total += loss.detach()
        self.update()
        return total / self.parallel.shards


class DataParallel(Plain):
    """``DistributedDataParallel``: the whole model at each process, gradients summed while the backward runs."""

    def wrapped(self, model: Part) -> nn.Module:
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return self.ddp

    def synchronising(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()


def shard(part: Part, mesh: DeviceMesh, variant: Variant) -> None:
    """FSDP2 as torchtitan applies it: the embedding, every block and the head are sharded on their own.

    Resharded, parameters go after each forward and are gathered again for the backward; else they are kept.
    """
    types = (torch.bfloat16, torch.float32) if variant.bfloat16 else ()
    apply = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(*types))
    reshard = variant.reshard
    if part.embed is not None:
        apply(part.embed, reshard_after_forward=reshard)
    for block in part.blocks:
        apply(block, reshard_after_forward=reshard)
    if part.head is not None:
        apply(part.head, reshard_after_forward=False)  # the backward begins with it
    apply(part, reshard_after_forward=reshard)


class Sharded(Plain):
    """FSDP2 (``fully_shard``): parameters, gradients and moments sharded over the processes."""

    def wrapped(self, model: Part) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.place.size,))
        shard(model, mesh, self.variant)
        self.fsdp: Any = model
        return model

    def synchronising(self, last: bool) -> AbstractContextManager[Any]:
        self.fsdp.set_requires_gradient_sync(last)
        self.fsdp.set_is_last_backward(last)
        self.fsdp.set_reshard_after_backward(last or self.variant.reshard)
        return nullcontext()


class Pipelined(Peer):
    """``torch.distributed.pipelining``; with ``parallel.shards`` > 1 every stage is sharded with FSDP2.

    The same cut in even costs as ours. Shapes are given, so that nothing is inferred at run time.
    """

    def build(self, model: Any, description: ModelDescription) -> None:
        P, F, V = self.parallel.stages, self.parallel.shards, self.parallel.chunks
        mesh = init_device_mesh(self.device.type, (P, F), mesh_dim_names=("stages", "shards"))
        p = mesh.get_local_rank("stages")
        self.pipeline = mesh.get_group("stages")
        schedule = getattr(pipelining, f"Schedule{self.variant.schedule}")
        ranges = cut_model(description, P * V)
        mine = [p, 2 * P - 1 - p] if "ZBV" in self.variant.schedule else range(p, P * V, P)
        self.parts = [self.part(model, ranges[i], self.variant.recomputes(i, P * V, P)) for i in mine]
        self.first, self.last = 0 in mine, P * V - 1 in mine
        for part in self.parts if F > 1 else ():
            shard(part, mesh["shards"], self.variant)
        stages = [self._stage(part, i, P * V, description) for part, i in zip(self.parts, mine, strict=True)]
        single = issubclass(schedule, schedules.PipelineScheduleSingle)
        with at_most_resident(self.variant.resident):
            self.schedule = schedule(
                stages[0] if single else stages, self.parallel.microbatches, loss_fn=self.loss, scale_grads=False
            )
        self.optimize(p for part in self.parts for p in part.parameters())

    def _stage(self, part: Part, i: int, stages: int, model: ModelDescription) -> pipelining.PipelineStage:
        b, s = self.parallel.microbatch_size, model.seq_len
        dtype = torch.bfloat16 if self.variant.bfloat16 == "masters" else torch.float32
        h = torch.empty(b, s, model.hidden, dtype=dtype, device="meta", requires_grad=True)
        ids = torch.empty(b, s, dtype=torch.int64, device="meta")
        logits = torch.empty(b, s, model.vocab, dtype=dtype, device="meta", requires_grad=True)
        return pipelining.PipelineStage(
            part,
            i,
            stages,
            self.device,
            input_args=ids if i == 0 else h,
            output_args=logits if i == stages - 1 else h,
            group=self.pipeline,
        )

    def step(self, step: int) -> Tensor:
        ids, labels = (torch.cat(tensors) for tensors in zip(*self.microbatches(step), strict=True))
        losses: list[Tensor] = []
        arguments = (ids,) if self.first else ()
        self.schedule.step(*arguments, target=labels if self.last else None, losses=losses, return_outputs=False)
        self.update()
        return sum(losses, torch.zeros((), device=self.device)).detach() / self.parallel.shards

    def clip(self) -> None:
        """By the norm over all stages."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        squared = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        dist.all_reduce(squared, group=self.pipeline)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.train.clip_norm, squared.sqrt())


@contextmanager
def at_most_resident(parts: int) -> Iterator[None]:
    """Schedules made inside keep at most so many parts of a stage gathered; 0: as many as they do by themselves.

    The runtime has this number as a default argument (3) that nothing public reaches.
    """
    lower = schedules._add_unshard_reshard
    if parts:
        schedules._add_unshard_reshard = partial(lower, max_active_stages=parts)
    try:
        yield
    finally:
        schedules._add_unshard_reshard = lower


def whole_model(config: RunConfig) -> tuple[Any, ModelDescription]:
    """The model on the CPU with the weights that every layout of ours starts from."""
    factory = resolve_factory(config.model)
    description = describe(factory, config.model.seq_len, seed=config.run.seed)
    blocks = [range(len(description.blocks))]
    return build_owned(factory, description, blocks, [0], seed=config.run.seed).model, description


PEERS: dict[str, type[Peer]] = {
    "plain": Plain,
    "ddp": DataParallel,
    "fsdp2": Sharded,
    "pipelining": Pipelined,
}
"""By the kind of a variant."""
