"""What is compared: one way to train the model of the benchmark, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeropp_ray.config import RunConfig


@dataclass(frozen=True)
class Place:
    """One process of a variant, and the port on this host where its group meets."""

    rank: int
    size: int
    port: int
    device: str  # cpu or cuda


@dataclass(frozen=True)
class Variant:
    """One way to train.

    ``parallel`` and ``train`` are settings of a run configuration, for the peers too: how many stages, chunks, shards
    and micro-batches. A variant takes stages x shards processes.
    """

    name: str
    kind: str  # ours, or which class of bench.peers
    parallel: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    # of the peers alone:
    schedule: str = ""  # of torch.distributed.pipelining, without "Schedule"
    reshard: bool = False  # FSDP2's reshard_after_forward
    resident: int = 0  # most parts of a stage that pipelining's runtime keeps gathered; 0: what it does by itself
    recompute: str = (
        ""  # which parts run under torch's checkpoint: "", "full", or "but last": those before the last chunk
    )
    bfloat16: str = ""  # "": fp32; "autocast"; "policy": FSDP2's; "masters": the model in bf16, the optimizer in fp32
    checked: bool = True  # whether it trains the same as all others, so that its loss has to agree

    def config(self, shared: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """The run configuration: what all variants share, with this one's own. Raises ConfigError."""
        one = {"stages": 1, "chunks": 1, "shards": 1}
        own = {"parallel": {**one, **self.parallel}, "train": {**shared.get("train", {}), **self.train}}
        own["recovery"] = {"copy_every": 0}  # nobody else keeps copies of the state
        return RunConfig.from_dict({**shared, **own})

    def recomputes(self, part: int, parts: int, stages: int) -> bool:
        """Whether part ``part`` of ``parts`` runs under checkpoint; the last ``stages`` of them are last chunks."""
        return self.recompute == "full" or (self.recompute == "but last" and part < parts - stages)
