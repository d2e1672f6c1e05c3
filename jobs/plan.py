"""``zeropp plan``: which layout to train a model with on given devices, and what a step would be, on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.report import short
from zeropp_ray.config import ModelSection, RunConfig, load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.presets import PRESETS

if TYPE_CHECKING:
    from zeropp_ray.planner.cost_model import Choice, Estimate
    from zeropp_ray.planner.hardware import Cluster
    from zeropp_ray.planner.search import Plans
    from zeropp_ray.planner.sizes import ModelSizes

_LETTERS = (
    "P stages of V chunks, F shards, R replicas (zero1: which split the optimizer's state); b sequences in a\n"
    "micro-batch, N micro-batches a step, U in a unit. 3D: T tensor-parallel x P stages x D data-parallel."
)


@click.command(name="plan", short_help="Pick the layout for a model on given devices.")
@click.option("--model", "preset", default="", metavar="NAME", help="A published model, such as llama3-8b.")
@click.option("--from", "file", type=click.Path(path_type=Path), help="Take model and batch from a configuration.")
@click.option("--gpus", type=int, help="Devices.  [default: 8, or what the configuration has]")
@click.option("--device", default="h100-80g", show_default=True, help="Kind of device; an unknown one lists them.")
@click.option("--nodes", type=int, default=0, help="Nodes that hold the devices.  [default: nodes of the usual size]")
@click.option("--intra", default="", help="Link inside a node, such as nvlink or pcie5.  [default: the device's]")
@click.option("--inter", default="", help="Link between nodes, such as ib400.  [default: usual for the device]")
@click.option("--seq", type=int, help="Tokens of a sequence.  [default: the context, 8192 at most]")
@click.option("--global-batch", type=int, help="Sequences a step.  [default: 1024, or the configuration's]")
@click.option(
    "--costs",
    "cost_file",
    type=click.Path(path_type=Path),
    help="What tasks take, from a file of `zeropp profile`.  [default: the configuration's, else from FLOPs]",
)
@click.option("--top", type=int, default=5, show_default=True, help="How many plans to show.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the best plan as a configuration for `train`.")
def plan(
    preset: str,
    file: Path | None,
    gpus: int | None,
    device: str,
    nodes: int,
    intra: str,
    inter: str,
    seq: int | None,
    global_batch: int | None,
    cost_file: Path | None,
    top: int,
    write: Path | None,
) -> None:
    """Search stages, chunks, shards, replicas, micro-batch, unit and recomputation for a model on given devices.

    Prints the fastest layouts whose memory fits, what the best one spends time, memory and traffic on, what would be
    faster if it fitted, other policies on the same mesh, and the best layout of 3D parallelism (tensor x pipeline x
    data) under the same cost model and for the same batch. Nothing is run or built; docs/planning.md says what the
    figures rest on.

    \b
    Examples:
      zeropp plan --model llama3-8b --gpus 8
      zeropp plan --model llama3-70b --gpus 64 --device h200 --global-batch 512
      zeropp plan --from run.toml --gpus 16 --device a100-80g --write best.toml
      zeropp plan --from run.toml --device cpu --nodes 1 --costs costs.json
    """
    from zeropp_ray.planner.hardware import cluster
    from zeropp_ray.planner.rating import rated
    from zeropp_ray.planner.search import choice_of, search

    if top < 1:
        raise ConfigError(f"--top = {top}: must be at least 1")
    if write is not None and write.exists():
        raise ConfigError(f"--write = {write}: is there already; choose another name")
    if write is not None and not write.parent.is_dir():
        raise ConfigError(f"--write = {write}: there is no folder {write.parent}; choose another")
    config = _config(preset, file, seq)
    on = cluster(device, (config.parallel.members if file else 8) if gpus is None else gpus, nodes, intra, inter)
    batch = (config.parallel.global_batch if file else 1024) if global_batch is None else global_batch
    if batch < 1:
        raise ConfigError(f"--global-batch = {batch}: must be at least 1")
    sizes = _measured(_sizes(config, on.device.dtype), config, on.device.dtype, cost_file)
    layout = config.parallel
    own = None
    if file is not None and layout.members <= on.count and layout.global_batch == batch:
        own = rated(sizes, on, choice_of(layout, sizes, on))
    found = search(sizes, on, batch, top)
    click.echo(_report(found, own))
    if write is not None:
        try:
            write.write_text(_chosen(config, found).to_toml(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write = {write}: cannot be written: {error.strerror}; choose another") from None
        data = "" if file is not None else " --set data.path=YOUR_DATA"
        click.echo(f"\n{write} written: plan 1; see what it comes to with: zeropp config check {write}{data}")


def _config(preset: str, file: Path | None, seq: int | None) -> RunConfig:
    if bool(preset) == (file is not None):
        raise ConfigError("give --model NAME or --from FILE, one of the two")
    if seq is not None and seq < 1:
        raise ConfigError(f"--seq = {seq}: must be at least 1")
    if file is not None:
        config = load_config(file)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, seq_len=seq)) if seq else config
    if preset not in PRESETS:
        raise ConfigError(f"--model = {preset!r}: unknown; known are {', '.join(PRESETS)}; --from FILE takes any")
    model = ModelSection(preset=preset, seq_len=seq or min(8192, PRESETS[preset]["context"]))
    return RunConfig(model=model)


def _sizes(config: RunConfig, dtype: str) -> ModelSizes:
    from zeropp_ray.planner.sizes import sizes_from, sizes_of

    if not config.model.factory:
        return sizes_of(config.model, dtype)
    from zeropp_ray.models import describe, resolve_factory  # a model of one's own has to be tried
    from zeropp_ray.precision import Precision

    precision = Precision.of(dtype)
    model = describe(resolve_factory(config.model), config.model.seq_len, seed=config.run.seed, precision=precision)
    return sizes_from(model, config.model.label, precision.compute.itemsize)


def _measured(sizes: ModelSizes, config: RunConfig, dtype: str, file: Path | None) -> ModelSizes:
    """The model with the times that were measured of it, if a file of them is named."""
    path, name = (file, "--costs") if file is not None else (config.parallel.costs, "parallel.costs")
    if not path:
        return sizes
    from zeropp_ray.planner.measured import measured

    config = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype=dtype))
    return dataclasses.replace(sizes, measured=measured(path, config, name))


def _chosen(config: RunConfig, found: Plans) -> RunConfig:
    """The configuration with the best plan's layout, for the device and in its dtype."""
    parallel = dataclasses.replace(config.parallel, **found.best[0].choice._asdict(), costs="")
    train = dataclasses.replace(config.train, dtype=found.cluster.device.dtype, tokens_per_step=0)
    on_cpu = {"device": "cpu", "transport": "auto", "nvtx": False}
    resources = dataclasses.replace(config.resources, **on_cpu if found.cluster.device.host else {"device": "cuda"})
    return dataclasses.replace(config, parallel=parallel, train=train, resources=resources)


def _report(found: Plans, own: Estimate[Choice] | None) -> str:
    from zeropp_ray.planner.rating import rated

    best = found.best[0]
    rows: list[tuple[str, ...]] = [("", "layout", "devices", "step s", "tokens/s", "MFU", "bubble", "memory")]
    rows += [_row(str(place), found, step) for place, step in enumerate(found.best, 1)]
    rows += [_row("file", found, own)] if own else []
    rows += [_row("3D", found, found.rival)] if found.rival else []
    parts = [_given(found), "", _aligned(rows), _LETTERS, "", "Plan 1", *_details(best)]
    if best.choice.zero1:
        plain = rated(found.model, found.cluster, best.choice._replace(zero1=False))
        more = plain.memory_bytes - best.memory_bytes
        slower = plain.seconds["replicas"] - best.seconds["replicas"]
        parts.append(f"  replicas  zero1 = false takes {slower:.2g} s and {_amount(more, _BYTES)} more")
    idle = found.cluster.count - best.choice.members
    if idle:
        parts.append(
            f"  idle      {idle} devices: the batch, N·b·F·R sequences with N of at least P, keeps no more at work"
        )
    parts += ["", _against(best, found)]
    parts += _policies(found)
    if found.refused:
        parts += ["", "Faster, but does not fit"]
        parts += [f"  {step.choice}: {step.step_s:.4g} s; {_excess(step, found.cluster)}" for step in found.refused]
    return "\n".join(parts)


def _given(found: Plans) -> str:
    model, on = found.model, found.cluster
    links = f"{on.intra.name} {on.intra.bandwidth / 1e9:.4g} GB/s inside"
    if on.nodes > 1:
        links += f", {on.inter.name} {on.inter.bandwidth / 1e9:.4g} GB/s between"
    nodes = f"{on.nodes} node{'s' * (on.nodes > 1)} of {on.per_node}"
    return (
        f"{model.label}: {short(model.elements)} parameters, {found.global_batch} sequences of {model.seq_len} "
        f"tokens a step, {on.device.dtype}\n"
        f"{on.count} x {on.device.name} in {nodes}: {links}; {on.device.usable / 1e9:.4g} GB usable each\n"
        f"{found.considered} layouts estimated, the best timed by replay of their schedules"
    )


def _row(place: str, found: Plans, step: Estimate[Any]) -> tuple[str, ...]:
    return (
        place,
        str(step.choice),
        str(step.choice.members),
        f"{step.step_s:.4g}",
        f"{found.tokens_per_s(step):,.0f}",
        f"{found.utilisation(step):.1%}",
        f"{step.bubble:.1%}",
        _amount(step.memory_bytes, _BYTES),
    )


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        (
            f"{row[0]:>{widths[0]}}  {row[1]:{widths[1]}}"
            + "".join(f"  {c:>{w}}" for c, w in zip(row[2:], widths[2:], strict=True))
        ).rstrip()
        for row in rows
    )


def _details(step: Estimate[Any]) -> list[str]:
    return [
        f"  time      {_listed(step.seconds, {'s': 1, 'ms': 1e-3})}",
        f"  memory    {_listed(step.memory, _BYTES)}; {_amount(step.memory_bytes, _BYTES)} in all",
        f"  sends     {_listed(step.traffic, _BYTES) or 'nothing'}, a member and step",
    ]


_BYTES = {"GB": 1e9, "MB": 1e6}


def _listed(parts: Mapping[str, float], units: Mapping[str, float]) -> str:
    """All parts but those below a thousandth of the sum."""
    least = sum(parts.values()) / 1000
    return ", ".join(f"{what} {_amount(size, units)}" for what, size in parts.items() if size > least)


def _amount(size: float, units: Mapping[str, float]) -> str:
    """In the first unit of which there is one, else in the last."""
    name, unit = next(((name, unit) for name, unit in units.items() if size >= unit), [*units.items()][-1])
    return f"{size / unit:.4g} {name}"


def _against(best: Estimate[Choice], found: Plans) -> str:
    if found.rival is None:
        return "No layout of 3D parallelism fits."
    ratio = found.rival.step_s / best.step_s
    words = f"{ratio - 1:.0%} more tokens/s than" if ratio >= 1 else f"{1 - ratio:.0%} fewer tokens/s than"
    return f"Plan 1 gives {words} the best of 3D parallelism. That one:\n" + "\n".join(_details(found.rival))


def _policies(found: Plans) -> list[str]:
    """The first of the plans that has a pipeline, under other policies."""
    from zeropp_ray.planner.search import other_policies

    place, plan = next(((k, each.choice) for k, each in enumerate(found.best, 1) if each.choice.stages > 1), (0, None))
    if plan is None:
        return []
    rows: list[tuple[str, ...]] = [("", "layout", "step s", "bubble", "memory", "gathers", "")]
    for step in other_policies(found.model, found.cluster, plan):
        fits = step.memory_bytes <= found.cluster.device.usable
        figures = f"{step.step_s:.4g}", f"{step.bubble:.1%}", _amount(step.memory_bytes, _BYTES)
        gathered = sum(size for what, size in step.traffic.items() if what.startswith("gathers"))
        rows.append(("", str(step.choice), *figures, _amount(gathered, _BYTES), "" if fits else "does not fit"))
    return ["", f"The mesh and batch of plan {place} under other policies of the engine", _aligned(rows)]


def _excess(step: Estimate[Choice], on: Cluster) -> str:
    kind, size = max(step.memory.items(), key=lambda item: item[1])
    missing = step.memory_bytes - on.device.usable
    return (
        f"takes {_amount(step.memory_bytes, _BYTES)}, {_amount(missing, _BYTES)} too much; most of it {kind}, "
        f"{_amount(size, _BYTES)}"
    )
