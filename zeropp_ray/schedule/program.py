"""The programs that a step and an evaluation run: all passes, one after the other, the check at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeropp_ray.schedule.actions import TRANSFER, Action, Ranks, listing
from zeropp_ray.schedule.check import check
from zeropp_ray.schedule.communication import RECEIVE_WINDOW, add_communication, in_flight_bounds
from zeropp_ray.schedule.order import forward_order, zeropp_order
from zeropp_ray.schedule.policies import POLICIES, fixed_order
from zeropp_ray.schedule.replay import replay
from zeropp_ray.schedule.residency import add_residency
from zeropp_ray.schedule.spec import Edge, ScheduleSpec
from zeropp_ray.schedule.units import split_units


@dataclass(frozen=True)
class Program:
    """A checked program: one list of actions per rank, the same for all members of a stage. Picklable.

    ``in_flight`` bounds the sends per edge that are posted and not drained, ``receive_window`` the receives posted
    ahead. The rest is what :func:`~zeropp_ray.schedule.replay.replay` says of it, per step; counts are per rank.
    """

    spec: ScheduleSpec
    ranks: tuple[tuple[Action, ...], ...]
    forward_only: bool
    in_flight: Mapping[Edge, int]
    receive_window: int
    makespan: float
    lower_bound: float
    bubble: float
    peak_activations: tuple[float, ...]
    peak_inputs: tuple[int, ...]
    peak_gradient_buffers: tuple[int, ...]
    peak_resident: tuple[int, ...]
    gathers: tuple[int, ...]
    reduces: tuple[int, ...]

    def __str__(self) -> str:
        return listing(self.ranks)

    def without_transfers(self) -> list[list[Action]]:
        """The lists before the communication pass: tasks and collectives."""
        return [[action for action in actions if action.op not in TRANSFER] for actions in self.ranks]


def compile_program(spec: ScheduleSpec) -> Program:
    """Order, residency, communication and check of a training step.

    Raises:
        ScheduleError: if a pass is wrong; every spec that :func:`~zeropp_ray.schedule.spec.resolve` gives compiles.
    """
    order = zeropp_order(spec) if POLICIES[spec.policy].order is None else fixed_order(spec)
    return _lower(spec, order, forward_only=False)


def compile_forward(spec: ScheduleSpec, microbatches: int = 0) -> Program:
    """The forward-only program of an evaluation: no backward follows, so no activation is kept.

    ``microbatches`` is how many it runs over, in units as near to those of ``spec`` as they go in; any number from 1
    on, also below the number of stages. 0 takes the ``N`` of the step.
    """
    total = microbatches or spec.microbatches
    units = tuple(split_units(total, min(spec.unit, total)))
    spec = replace(spec, microbatches=total, unit=min(spec.unit, total), units=units)
    return _lower(spec, forward_order(spec), forward_only=True)


def _lower(spec: ScheduleSpec, order: Ranks, forward_only: bool) -> Program:
    local = add_residency(order, spec)
    timeline = replay(local, spec, forward_only)
    in_flight = in_flight_bounds(local, timeline, spec)
    ranks = add_communication(local, spec, in_flight)
    check(ranks, spec, in_flight, forward_only)
    return Program(
        spec=spec,
        ranks=tuple(map(tuple, ranks)),
        forward_only=forward_only,
        in_flight=in_flight,
        receive_window=RECEIVE_WINDOW,
        makespan=timeline.makespan,
        lower_bound=timeline.lower_bound,
        bubble=timeline.bubble,
        peak_activations=timeline.peak_activations,
        peak_inputs=timeline.peak_inputs,
        peak_gradient_buffers=timeline.peak_gradient_buffers,
        peak_resident=timeline.peak_resident,
        gathers=timeline.gathers,
        reduces=timeline.reduces,
    )
