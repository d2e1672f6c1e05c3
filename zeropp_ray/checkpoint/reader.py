"""Finding, checking and reading checkpoints. A damaged one is named, and never loads silently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zeropp_ray.checkpoint.manifest import NAME, Manifest
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import sha256_of
from zeropp_ray.optim import MOMENTS

CHECKPOINTS = "checkpoints"


@dataclass
class Checkpoint:
    """A checkpoint that is whole as far as sizes tell; :meth:`verify` reads every byte."""

    path: Path
    manifest: Manifest
    _open: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def step(self) -> int:
        return self.manifest.progress.step

    @property
    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.manifest.config)

    def _file_of(self, tensor: str) -> Any:
        for entry in self.manifest.files.values():
            if tensor in entry.tensors:
                if entry.name not in self._open:
                    self._open[entry.name] = safe_open(self.path / entry.name, framework="pt")
                return self._open[entry.name]
        raise ConfigError(f"{self.path}: holds no {tensor}")

    def tensor(self, name: str) -> torch.Tensor:
        """A weight by its parameter's full name, or a moment by ``exp_avg.NAME`` or ``exp_avg_sq.NAME``; mapped, read
        when used.
        """
        return self._file_of(name).get_tensor(name)

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters by full name."""
        return {name: self.tensor(name) for name in self.manifest.shapes}

    def trained(self, name: str) -> bool:
        """Whether the parameter has moments; a frozen one has none."""
        return any(f"{MOMENTS[0]}.{name}" in entry.tensors for entry in self.manifest.files.values())

    def verify(self) -> list[str]:
        """What is wrong, in words; empty if every file has the bytes that were written."""
        wrong = []
        for entry in self.manifest.files.values():
            path = self.path / entry.name
            if not path.is_file():
                wrong.append(f"{entry.name} is missing")
            elif path.stat().st_size != entry.bytes:
                wrong.append(f"{entry.name} has {path.stat().st_size} bytes instead of {entry.bytes}")
            elif sha256_of(path) != entry.sha256:
                wrong.append(f"{entry.name} has been altered: its checksum differs")
        return wrong

    def digest(self, *, state: bool = False) -> str:
        """SHA-256 over lines ``name dtype shape sha256(bytes)`` sorted by name; ``state`` adds moments, step and
        cursor.

        Bytes are little-endian fp32 in C order. Equal digests mean equal weights (or equal state), bit for bit.
        """
        names = list(self.manifest.shapes)
        if state:
            names += [f"{moment}.{name}" for name in self.manifest.shapes if self.trained(name) for moment in MOMENTS]
        lines = []
        for name in sorted(names):
            tensor = self.tensor(name).contiguous()
            data = hashlib.sha256(
                tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else tensor.numpy().tobytes()
            )
            shape = "x".join(map(str, tensor.shape))
            lines.append(f"{name} {str(tensor.dtype).removeprefix('torch.')} {shape} {data.hexdigest()}")
        if state:
            progress = self.manifest.progress
            lines.append(f"step {progress.step} commits {progress.commits} cursor {progress.samples}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in folder ``path``.

    Raises ConfigError if it is none, of a newer version, or damaged as far as names and sizes tell.
    """
    try:
        manifest = Manifest.from_json((path / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no checkpoint, {NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: {NAME} cannot be read: {error}") from None
    checkpoint = Checkpoint(path, manifest)
    for entry in manifest.files.values():
        file = path / entry.name
        if not file.is_file():
            raise ConfigError(f"{path}: damaged, {entry.name} is missing")
        if file.stat().st_size != entry.bytes:
            raise ConfigError(f"{path}: damaged, {entry.name} has {file.stat().st_size} bytes instead of {entry.bytes}")
        try:
            with safe_open(file, framework="pt") as opened:
                if set(opened.keys()) != set(entry.tensors):
                    raise ConfigError(f"{path}: damaged, {entry.name} holds other tensors than its manifest says")
        except SafetensorError as error:
            raise ConfigError(f"{path}: damaged, {entry.name} cannot be read: {error}") from None
    return checkpoint


def folders(run: Path) -> Iterator[Path]:
    """The checkpoint folders of a run, newest first."""
    yield from sorted((run / CHECKPOINTS).glob("step-" + "[0-9]" * 8), reverse=True)


def latest(run: Path, warn: Callable[[str], None] = lambda text: None) -> Checkpoint:
    """The newest good checkpoint of the run in folder ``run``, every byte checked. Damaged ones are named to ``warn``.

    Raises ConfigError if there is none.
    """
    for path in folders(run):
        try:
            checkpoint = open_checkpoint(path)
            wrong = checkpoint.verify()
        except ConfigError as error:
            warn(str(error))
            continue
        if not wrong:
            return checkpoint
        warn(f"{path}: damaged, {'; '.join(wrong)}")
    raise ConfigError(f"{run}: no good checkpoint in {run / CHECKPOINTS}")


def find(where: str | Path, warn: Callable[[str], None] = lambda text: None) -> Checkpoint:
    """From what a person names: a checkpoint folder, a run folder, or the name of a run under ``runs/``."""
    path = Path(where).expanduser()
    if (path / NAME).exists():
        checkpoint = open_checkpoint(path)
        if wrong := checkpoint.verify():
            raise ConfigError(f"{path}: damaged, {'; '.join(wrong)}")
        return checkpoint
    return latest(folder_of_run(path), warn)


def folder_of_run(where: Path) -> Path:
    """The folder of a run from its path, or its name under ``runs/``."""
    for path in (where, Path("runs") / where):
        if (path / CHECKPOINTS).is_dir():
            return path
    if not where.is_dir() and not (Path("runs") / where).is_dir():
        raise ConfigError(f"{where}: neither the folder of a run or checkpoint nor the name of a run under runs/")
    raise ConfigError(f"{where}: no checkpoints there")


def load_model(checkpoint: Checkpoint) -> torch.nn.Module:
    """The whole model in this process, in eval mode, with the weights of ``checkpoint``.

    Its buffers are made as those of the run were, from the run's seed.
    """
    from zeropp_ray.models import build_owned, cut_model, describe, resolve_factory

    config = checkpoint.config
    factory = resolve_factory(config.model)
    description = describe(factory, config.model.seq_len, seed=config.run.seed)
    model = build_owned(factory, description, cut_model(description, 1), [0], seed=config.run.seed).model
    names = dict(model.named_parameters())
    missing = names.keys() ^ checkpoint.manifest.shapes.keys()
    if missing:
        raise ConfigError(f"{checkpoint.path}: its parameters are not the model's: {', '.join(sorted(missing)[:5])}")
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(checkpoint.tensor(name))
    return model.eval()
