"""Finding, checking and reading checkpoints. A damaged or foreign one is named, and never loads silently."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zeropp_ray.checkpoint import run_id
from zeropp_ray.checkpoint.manifest import CHECKPOINTS, NAME, Manifest, folder_name, folders, is_checkpoint
from zeropp_ray.checkpoint.streams import RemoteTensors
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import sha256_of
from zeropp_ray.optim import MOMENTS
from zeropp_ray.precision import Precision
from zeropp_ray.uri import Place, UriPath, place


@dataclass
class Checkpoint:
    """A checkpoint that is whole as far as sizes tell; :meth:`verify` reads every byte."""

    path: Place
    manifest: Manifest
    _open: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def step(self) -> int:
        return self.manifest.progress.step

    @property
    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.manifest.config)

    @property
    def run(self) -> Place | None:
        """The folder of the run that it lies in; None if it lies elsewhere."""
        return run_of(self.path)

    def _file_of(self, tensor: str) -> Any:
        for entry in self.manifest.files.values():
            if tensor in entry.tensors:
                if entry.name not in self._open:
                    self._open[entry.name] = _opened(self.path / entry.name)
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

    def misplaced(self, run: Place) -> list[str]:
        """What keeps it from being a checkpoint of the run in folder ``run``, in words; empty if nothing does.

        ConfigError if the run's id is gone.
        """
        wrong = []
        if self.manifest.run != run_id.read(run):
            wrong.append(f"of another run than the one in {run}")
        if self.path.resolve().name != folder_name(self.step):
            wrong.append(f"of step {self.step}, and not called {folder_name(self.step)}")
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


def _opened(path: Place) -> Any:
    return safe_open(path, framework="pt") if isinstance(path, Path) else RemoteTensors(path)


def open_checkpoint(path: Place) -> Checkpoint:
    """Open the checkpoint in folder ``path``.

    Raises ConfigError if it is none, of a newer version, or damaged as far as names and sizes tell.
    """
    try:
        manifest = Manifest.from_json((path / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no checkpoint, {NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: {NAME} cannot be read: {error}") from None
    checkpoint = Checkpoint(path, manifest)
    for entry in manifest.files.values():
        file = path / entry.name
        if not file.is_file():
            raise ConfigError(f"{path}: damaged, {entry.name} is missing")
        if file.stat().st_size != entry.bytes:
            raise ConfigError(f"{path}: damaged, {entry.name} has {file.stat().st_size} bytes instead of {entry.bytes}")
        try:
            names = set(_opened(file).keys())
        except (SafetensorError, ValueError) as error:
            raise ConfigError(f"{path}: damaged, {entry.name} cannot be read: {error}") from None
        if names != set(entry.tensors):
            raise ConfigError(f"{path}: damaged, {entry.name} holds other tensors than its manifest says")
    return checkpoint


def run_of(checkpoint: Place) -> Place | None:
    """The folder of the run that the checkpoint in folder ``checkpoint`` lies in, also by links; None if in none."""
    for path in (checkpoint.absolute(), checkpoint.resolve()):
        if path.parent.name == CHECKPOINTS and (path.parent.parent / run_id.FILE).is_file():
            return path.parent.parent
    return None


def open_own(path: Place, run: Place) -> Checkpoint:
    """Open the checkpoint in folder ``path``, every byte checked, as one of the run in folder ``run``.

    Raises ConfigError if it is damaged, or of another run.
    """
    checkpoint = open_checkpoint(path)
    if wrong := checkpoint.misplaced(run):
        raise ConfigError(f"{path}: {'; '.join(wrong)}")
    return _whole(checkpoint)


def _whole(checkpoint: Checkpoint) -> Checkpoint:
    if wrong := checkpoint.verify():
        raise ConfigError(f"{checkpoint.path}: damaged, {'; '.join(wrong)}")
    return checkpoint


def latest(run: Place, warn: Callable[[str], None] = lambda text: None) -> Checkpoint:
    """The newest good checkpoint of the run in folder ``run``, every byte checked. Damaged ones and those of other runs
    are named to ``warn``.

    Raises ConfigError if there is none.
    """
    run_id.read(run)
    for path in folders(run):
        try:
            return open_own(path, run)
        except ConfigError as error:
            warn(str(error))
    raise ConfigError(f"{run}: no good checkpoint of this run in {run / CHECKPOINTS}")


def find(where: str | Place, warn: Callable[[str], None] = lambda text: None) -> Checkpoint:
    """From what a person names: a checkpoint folder, a run folder, the URI of either, or the name of a run under
    ``runs/``.

    A checkpoint that is named itself may lie anywhere; one that lies in another run than its own is named to ``warn``.
    """
    path = place(where)
    if not is_checkpoint(path):
        return latest(folder_of_run(path), warn)
    checkpoint = _whole(open_checkpoint(path))
    if checkpoint.run is not None and (wrong := checkpoint.misplaced(checkpoint.run)):
        warn(f"{path}: {'; '.join(wrong)}")
    return checkpoint


def folder_of_run(where: Place) -> Place:
    """The folder of a run from its path or URI, or its name under ``runs/``."""
    if isinstance(where, UriPath):
        if (where / CHECKPOINTS).is_dir():
            return where
        raise ConfigError(f"{where}: neither a run with checkpoints nor a checkpoint")
    for path in (where, Path("runs") / where):
        if (path / CHECKPOINTS).is_dir():
            return path
    if not where.is_dir() and not (Path("runs") / where).is_dir():
        raise ConfigError(f"{where}: neither the folder of a run or checkpoint nor the name of a run under runs/")
    raise ConfigError(f"{where}: no checkpoints there")


def load_model(checkpoint: Checkpoint, precision: Precision | None = None) -> torch.nn.Module:
    """The whole model in this process, in eval mode, with the weights of ``checkpoint``: as they are saved, or as a run
    of ``precision`` computes with them.

    Its buffers are made as those of the run were, from the run's seed. ConfigError with a list of what differs if the
    model is another one by now.
    """
    from zeropp_ray.checkpoint.resume import check_same_parameters
    from zeropp_ray.models import build_owned, cut_model, describe, resolve_factory

    config = checkpoint.config
    factory = resolve_factory(config.model)
    trained_in = Precision.of(config.train.dtype)
    description = describe(factory, config.model.seq_len, seed=config.run.seed, precision=trained_in)
    check_same_parameters(checkpoint, description.shapes)
    one = cut_model(description, 1)
    model = build_owned(factory, description, one, [0], seed=config.run.seed, dtype=trained_in.master).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
    if precision is not None:
        precision.apply(model)
    return model.eval()
