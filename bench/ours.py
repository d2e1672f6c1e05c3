"""One member of ours in a plain process: the library without Ray. The vote and the decision of every step are real."""

from __future__ import annotations

import torch

from bench.tensor_bytes import Watched, watched
from bench.variant import Place
from zeropp_ray.allocator import keep_freed_memory
from zeropp_ray.comm.gloo import Rendezvous, connect
from zeropp_ray.config import RunConfig
from zeropp_ray.data.corpus import load_corpus
from zeropp_ray.data.sampler import Batches
from zeropp_ray.member import StageMember
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.vote import Decision, Vote


class Ours:
    """A ``StageMember`` and what it reads."""

    def __init__(self, config: RunConfig, place: Place) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()  # as in a worker
        plan = make_plan(config)
        me = list(plan.layout.members())[place.rank]
        self._member = StageMember(config, plan, me, Batches(config, load_corpus(config), me.f, me.r))
        at = Rendezvous("127.0.0.1", place.port, epoch=0, timeout_s=config.resources.step_timeout_s)
        self._member.join(connect(at, plan.layout, me, host="127.0.0.1"))

    def advance(self, step: int, decision: Decision | None) -> Vote:
        """Step 1, 2, …, after committing the one before."""
        return self._member.advance(step, decision)

    def watch(self, step: int, decision: Decision | None) -> tuple[Vote, Watched]:
        """The same, watched; not for timing."""
        counters = self._member.counters
        gathers, gathered = counters.gathers, counters.gathered_bytes
        with watched() as found:
            vote = self._member.advance(step, decision)
        found.gathers, found.gathered_bytes = counters.gathers - gathers, counters.gathered_bytes - gathered
        return vote, found
