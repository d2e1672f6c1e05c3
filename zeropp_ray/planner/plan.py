"""The plan of a run: how the model is cut, the program of every stage, and what both will take.

Made before any actor starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zeropp_ray.config import RunConfig
from zeropp_ray.layout import Layout
from zeropp_ray.models.cut import chunk_costs, cut_model
from zeropp_ray.models.describe import ModelDescription, ParameterSet, describe
from zeropp_ray.models.layered import resolve_factory
from zeropp_ray.planner.cost_file import costs_of
from zeropp_ray.planner.memory import predict_memory
from zeropp_ray.precision import Precision
from zeropp_ray.schedule import AUTO, POLICIES, Costs, Program, ScheduleSpec, compile_forward, compile_program


@dataclass(frozen=True)
class Plan:
    """All that the members must agree on. Plain data, the same bytes at each."""

    layout: Layout
    description: ModelDescription
    ranges: tuple[range, ...]  # blocks of every model chunk
    program: Program
    evaluation: Program  # forward only

    @property
    def sets(self) -> tuple[ParameterSet, ...]:
        """All parameters by the model chunks that use them."""
        return self.description.sets(self.ranges)

    def table(self, config: RunConfig) -> dict[str, Any]:
        """The numbers that are shown before a run, and ``predicted_memory`` of the fullest member in bytes by kind."""
        spec, description, program = self.program.spec, self.description, self.program
        sequences = config.parallel.global_batch
        stages = [predict_memory(self, config, stage) for stage in range(self.layout.stages)]
        return {
            "model": config.model.label,
            "parameters": description.elements,
            "frozen": sum(each.elements for each in self.sets if not each.trained),
            "shared": sum(each.elements for each in self.sets if each.shared),
            "built_whole": description.whole,
            "layout": f"{spec.stages} stages x {self.layout.shards} shards x {self.layout.replicas} replicas, "
            f"{spec.chunks} chunks a stage",
            "units": list(spec.units),
            "chunks": [len(blocks) for blocks in self.ranges],
            "global_batch": sequences,
            "tokens_per_step": sequences * config.model.seq_len,
            "predicted_memory": max(stages, key=lambda kinds: sum(kinds.values())),
            "bubble": program.bubble,
            "predicted_step_s": program.makespan if config.parallel.costs else None,
            "gathers": max(program.gathers),
            "reduces": max(program.reduces),
            "limit": spec.memory_limit,
        }


def make_plan(config: RunConfig) -> Plan:
    """Try the model on the meta device, cut it by cost, compile and check both programs.

    Raises ConfigError for a model or layout that cannot run, ScheduleError if a program fails its check.
    """
    parallel = config.parallel
    layout = Layout(
        stages=parallel.stages,
        chunks=parallel.chunks,
        shards=parallel.shards,
        replicas=parallel.replicas,
        zero1=parallel.zero1,
        placement=POLICIES[parallel.policy].placement,
    )
    description, ranges, spec = _specified(config)
    return Plan(layout, description, ranges, compile_program(spec), compile_forward(spec))


def tuned(config: RunConfig) -> RunConfig:
    """The same run with ``parallel.unit = "auto"`` decided, and its memory limit: what a run keeps in its records.

    Raises as :func:`make_plan`.
    """
    if config.parallel.unit != AUTO:
        return config
    _, _, spec = _specified(config)
    return replace(config, parallel=replace(config.parallel, unit=spec.unit, memory_limit=spec.memory_limit))


def _specified(config: RunConfig) -> tuple[ModelDescription, tuple[range, ...], ScheduleSpec]:
    """The model, tried on the meta device, the blocks of every chunk of it, and what the step is compiled from."""
    parallel = config.parallel
    description = describe(
        resolve_factory(config.model),
        config.model.seq_len,
        seed=config.run.seed,
        precision=Precision.of(config.train.dtype),
    )
    ranges = tuple(cut_model(description, parallel.stages * parallel.chunks))
    if parallel.costs:
        costs = costs_of(config, ranges)
    else:
        F, B, W = (tuple(round(cost, 4) for cost in costs) for costs in chunk_costs(description, ranges))
        F = tuple(max(cost, 1e-4) for cost in F)  # a chunk without any matrix product takes its time too
        costs = Costs(F=F, B=B, W=W)
    return description, ranges, parallel.schedule(costs)
