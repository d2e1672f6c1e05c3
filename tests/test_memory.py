"""Tensor memory: measured as it is, measured without a trace, and as the plan predicted it. And the live limit, kept at
run time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import harness
from tests.test_parity import configuration, samples_of
from zeropp_ray.comm.base import Links
from zeropp_ray.comm.gloo import GlooGroup
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import MemberError
from zeropp_ray.layout import Member
from zeropp_ray.member import StageMember
from zeropp_ray.metrics import kinds
from zeropp_ray.metrics.step_memory import StepMeter
from zeropp_ray.metrics.tensor_memory import TensorMemory
from zeropp_ray.planner.hardware import cluster
from zeropp_ray.planner.memory import predict_memory
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.planner.rating import rated
from zeropp_ray.planner.search import choice_of
from zeropp_ray.planner.sizes import sizes_of
from zeropp_ray.split_backward import WeightQueue
from zeropp_ray.vote import decide

# -- the tracker ------------------------------------------------------------------------------------------------------


def test_what_is_made_counts_until_it_is_freed():
    with TensorMemory() as memory:
        before = memory.bytes
        a = torch.zeros(1000)
        b = a[500:]  # a view
        assert memory.bytes - before == 4000
        c = a + 1
        del a
        assert memory.bytes - before == 8000
        del b
        assert memory.bytes - before == 4000
        c.untyped_storage().resize_(0)
        assert memory.bytes - before == 0
        c.untyped_storage().resize_(2000)
        c.resize_(2000)
        assert memory.bytes - before == 8000
    assert memory.peak_bytes - before == 8000


def test_what_autograd_alone_keeps_counts():
    x = torch.zeros(1000, requires_grad=True)
    with TensorMemory() as memory:
        before = memory.bytes
        y = x.exp().sum()
        assert memory.bytes - before == 4000 + 4
        y.backward()
        assert memory.bytes - before == 4000 + 4  # the gradient is there, what was kept for it is not
        x.grad = None
        assert memory.bytes - before == 4


def test_what_exists_already_counts():
    def empty() -> int:
        with TensorMemory() as memory:
            return memory.bytes

    before = empty()
    x = torch.zeros(1000, requires_grad=True)
    (x * 2).sum().backward()
    assert empty() - before == 8000  # with a gradient that Python has never seen


# -- of a member's step -----------------------------------------------------------------------------------------------


def demo(P: int, V: int, F: int = 1, R: int = 1, N: int = 8, **more) -> RunConfig:
    """The demo's sizes."""
    sections = {
        "model": {"layers": 4, "dim": 128, "heads": 4, "seq_len": 128},
        "parallel": {"stages": P, "chunks": V, "shards": F, "replicas": R, "microbatches": N, "microbatch_size": 2},
        "train": {"steps": 2},
    }
    for section, settings in more.items():
        sections[section] |= settings
    return RunConfig.from_dict(sections)


def measured(config: RunConfig) -> list[tuple[Member, dict[str, int], dict[str, int]]]:
    """Each member with its prediction and what was measured in step 2."""
    samples = harness.Samples(config.model.vocab_size, config.model.seq_len, config.parallel.global_batch)
    with harness.members(config, samples, apart=True) as run:
        first = decide(1, run.call("advance", 1, None), 1.0)
        run.call("advance_measured", 2, first)
        reports = zip(run.pipes, run.call("report"), strict=True)
        return [(me, predict_memory(run.plan, config, me.p), report.memory.at_peak) for (me, _), report in reports]


RECOMPUTED = {"model": {"family": "gpt2", "vocab_size": 1024}, "parallel": {"recompute": "selective"}}
GRID = [
    pytest.param(demo(2, 2, 2, N=4), id="demo"),
    pytest.param(demo(2, 2, N=4, **RECOMPUTED), id="tied-recomputed"),
    *(
        pytest.param(config, id=id, marks=pytest.mark.full)
        for id, config in {
            "alone": demo(1, 1),
            "alone-chunks": demo(1, 2),
            "large-vocabulary": demo(2, 2, 2, model={"vocab_size": 4096}),
            "replicas": demo(2, 1, 1, 2),
            "zero1": demo(1, 2, 1, 2, parallel={"zero1": True}),
            "bfloat16": demo(2, 2, 2, train={"dtype": "bfloat16"}),
            "recomputed": demo(2, 2, 2, parallel={"recompute": "full"}),
            "reduced-once": demo(2, 2, 2, parallel={"reduce": "step"}),
            "prefetch-limit": demo(2, 2, 2, parallel={"unit": 2, "memory_limit": 1.5, "prefetch": True}),
            "depth": demo(4, 2, N=16, model={"layers": 8}),
        }.items()
    ),
]


def on_paper(config: RunConfig) -> float:
    """Bytes of the fullest member, as ``zeropp plan --from`` has them: from sizes in closed form, without torch."""
    sizes, on = sizes_of(config.model, config.train.dtype), cluster("cpu", config.parallel.members, nodes=1)
    return rated(sizes, on, choice_of(config.parallel, sizes, on)).memory_bytes


@pytest.mark.parametrize("config", GRID)
def test_the_prediction_is_within_a_tenth(config):
    members = measured(config)
    assert on_paper(config) == pytest.approx(max(sum(found.values()) for _, _, found in members), rel=0.1)
    for me, predicted, found in members:
        assert predicted.keys() == found.keys() == {*kinds.KINDS}
        assert predicted.pop(kinds.COPIES) == found.pop(kinds.COPIES) > 0, me
        total = sum(found.values())
        assert sum(predicted.values()) == pytest.approx(total, rel=0.1), me
        for memory in (predicted, found):  # what a B has made and not yet dropped or left
            memory[kinds.WEIGHT_INPUTS] += memory.pop(kinds.REST)
        for kind in predicted:
            assert predicted[kind] == pytest.approx(found[kind], abs=0.05 * total), (me, kind)
        assert predicted[kinds.WEIGHTS] == pytest.approx(found[kinds.WEIGHTS], abs=64), me  # and Adam's step counts


def test_measuring_changes_nothing():
    config = configuration(2, 2, steps=3)
    samples, losses, weights = samples_of(config), [], []
    for method in ("advance", "advance_measured"):
        with harness.members(config, samples) as run:
            last = None
            for step in range(1, 4):
                last = decide(step, run.call(method, step, last), 1.0)
                losses.append(last.loss)
            run.call("flush", last)
            weights.append(run.whole("weights"))
    assert losses[:3] == losses[3:]
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())


def nothing_is_kept(me: Member) -> None:
    """After every instruction: what was sent is gone with its drain, activations with B, and their inputs with W."""
    settle = StepMeter._settle

    def checked(self) -> None:
        settle(self)
        step, queue = self._engine.step, self._engine.weights
        held = dict.fromkeys(kinds.KINDS, 0)
        for storage in self._live.values():
            held[storage.kind] += storage.bytes
        messages = len(step.arriving) + len(step.arrived) + len(step.produced) + len(step.leaving)
        assert held[kinds.MESSAGES] == messages * MESSAGE, "sent gradients outlive their drain"
        assert step.graphs or held[kinds.ACTIVATIONS] <= 4 * len(step.losses), "activations outlive their B"
        assert queue or not held[kinds.WEIGHT_INPUTS], "inputs of W outlive it"
        assert held[kinds.REST] <= self.__dict__.setdefault("rest", held[kinds.REST]), "temporaries outlive their task"

    StepMeter._settle = checked


MESSAGE = 4 * 2 * 16 * 32  # bytes in the small layouts


@pytest.mark.parametrize("parallel", [{}, {"recompute": "full"}], ids=["kept", "recomputed"])
def test_what_is_used_is_freed(parallel):
    config = configuration(2, 2, N=6, U=3, **parallel)
    with harness.members(config, samples_of(config), nothing_is_kept) as run:
        run.call("advance_measured", 2, decide(1, run.call("advance", 1, None), 1.0))
        assert all(report.memory.at_peak[kinds.MESSAGES] for report in run.call("report"))


def w_keeps_the_graph(me: Member) -> None:
    """Inputs are stashed with their history: the nodes of a graph, and what those hold."""
    WeightQueue.stash = lambda self, kind, parameter, x, dy: self._recording.append((kind, parameter, x, dy))
    nothing_is_kept(me)


def test_negative_control_a_graph_that_outlives_its_backward():
    config = configuration(2, 2, N=6, U=3)
    with harness.members(config, samples_of(config), w_keeps_the_graph) as run:
        first = decide(1, run.call("advance", 1, None), 1.0)
        for _, pipe in run.pipes:
            pipe.send(("advance_measured", (2, first)))
        answers = [str(pipe.recv()) for _, pipe in run.pipes]  # the other one lost its peer
        assert any("sent gradients outlive their drain" in answer for answer in answers)


# -- the limit --------------------------------------------------------------------------------------------------------


def alone(config: RunConfig, **spec: object) -> StageMember:
    """The member of a run that has only one, in this process. ``spec``: changes that its program knows nothing of."""
    plan = make_plan(config)
    plan = replace(plan, program=replace(plan.program, spec=replace(plan.program.spec, **spec)))
    data = harness.MemberSamples(samples_of(config), config, 0, 0)
    member = StageMember(config, plan, Member(0, 0, 0), data)
    member.join(Links(*(GlooGroup(0, 1, None) for _ in range(5))))
    return member


def test_a_member_keeps_to_the_live_limit_at_run_time():
    config = configuration(1, 2, U=2)
    assert alone(config).advance(1, None).tokens
    with pytest.raises(MemberError, match=r"failed in 0F1 .*: 2 chunk activations are live, the limit is 1"):
        alone(config, memory_limit=0.5).advance(1, None)
    recomputed = configuration(1, 2, U=2, recompute="full")
    assert alone(recomputed).advance(1, None).tokens
    with pytest.raises(MemberError, match=r"failed in 0F1 .*: 2 chunk inputs are kept, the limit is 1"):
        alone(recomputed, units=(0,)).advance(1, None)
