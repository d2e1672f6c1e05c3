"""Measured costs of a model's chunks, in a file: what ``zeropp profile`` writes, and ``parallel.costs`` names.

JSON, in seconds and bytes. It says which model, dtype, micro-batch size, cut and shards it was measured with, and is
taken for no other. On how many stages the chunks lie makes no difference. Version 1 had tasks alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.files import expanded
from zeropp_ray.schedule.costs import Costs, Sizes

FORMAT, VERSION = "zeropp costs", 2
CUT = "blocks of the chunks"
_TASKS = ("F", "B", "W", "RF", "gather", "reduce", "optimizer")  # seconds of each chunk


def identity(config: RunConfig, ranges: Sequence[range]) -> dict[str, Any]:
    """What the costs of a run's chunks depend on, but for the machine. ``ranges``: the blocks of every model chunk."""
    model = {f"model.{name}": value for name, value in asdict(config.model.resolved()).items()}
    del model["model.preset"], model["model.init_from"]  # its sizes are there; where weights come from does not matter
    found = {
        **model,
        "train.dtype": config.train.dtype,
        "parallel.microbatch_size": config.parallel.microbatch_size,
        "parallel.shards": config.parallel.shards,
        "parallel.zero1": config.parallel.zero1,
        CUT: [len(blocks) for blocks in ranges],
    }
    return json.loads(json.dumps(found, default=str))  # as it comes back from a file


def write_costs(path: Path, measured_with: Mapping[str, Any], costs: Costs, notes: Mapping[str, Any]) -> None:
    """Write a file that is not there yet. ``notes``: how it was measured, for the reader.

    Raises ConfigError if it is there, or cannot be written.
    """
    seconds = {name: getattr(costs, name) for name in (*_TASKS, "comm", "vote", "post")}
    values = {
        "format": FORMAT,
        "version": VERSION,
        "of": measured_with,
        "seconds": seconds,
        "overlap": costs.overlap,
        "bytes": asdict(costs.sizes) if costs.sizes else None,
        "measured": notes,
    }
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=1) + "\n")
    except FileExistsError:
        raise ConfigError(f"--out = {path}: is there already; choose another name") from None
    except OSError as error:
        raise ConfigError(f"--out = {path}: cannot be written: {error.strerror}; choose another folder") from None


def read_costs(path: str | Path, name: str = "parallel.costs") -> tuple[dict[str, Any], Costs]:
    """The identity of what was measured, and the costs. ``name``: how an error calls the setting."""
    told = f"{name} = {str(path)!r}"
    again = "; measure anew with: zeropp profile"
    file = expanded(path, told)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{told}: no such file{again}, or leave {name} empty for costs from FLOPs") from None
    except OSError as error:
        raise ConfigError(f"{told}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{told}: not JSON, so no file of costs{again}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f"{told}: no file of costs{again}")
    if values.get("version") != VERSION:
        raise ConfigError(f"{told}: is of version {values.get('version')}, and {VERSION} can be read{again}")
    try:
        of, seconds = values["of"], values["seconds"]
        each = {name: _floats(seconds[name]) for name in _TASKS}
        held = values["bytes"]
        sizes = held and Sizes(**{name: _floats(column) for name, column in held.items()})
        F, B, W, RF, gather, reduce, optimizer = each.values()
        for column in vars(sizes).values() if sizes else ():
            if len(column) != len(F) or not all(0 <= size < math.inf for size in column):
                raise ValueError("not the bytes of these chunks")
        comm, vote, post = (float(seconds[name]) for name in ("comm", "vote", "post"))
        overlap = bool(values["overlap"])
        return dict(of), Costs(F, B, W, comm, RF, gather, reduce, optimizer, (), vote, overlap, sizes, post)
    except ConfigError as error:
        raise ConfigError(f"{told}: is damaged: {error}{again}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(f"{told}: is damaged: no seconds or bytes of each chunk, or not of what{again}") from None


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def costs_of(config: RunConfig, ranges: Sequence[range]) -> Costs:
    """The costs in the file that ``parallel.costs`` names. Raises ConfigError if they are not of this model, cut so."""
    of, costs = read_costs(config.parallel.costs)
    refuse_another(of, identity(config, ranges), f"parallel.costs = {config.parallel.costs!r}")
    return costs


def refuse_another(there: Mapping[str, Any], here: Mapping[str, Any], told: str) -> None:
    """Raise ConfigError if a file, which ``told`` names, was measured for something else than what is here."""
    differs = [
        f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if differs:
        raise ConfigError(
            f"{told}: was measured for something else: {'; '.join(differs)}; measure this one with: zeropp profile, or "
            f"leave {told.partition(' ')[0]} out for costs from FLOPs"
        )
