"""A run with one checkpoint, of weights alone, made without training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests import reference
from zeropp_ray.checkpoint import run_id
from zeropp_ray.checkpoint.manifest import VERSION, FileEntry, Manifest, Progress, folder_name, publish
from zeropp_ray.checkpoint.reader import CHECKPOINTS
from zeropp_ray.config import RunConfig
from zeropp_ray.files import sha256_of
from zeropp_ray.models import resolve_factory


def saved_run(run: Path, config: RunConfig, step: int = 10, scale: float = 0.1) -> torch.nn.Module:
    """Make folder `run` with a checkpoint of random weights after `step`; the model that it holds."""
    config = config.resolved()
    model = reference.build(resolve_factory(config.model), config.run.seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * scale)
    final = run / CHECKPOINTS / folder_name(step)
    partial = final.with_name(".partial")
    partial.mkdir(parents=True)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    file = partial / "weights-000-000.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    entry = FileEntry(file.name, file.stat().st_size, sha256_of(file), shapes)
    progress = Progress(step=step, commits=step, samples=step, tokens=step)
    if not (run / run_id.FILE).exists():
        run_id.create(run)
    publish(partial, final, Manifest(VERSION, run_id.read(run), progress, config.to_dict(), [], {}, {file.name: entry}))
    return model
