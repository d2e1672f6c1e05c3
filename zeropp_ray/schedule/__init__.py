"""Schedules: from numbers to a checked program per rank.

Passes, as in a compiler: order (``F``, ``RF``, ``B``, ``W`` from a replay of the costs, or fixed by the
policy) → residency (``GATHER``, ``RELEASE``, ``REDUCE``) → communication (``RECV``, ``WAIT``, ``SEND``, ``DRAIN``) →
check. Each is a pure function; :func:`compile_program` runs them all.
"""

from zeropp_ray.schedule.actions import COMPUTE, TRANSFER, Action, Op, Ranks, listing
from zeropp_ray.schedule.check import check
from zeropp_ray.schedule.communication import RECEIVE_WINDOW, add_communication, in_flight_bounds
from zeropp_ray.schedule.compare import compare, to_table
from zeropp_ray.schedule.costs import Costs, Link, Sizes, hops
from zeropp_ray.schedule.order import Phase, forward_order, phases, zeropp_order
from zeropp_ray.schedule.policies import POLICIES, Policy, fixed_order
from zeropp_ray.schedule.program import Program, compile_forward, compile_program
from zeropp_ray.schedule.render import to_grid, to_json
from zeropp_ray.schedule.replay import Timeline, lower_bound, replay
from zeropp_ray.schedule.residency import add_residency
from zeropp_ray.schedule.spec import AUTO, RECOMPUTE, REDUCE, Edge, Hop, ScheduleSpec, resolve
from zeropp_ray.schedule.tune import tune
from zeropp_ray.schedule.units import default_limit, default_unit, least_limit, split_units

__all__ = [
    "AUTO",
    "COMPUTE",
    "POLICIES",
    "RECEIVE_WINDOW",
    "RECOMPUTE",
    "REDUCE",
    "TRANSFER",
    "Action",
    "Costs",
    "Edge",
    "Hop",
    "Link",
    "Op",
    "Phase",
    "Policy",
    "Program",
    "Ranks",
    "ScheduleSpec",
    "Sizes",
    "Timeline",
    "add_communication",
    "add_residency",
    "check",
    "compare",
    "compile_forward",
    "compile_program",
    "default_limit",
    "default_unit",
    "fixed_order",
    "forward_order",
    "hops",
    "in_flight_bounds",
    "least_limit",
    "listing",
    "lower_bound",
    "phases",
    "replay",
    "resolve",
    "split_units",
    "to_grid",
    "to_json",
    "to_table",
    "tune",
    "zeropp_order",
]
