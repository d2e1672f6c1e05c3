"""The run configuration: typed, checked when it is read, TOML in and out.

Every setting is declared once, with its default, meaning and unit. A configuration that exists is one that can run, as
far as can be told without the data, the model's code and the machine: types, ranges and what spans fields are checked
when it is built, from a file, the command line or Python alike. An error is one line: the field, its value, what is
wrong, what would work.

Symbols: P = stages, V = chunks, F = shards, R = replicas, N = microbatches, U = unit, b = microbatch_size.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import tomli_w

from zeropp_ray.comm.interface import is_setting
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import expanded
from zeropp_ray.presets import FAMILIES, PRESETS
from zeropp_ray.schedule.costs import Costs
from zeropp_ray.schedule.policies import POLICIES
from zeropp_ray.schedule.spec import AUTO, ScheduleSpec, resolve
from zeropp_ray.schedule.tune import tune
from zeropp_ray.uri import check_uri

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
DEFAULT_MICROBATCHES = 8
_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a table",
    int | str: f"a whole number, or {AUTO!r}",
}


def setting(default: T, help: str, unit: str = "") -> T:
    """A field with its meaning and unit; ``to_toml`` writes both as a comment."""
    return field(default=default, metadata={"help": help, "unit": unit})


def _close(name: str, known: Iterable[str]) -> str:
    """The end of an error line: the nearest known name, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


@dataclass(frozen=True, kw_only=True)
class _Section:
    """Base of the sections: checks the type of every field, then the section's own rules (``_check``)."""

    SECTION: ClassVar[str]

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if name == "SECTION":
                continue
            kind = dict if kind not in _TYPE_NAMES else kind
            value = getattr(self, name)
            if kind is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, name, value)
            if type(value) not in (get_args(kind) or (kind,)):
                raise ConfigError(f"{self._shown(name)}: expected {_TYPE_NAMES[kind]}")
            if kind is float and not math.isfinite(value):
                raise ConfigError(f"{self._shown(name)}: expected a finite number")
        self._check()

    def _check(self) -> None:
        pass

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
        return f"{self.SECTION}.{name} = {shown}"

    def _require(self, ok: bool, name: str, problem: str) -> None:
        if not ok:
            raise ConfigError(f"{self._shown(name)}: {problem}")

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            self._require(getattr(self, name) >= least, name, f"must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class RunSection(_Section):
    SECTION: ClassVar[str] = "run"

    name: str = setting("", "folder of the run inside run.dir; empty: model and time of the start")
    seed: int = setting(0, "seed of the weights at start and of the order of the data")
    dir: str = setting("runs", "folder that holds the runs, or a URI, such as s3://bucket/runs")

    def _check(self) -> None:
        self._require(
            self.name == "" or (len(self.name) <= 100 and re.fullmatch(r"\w[\w.-]*", self.name) is not None),
            "name",
            "it becomes a folder name: letters, digits, '_', '-' and '.', not starting with '.' or '-', at most 100",
        )
        self._require(0 <= self.seed < 2**63, "seed", "must be between 0 and 2^63 - 1")
        self._require(self.dir != "", "dir", "names no folder; use 'runs' or '.'")
        check_uri(self.dir, f"run.dir = {self.dir!r}")


@dataclass(frozen=True, kw_only=True)
class ModelSection(_Section):
    SECTION: ClassVar[str] = "model"

    preset: str = setting("", "a published model, such as gpt2 or llama3.2-1b: its sizes, where none are given here")
    init_from: str = setting("", "a Hugging Face folder to start from: its weights, and its sizes as from a preset")
    family: str = setting("llama", "built-in model family, llama or gpt2; not used with model.factory")
    layers: int = setting(4, "transformer layers")
    dim: int = setting(128, "width of the model")
    heads: int = setting(4, "attention heads")
    kv_heads: int = setting(0, "key and value heads; 0: as many as heads")
    head_dim: int = setting(0, "width of a head; 0: dim / heads")
    ffn_dim: int = setting(0, "inner width of the feed-forward part; 0: 8/3 of dim, rounded up to 32; gpt2: 4 dim")
    vocab_size: int = setting(256, "number of different tokens: 256 for bytes, else at least the tokenizer's")
    seq_len: int = setting(128, "length of a sequence", "tokens")
    context: int = setting(0, "longest sequence that the model is made for; 0: seq_len", "tokens")
    tie_embeddings: bool = setting(False, "the head uses the weights of the embedding; gpt2: true unless it is given")
    rope_theta: float = setting(10000.0, "base of the rotary position angles")
    rope_factor: float = setting(1.0, "stretching of slow rotary angles as in Llama 3.1, from 8192 tokens; 1: none")
    norm_eps: float = setting(1e-5, "added to the variance in a norm")
    factory: str = setting("", "your own model instead of a family: 'package.module:function'")
    args: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata={"help": "keyword arguments for model.factory", "unit": ""}
    )

    def __new__(cls, **given: Any) -> ModelSection:
        section = super().__new__(cls)
        if given:
            object.__setattr__(section, "_given", frozenset(given))  # until __post_init__
        return section

    def __post_init__(self) -> None:
        """Fields that were not given take their values from the preset, or else the defaults of the family."""
        given = vars(self).pop("_given", frozenset())
        preset = PRESETS.get(str(self.preset), {})
        family = self.family if "family" in given else preset.get("family", self.family)
        for name, value in {**FAMILIES.get(str(family), {}), **preset}.items():
            if name not in given:
                object.__setattr__(self, name, value)
        super().__post_init__()

    def _check(self) -> None:
        self._at_least(1, "vocab_size", "seq_len")
        for name in ("preset", "init_from"):
            text = "a model of your own brings its sizes and weights itself; remove one of the two"
            self._require(not (self.factory and getattr(self, name)), name, text)
        if self.factory:
            self._require(
                re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*", self.factory) is not None,
                "factory",
                "expected the dotted path of a function, such as 'mymodel:build' or 'mypackage.models:build'",
            )
            return
        self._require(not self.args, "args", "only model.factory takes arguments; set model.factory or remove them")
        self._require(self.family in FAMILIES, "family", f"unknown; {_close(self.family, FAMILIES)}")
        self._require(self.preset in ("", *PRESETS), "preset", f"unknown; {_close(self.preset, PRESETS)}")
        self._at_least(1, "layers", "dim", "heads", "rope_factor")
        self._at_least(0, "kv_heads", "head_dim", "ffn_dim", "context")
        self._require(
            not 0 < self.context < self.seq_len, "context", f"must hold model.seq_len = {self.seq_len}; lower that one"
        )
        self._require(self.rope_theta > 0, "rope_theta", "must be above 0")
        self._require(self.norm_eps > 0, "norm_eps", "must be above 0")
        self._check_heads()

    def _check_heads(self) -> None:
        rotary = self.family == "llama"
        if rotary and not self.head_dim:
            self._require(self.dim % 2 == 0, "dim", f"rotary positions need an even width; use {self.dim + 1}")
        self._require(
            not (rotary and self.head_dim % 2),
            "head_dim",
            f"rotary positions need an even width; use {self.head_dim + 1}",
        )
        even = 2 if rotary else 1
        if self.dim % (even * self.heads) and not (rotary and self.head_dim):
            near = _nearest(min(self.heads, self.dim), lambda heads: self.dim % (even * heads) == 0)
            width = " of even width" if rotary else ""
            self._require(False, "heads", f"must cut model.dim = {self.dim} into equal parts{width}; use {near}")
        if self.kv_heads and self.heads % self.kv_heads:
            near = _nearest(min(self.kv_heads, self.heads), lambda kv_heads: self.heads % kv_heads == 0)
            self._require(False, "kv_heads", f"must divide model.heads = {self.heads}; use {near}")
        if self.family == "gpt2":
            fixed = {"kv_heads": self.heads, "head_dim": self.dim // self.heads, "rope_factor": 1.0}
            for name, only in fixed.items():
                self._require(getattr(self, name) in (0, only), name, f"gpt2 has no choice here; use {only:g}")

    def resolved(self) -> ModelSection:
        """The same model with every automatic size (0) written out."""
        if self.factory:
            return self
        ffn_dim = 4 * self.dim if self.family == "gpt2" else -(-8 * self.dim // (3 * 32)) * 32
        return dataclasses.replace(
            self,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or self.dim // self.heads,
            ffn_dim=self.ffn_dim or ffn_dim,
            context=self.context or self.seq_len,
        )

    @property
    def label(self) -> str:
        """What to call the model in a sentence: its factory, its preset and what was changed of that, or its family."""
        preset = PRESETS.get(self.preset, {})
        changed = [f"{name} {getattr(self, name)}" for name, value in preset.items() if getattr(self, name) != value]
        changes = f" with {', '.join(changed)}" if changed else ""
        return self.factory or (self.preset and self.preset + changes) or self.family


@dataclass(frozen=True, kw_only=True)
class ParallelSection(_Section):
    SECTION: ClassVar[str] = "parallel"

    stages: int = setting(2, "P: pipeline stages")
    chunks: int = setting(2, "V: model chunks per stage; the model is cut in P*V")
    shards: int = setting(2, "F: members of a stage, which share its parameters (ZeRO-3)")
    replicas: int = setting(1, "R: copies of the whole stages x shards mesh")
    zero1: bool = setting(False, "split masters and moments of a shard over its replicas too (ZeRO-1)")
    microbatches: int = setting(0, "N: micro-batches per step and member; 0: as train.tokens_per_step says, else 8")
    microbatch_size: int = setting(2, "b: size of a micro-batch; a step takes N*b*F*R", "sequences")
    unit: int | str = setting(
        0,
        "U: least size of a scheduling unit, from P to N; 0: min(N, 2P); 'auto': what suits the costs",
        "micro-batches",
    )
    memory_limit: float = setting(
        0.0,
        "live activations of a stage; 0: largest unit + P/V, with recompute 2P/V; P = 1: the least; unit 'auto': the "
        "least that loses no time, up to 2P",
        "micro-batches",
    )
    prefetch: bool = setting(False, "gather the next chunk ahead of its use; two are then resident at a time")
    recompute: str = setting("none", "whose forwards run again instead of keeping activations: none, full, selective")
    reduce: str = setting("unit", "when a chunk's gradients are reduced: after each unit, or once a step")
    policy: str = setting("zeropp", f"whose order a step runs in: {', '.join(POLICIES)}")
    costs: str = setting("", "file with the measured costs of a step, from zeropp profile; empty: FLOPs of the chunks")

    def _check(self) -> None:
        self._at_least(1, "stages", "chunks", "shards", "replicas", "microbatch_size")
        self._at_least(0, "microbatches")
        if self.microbatches:  # else RunConfig fills it in
            self.schedule()

    def schedule(self, costs: Costs | None = None) -> ScheduleSpec:
        """What the schedule is compiled from, with the unit, its split and the memory limit resolved and checked.

        With ``unit = "auto"`` the last two follow from ``costs``; without these it is not known yet, and a unit of P.
        """
        spec = resolve(
            self.stages,
            self.chunks,
            self.microbatches,
            self.unit,
            self.memory_limit,
            self.prefetch,
            costs,
            self.recompute,
            self.reduce,
            self.policy,
        )
        return tune(spec, self.memory_limit) if self.unit == AUTO and costs is not None else spec

    @property
    def members(self) -> int:
        """Members of the run: P·F·R."""
        return self.stages * self.shards * self.replicas

    @property
    def global_batch(self) -> int:
        """Sequences per step: N·b·F·R."""
        return self.microbatches * self.microbatch_size * self.shards * self.replicas


@dataclass(frozen=True, kw_only=True)
class DataSection(_Section):
    SECTION: ClassVar[str] = "data"

    path: str = setting(
        "", "a text file, a folder of them, or a token store, also a URI of one; empty: Python's own text"
    )
    cache: str = setting("~/.cache/zeropp", "folder on each node for copies of token stores that are at a URI")
    validation_fraction: float = setting(0.05, "part of raw text, at its end, that is held out", "fraction")
    tokenizer: str = setting("", "how tokens were made: 'bytes', or the SHA-256 of a tokenizer; empty: as in path")

    def _check(self) -> None:
        check_uri(self.path, f"data.path = {self.path!r}")
        expanded(self.cache, f"data.cache = {self.cache!r}")
        self._require(0 < self.validation_fraction < 1, "validation_fraction", "must be between 0 and 1, such as 0.05")


LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")
"""``wsd``: warm-up, stable, decay."""


@dataclass(frozen=True, kw_only=True)
class TrainSection(_Section):
    SECTION: ClassVar[str] = "train"

    steps: int = setting(200, "optimizer steps", "steps")
    tokens_per_step: int = setting(0, "budget of a step, from which parallel.microbatches follows; 0: none", "tokens")
    lr: float = setting(3e-3, "highest learning rate, reached after the warm-up")
    schedule: str = setting("cosine", f"of the learning rate after the warm-up: {', '.join(LR_SCHEDULES)}")
    min_lr_ratio: float = setting(0.1, "learning rate at the end of the schedule, as a part of lr", "fraction")
    decay_steps: int = setting(0, "length of the decay at the end of wsd; 0: a tenth of the steps", "steps")
    warmup_steps: int = setting(20, "linear warm-up; a run that is shorter ends inside it", "steps")
    weight_decay: float = setting(0.1, "AdamW weight decay; none on norms and biases")
    beta1: float = setting(0.9, "AdamW decay of the mean gradient")
    beta2: float = setting(0.95, "AdamW decay of the mean square")
    eps: float = setting(1e-8, "AdamW divisor guard")
    clip_norm: float = setting(1.0, "largest global gradient norm; 0: no clipping")
    eval_every: int = setting(50, "distance of evaluations; 0: only at the end", "steps")
    eval_sequences: int = setting(256, "most sequences of the held-out part that an evaluation reads", "sequences")
    dtype: str = setting("float32", "float32, or bfloat16 with weights kept in fp32; float64 is for tests")
    deterministic: bool = setting(False, "on GPUs take only what gives the same bytes every time; on CPU all does")

    def _check(self) -> None:
        self._at_least(1, "steps", "eval_sequences")
        self._at_least(0, "tokens_per_step", "warmup_steps", "decay_steps", "weight_decay", "clip_norm", "eval_every")
        self._require(self.lr > 0, "lr", "must be above 0, such as 3e-3")
        self._require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "must be from 0 to 1, such as 0.1")
        self._require(self.schedule in LR_SCHEDULES, "schedule", f"unknown; {_close(self.schedule, LR_SCHEDULES)}")
        self._require(
            self.decay_steps == 0 or self.schedule == "wsd",
            "decay_steps",
            f"train.schedule = {self.schedule!r} has no stable part; use 0, or train.schedule=wsd",
        )
        most = max(0, self.steps - self.warmup_steps)
        self._require(
            self.decay_steps <= most,
            "decay_steps",
            f"longer than the {most} steps of train.steps that follow train.warmup_steps; use {most} or less",
        )
        for name in ("beta1", "beta2"):
            self._require(0 <= getattr(self, name) < 1, name, "must be at least 0 and below 1, such as 0.9")
        self._require(self.eps > 0, "eps", "must be above 0, such as 1e-8")
        dtypes = ["float32", "bfloat16", "float64"]
        self._require(self.dtype in dtypes, "dtype", f"unknown; {_close(self.dtype, dtypes)}")

    @property
    def decay(self) -> int:
        """Steps of the decay of ``wsd``, the automatic value filled in."""
        return self.decay_steps or min(-(-self.steps // 10), max(0, self.steps - self.warmup_steps))


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(_Section):
    SECTION: ClassVar[str] = "checkpoint"

    every_steps: int = setting(0, "distance of checkpoints; 0: by time alone. There is always one at the end", "steps")
    every_minutes: float = setting(10.0, "time between checkpoints; 0: by steps alone", "minutes")
    keep: int = setting(3, "how many of the newest are kept; 0: all", "checkpoints")

    def _check(self) -> None:
        self._at_least(0, "every_steps", "every_minutes", "keep")


DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class ResourcesSection(_Section):
    SECTION: ClassVar[str] = "resources"

    cpus: float = setting(1.0, "Ray CPUs that a member asks for", "CPUs")
    device: str = setting("auto", f"where members compute: {', '.join(DEVICES)}; auto: on GPUs if there are enough")
    gpus: float = setting(1.0, "GPUs that a member on a GPU asks for: 1, or less to share one on purpose", "GPUs")
    transport: str = setting("auto", f"what training's tensors go over: {', '.join(TRANSPORTS)}; auto: nccl on GPUs")
    step_timeout_s: float = setting(
        600.0, "a step, an evaluation or a transfer that takes longer has failed", "seconds"
    )
    labels: dict[str, str] = field(
        default_factory=dict, hash=False, metadata={"help": "members go to nodes with these labels only", "unit": ""}
    )
    wait_s: float = setting(
        0.0,
        "how long members wait for room in the cluster; 0: 600, but not for nodes that nothing would add",
        "seconds",
    )
    interface: str = setting(
        "auto",
        "network interface of the members: name, address or network, 10.0.0.0/8; auto: Ray's, or on one machine lo",
    )
    measure_memory: bool = setting(False, "measure every member's tensor memory in the second step, which then is slow")
    nvtx: bool = setting(False, "on GPUs name each instruction for NVIDIA's profilers (NVTX)")

    def _check(self) -> None:
        self._require(self.cpus > 0, "cpus", "must be above 0, such as 1 or 0.5")
        self._require(self.device in DEVICES, "device", f"unknown; {_close(self.device, DEVICES)}")
        self._require(0 < self.gpus <= 1, "gpus", "a member has one GPU, or a part of one: above 0, at most 1")
        self._require(self.transport in TRANSPORTS, "transport", f"unknown; {_close(self.transport, TRANSPORTS)}")
        if self.device == "cpu":
            self._require(self.transport != "nccl", "transport", "is between GPUs; use gloo with resources.device=cpu")
            self._require(not self.nvtx, "nvtx", "is for GPUs; remove it with resources.device=cpu")
        self._require(self.step_timeout_s > 0, "step_timeout_s", "must be above 0, such as 600")
        self._at_least(0, "wait_s")
        texts = all(isinstance(value, str) for value in self.labels.values())
        self._require(texts, "labels", 'expected texts, such as {"ray.io/accelerator-type" = "H100"}')
        self._require(
            is_setting(self.interface),
            "interface",
            "expected 'auto', the name of an interface, its address, or a network such as 10.0.0.0/8",
        )

    def on(self, members: int, gpus: float) -> ResourcesSection:
        """The same with device and transport as they are for ``members`` on a cluster that has ``gpus``.

        ``auto`` takes GPUs if there is one for each member, or the part that it asks for, and torch can use them.
        """
        device, transport = self.device, self.transport
        if device == "auto":
            device = "cuda" if gpus >= members * self.gpus and _torch_has_cuda() else "cpu"
        if transport == "auto":
            transport = "nccl" if device == "cuda" else "gloo"
        return dataclasses.replace(self, device=device, transport=transport)


def _torch_has_cuda() -> bool:
    import torch  # which takes seconds, and is not asked where there are no GPUs

    return torch.version.cuda is not None


@dataclass(frozen=True, kw_only=True)
class RecoverySection(_Section):
    SECTION: ClassVar[str] = "recovery"

    enabled: bool = setting(True, "bring back what a fault takes; false: the first one ends the run")
    copy_every: int = setting(10, "distance of copies of the state in the members' memory; 0: none", "steps")
    spares: int = setting(0, "members that wait, started, for the place of a lost one; each asks for resources.cpus")
    suspect_s: float = setting(10.0, "a member that stands still for so long is reported", "seconds")
    hang_s: float = setting(30.0, "one that stands still for so long is killed, and replaced", "seconds")
    slow_factor: float = setting(2.0, "a member that takes so many times as long as its peers is reported; 0: none")
    replace_slow: bool = setting(False, "replace it too")
    max_deaths: int = setting(1000, "most members that may be killed or crash in a run", "members")
    max_hangs: int = setting(1000, "most members that may stop, hang or be replaced as slow", "members")
    max_errors: int = setting(3, "most errors that members raise by themselves; the same one twice ends the run")
    max_disconnects: int = setting(1000, "most connections that may break with all members alive")
    max_drivers: int = setting(3, "most drivers that may die")
    max_stuck: int = setting(3, "so many recoveries in a row without a new step end the run, with exit code 70")

    @property
    def copies(self) -> bool:
        """Whether members keep copies of the state in memory."""
        return self.enabled and self.copy_every > 0

    def _check(self) -> None:
        self._at_least(0, "copy_every", "spares")
        self._at_least(0, "max_deaths", "max_hangs", "max_errors", "max_disconnects", "max_drivers")
        self._at_least(1, "max_stuck")
        self._require(self.suspect_s > 0, "suspect_s", "must be above 0, such as 10")
        self._require(
            self.hang_s > self.suspect_s,
            "hang_s",
            f"must be above recovery.suspect_s = {self.suspect_s:g}, so that a member is reported before it is killed",
        )
        self._require(
            self.slow_factor == 0 or self.slow_factor > 1, "slow_factor", "must be above 1, such as 2, or 0 for none"
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. Sections are checked when they are built, what spans sections here; raises ``ConfigError``."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    resources: ResourcesSection = field(default_factory=ResourcesSection)
    recovery: RecoverySection = field(default_factory=RecoverySection)

    def __post_init__(self) -> None:
        microbatches = self._microbatches()
        if microbatches != self.parallel.microbatches:
            object.__setattr__(self, "parallel", dataclasses.replace(self.parallel, microbatches=microbatches))
        if self.recovery.enabled and self.recovery.hang_s >= self.resources.step_timeout_s:
            raise ConfigError(
                f"recovery.hang_s = {self.recovery.hang_s:g}: must be below resources.step_timeout_s = "
                f"{self.resources.step_timeout_s:g}, after which transfers fail by themselves and nobody knows who hung"
            )
        P, V = self.parallel.stages, self.parallel.chunks
        if not self.model.factory and self.model.layers < P * V:
            raise ConfigError(
                f"model.layers = {self.model.layers}: fewer than the {P * V} model chunks of parallel.stages x"
                f" parallel.chunks = {P} x {V}; use {P * V} or more layers, or fewer stages or chunks"
            )

    def _microbatches(self) -> int:
        """N: what ``[parallel]`` says, or what a budget in tokens comes to; raises ConfigError if they disagree."""
        parallel, budget, given = self.parallel, self.train.tokens_per_step, self.parallel.microbatches
        if not budget:
            return given or DEFAULT_MICROBATCHES
        b, F, R, seq_len = parallel.microbatch_size, parallel.shards, parallel.replicas, self.model.seq_len
        each = b * F * R * seq_len
        N, rest = divmod(budget, each)
        least = parallel.stages
        if rest or least > N:
            works = sorted({max(n, least) * each for n in (N, N + (rest > 0))})
            why = (
                f"a step takes a whole number of micro-batches of {each} tokens (parallel.microbatch_size x shards x "
                f"replicas x model.seq_len = {b} x {F} x {R} x {seq_len}), at least parallel.stages = {least} of them"
            )
            raise ConfigError(f"train.tokens_per_step = {budget}: {why}; use {' or '.join(map(str, works))}")
        if given not in (0, N):
            raise ConfigError(
                f"parallel.microbatches = {given}: train.tokens_per_step = {budget} asks for {N} micro-batches of "
                f"{each} tokens; use {N}, or 0 for what the budget says, or train.tokens_per_step=0 to go without one"
            )
        return N

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Build from nested tables, as TOML gives them. Unknown names are refused with the nearest known one."""
        sections: dict[str, Any] = {}
        for name, table in values.items():
            if name not in SECTIONS:
                raise ConfigError(f"[{name}]: unknown section; {_close(name, SECTIONS)}")
            if not isinstance(table, Mapping):
                raise ConfigError(f"{name} = {table!r}: expected a section, such as [{name}]")
            known = [f.name for f in dataclasses.fields(SECTIONS[name])]
            for key in table:
                if key not in known:
                    raise ConfigError(f"{name}.{key}: unknown key; {_known_key(name, key, known)}")
            sections[name] = SECTIONS[name](**table)
        return cls(**sections)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested tables with every field; ``from_dict`` gives the same configuration back."""
        return dataclasses.asdict(self)

    def to_toml(self, live: Collection[str] | None = None) -> str:
        """TOML with every field, its meaning and its unit as a comment.

        ``live``: of fields other than these, such as ``train.lr``, the line is a comment as a whole; None: of none.
        """
        lines: list[str] = []
        for name in SECTIONS:
            lines.append(f"[{name}]")
            section = getattr(self, name)
            # A table ends the section, so it comes last.
            for item in sorted(dataclasses.fields(section), key=lambda item: item.type.startswith("dict")):
                value, unit = getattr(section, item.name), item.metadata["unit"]
                if isinstance(value, dict):
                    text = tomli_w.dumps({name: {item.name: value}}).rstrip()
                    lines.append(f"\n{text}" if value else f"# [{name}.{item.name}]  {item.metadata['help']}")
                    continue
                text = tomli_w.dumps({item.name: value}).rstrip()
                if live is not None and f"{name}.{item.name}" not in live:
                    text = f"# {text}"
                lines.append(f"{text:<28}  # {item.metadata['help']}" + (f" [{unit}]" if unit else ""))
            lines.append("")
        return "\n".join(lines)

    def resolved(self) -> RunConfig:
        """The same run with every automatic value (0) written out, so that a later default cannot change it.

        But ``parallel.unit = "auto"``, for which the model must be known: see ``tuned`` in planner/plan.py.
        """
        model, parallel = self.model.resolved(), self.parallel
        if parallel.unit != AUTO:
            spec = parallel.schedule()
            parallel = dataclasses.replace(parallel, unit=spec.unit, memory_limit=spec.memory_limit)
        train = self.train
        if train.schedule == "wsd" and not train.decay_steps:
            train = dataclasses.replace(train, decay_steps=train.decay)
        return dataclasses.replace(self, model=model, parallel=parallel, train=train)


SECTIONS: dict[str, type[_Section]] = {
    kind.SECTION: kind
    for kind in (
        RunSection,
        ModelSection,
        ParallelSection,
        DataSection,
        TrainSection,
        CheckpointSection,
        ResourcesSection,
        RecoverySection,
    )
}


_STARTER = {
    "model": ("layers", "dim", "heads", "vocab_size", "seq_len"),
    "parallel": ("stages", "chunks", "shards", "replicas", "microbatches", "microbatch_size"),
    "data": ("path",),
    "train": ("steps", "schedule", "lr", "warmup_steps"),
}


def starter() -> str:
    """A file to start from, in TOML: the defaults, what is seldom changed as comments."""
    live = {f"{section}.{name}" for section, names in _STARTER.items() for name in names}
    return (
        "# A run of zeropp. What is commented out has the default that its line shows.\n"
        f"# `zeropp config check` says what the run would be.\n\n{RunConfig().to_toml(live)}"
    )


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (None: all defaults), apply ``section.key=value`` overrides in order, check the result."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such configuration file; leave it out to run the defaults") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as a configuration file: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not TOML: {error}") from None
    values = _changed(values, overrides)
    if values.get("model", {}).get("init_from"):
        from zeropp_ray.models.hf import adopted  # torch is for those who need it

        values["model"] = adopted(values["model"])
    return RunConfig.from_dict(values)


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """The configuration of nested tables, changed by ``section.key=value`` overrides in order."""
    return RunConfig.from_dict(_changed(values, overrides))


def _changed(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    values = copy.deepcopy(values)
    for override in overrides:
        _override(values, override)
    return values


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(f"--set {override}: expected section.key=value, such as parallel.stages=4")
    table = values
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {name} is a value, not a table")
    value = _parse(text.strip())
    if not isinstance(value, str) and _is_text(names):
        value = text.strip()  # run.name=7 is a name
    table[names[-1]] = value


def _parse(text: str) -> Any:
    """A TOML value, or the text itself when it is none: ``4``, ``1e-3``, ``true``, ``[1, 2]``, ``"x"``, ``x``."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _is_text(names: Sequence[str]) -> bool:
    section = SECTIONS.get(names[0])
    return section is not None and len(names) == 2 and get_type_hints(section).get(names[1]) is str


def _known_key(section: str, key: str, known: Sequence[str]) -> str:
    """The end of the error line for an unknown key: in this section, else in another, else all of this one."""
    if not difflib.get_close_matches(key, known, n=1):
        for other, kind in SECTIONS.items():
            if key in {f.name for f in dataclasses.fields(kind)}:
                return f"did you mean {other}.{key}?"
        return f"[{section}] knows {', '.join(known)}"
    return f"did you mean {section}.{difflib.get_close_matches(key, known, n=1)[0]}?"


def _nearest(value: int, fits: Callable[[int], bool]) -> int:
    """The number nearest to ``value`` that fits, the smaller of two; 1 must fit."""
    return next(n for d in range(value + 1) for n in (value - d, value + d) if n >= 1 and fits(n))
