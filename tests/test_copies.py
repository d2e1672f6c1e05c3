"""Copies of the state in memory: whoever is killed comes back with the same bytes, and the run ends alike."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.test_parameter_kinds import of
from tests.test_parity import configuration, samples_of
from zeropp_ray.comm.base import Links, PeerLost
from zeropp_ray.comm.gloo import Rendezvous, connect
from zeropp_ray.config import RunConfig
from zeropp_ray.copies import Holdings, common_step, missing
from zeropp_ray.errors import MemberError
from zeropp_ray.layout import Layout, Member
from zeropp_ray.metrics import kinds
from zeropp_ray.planner.memory import predict_memory
from zeropp_ray.vote import decide

# -- who holds what ---------------------------------------------------------------------------------------------------


def layout(P: int, F: int = 1, R: int = 1, zero1: bool = False) -> Layout:
    return Layout(stages=P, chunks=1, shards=F, replicas=R, zero1=zero1)


@pytest.mark.parametrize(("mesh", "me", "buddy", "guarded"), [
    (layout(3, 2), (2, 1, 0), (0, 1, 0), (1, 1, 0)),
    (layout(1, 3), (0, 2, 0), (0, 0, 0), (0, 1, 0)),
    (layout(2, 2, 3), (1, 0, 2), (1, 0, 0), None),  # replicas hold the same: nothing is sent
    (layout(2, 2, 3, zero1=True), (1, 0, 2), (0, 0, 2), (0, 0, 2)),
    (layout(1, 1, 2, zero1=True), (0, 0, 0), (0, 0, 1), (0, 0, 1)),
    (layout(2, 1, 1, zero1=True), (0, 0, 0), (1, 0, 0), (1, 0, 0)),
    (layout(1), (0, 0, 0), None, None),
])  # fmt: skip
def test_buddies(mesh, me, buddy, guarded):
    assert (mesh.buddy(Member(*me)), mesh.guarded(Member(*me))) == (buddy, guarded)
    assert {mesh.buddy(each) or each for each in mesh.members()} == {*mesh.members()}


def test_the_common_step_is_the_newest_that_all_hold_or_their_buddies_do():
    a, b, c = layout(3).members()
    held = {a: Holdings((10, 20), (10, 20)), b: Holdings((20, 30), (20,)), c: Holdings((20, 30), (20, 30))}
    assert common_step(layout(3), held) == (20,)
    assert missing(held, 20) == frozenset()
    assert common_step(layout(3), {**held, b: None}) == (20,)  # c guards it; and b's own guarding is not needed
    assert missing({**held, b: None}, 20) == {b}
    assert common_step(layout(3), {**held, a: None}) == (20,)
    assert common_step(layout(3), {**held, a: None, b: None}) == ()  # buddies
    assert common_step(layout(3), {**held, a: Holdings((10, 30), (10, 30)), b: None}) == (30,)
    both = dict.fromkeys(held, Holdings((10, 20), (10, 20)))
    assert common_step(layout(3), both) == (20, 10)
    assert common_step(layout(3), {**both, c: Holdings()}) == (20, 10)  # new, and guarded by a


def test_the_common_step_with_replicas_is_held_by_any_of_them():
    mesh = layout(1, 1, 3)
    a, b, c = mesh.members()
    held = {a: None, b: Holdings(), c: Holdings((4, 6), (4, 6))}
    assert common_step(mesh, held) == (6, 4)
    assert missing(held, 6) == {a, b}
    assert common_step(mesh, {**held, c: None}) == ()
    assert common_step(layout(1), {Member(0, 0, 0): Holdings((4, 6), (4, 6))}) == (6, 4)
    assert common_step(layout(1), {Member(0, 0, 0): None}) == ()


# -- killed and restored ----------------------------------------------------------------------------------------------


def steps(run: harness.Run, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        decision = decide(step, run.call("advance", step, None), 1.0)
        run.call("flush", decision)
        losses.append(decision.loss)
    return losses


def copy(run: harness.Run, step: int) -> None:
    """Of all, up to the acknowledgement."""
    run.call("copy_state", step)
    while any(step not in held.own or step not in held.guarded for held in run.call("holdings")):
        time.sleep(0.01)


def fail(run: harness.Run, step: int, lost: Sequence[Member]) -> None:
    """A step in which members are killed; the others notice."""
    for me in lost:
        run.kill(me)
    for me, pipe in run.pipes:
        if me not in lost:
            pipe.send(("advance", (step, None)))
    answers = [pipe.recv() for me, pipe in run.pipes if me not in lost]
    assert all(isinstance(answer, MemberError) and answer.peer_lost for answer in answers), answers


def restore(run: harness.Run, lost: Sequence[Member]) -> int:
    """New processes, a new epoch, and the newest step that is held everywhere."""
    run.recover(lost)
    held = dict(zip(run.plan.layout.members(), run.call("holdings"), strict=True))
    step = common_step(run.plan.layout, held)[0]
    assert missing(held, step) == {*lost}
    run.call("restore_copies", step, missing(held, step))
    return step


def begin(run: harness.Run) -> list[float]:
    """Two steps. Frozen weights are not what a new process would begin with."""
    run.call("shift_frozen")
    return steps(run, 1, 2)


def same(ours: list, theirs: list) -> bool:
    return all(
        (name, a.dtype) == (other, b.dtype) and torch.equal(a, b)
        for mine, yours in zip(ours, theirs, strict=True)
        for (name, a), (other, b) in zip(mine, yours, strict=True)
    )


def small(*mesh: int, **settings) -> RunConfig:
    return configuration(*mesh, N=3, b=1, **settings)


CONFIGS = {
    "2112": (small(2, 1, 2), Member(1, 1, 0)),
    "1121": (small(1, 1, 2), Member(0, 0, 0)),
    "1112": (small(1, 1, 1, 2), Member(0, 0, 1)),
    "zero1": (small(2, 1, 1, 2, zero1=True), Member(0, 0, 1)),
    "zero1-alone": (small(1, 1, 1, 2, zero1=True, dtype="bfloat16"), Member(0, 0, 0)),
    "bfloat16": (small(2, 1, 1, dtype="bfloat16"), Member(0, 0, 0)),
    "tied": (of("tied", 2, 1, N=2, b=1, steps=6), Member(1, 0, 0)),
    "frozen": (of("adapters_tied", 2, 2, N=2, b=1, steps=6), Member(0, 0, 0)),
    "frozen-zero1": (of("frozen_tied", 1, 1, 1, 2, N=2, b=1, steps=6, zero1=True), Member(0, 0, 1)),
}


SHORT = ("2112", "zero1-alone", "frozen-zero1")


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(n, marks=pytest.mark.full) for n in sorted(CONFIGS.keys() - SHORT))]
)
def test_a_killed_member_comes_back_and_the_run_ends_alike(name):
    config, victim = CONFIGS[name]
    with harness.members(config, samples_of(config)) as run:
        losses = begin(run) + steps(run, 3, 6)
        straight = run.call("state")
    with harness.members(config, samples_of(config)) as run:
        assert begin(run) == losses[:2]
        copy(run, 2)
        assert steps(run, 3, 3) == losses[2:3]
        copy(run, 3)
        assert steps(run, 4, 4) == losses[3:4]
        for (me, _), bytes in zip(run.pipes, run.call("state_bytes"), strict=True):
            assert bytes[kinds.COPIES] == predict_memory(run.plan, config, me.p)[kinds.COPIES]
        fail(run, 5, [victim])
        assert restore(run, [victim]) == 3
        copy(run, 3)  # makes redundancy whole again: now the one that gave the copy can be lost
        buddy = run.plan.layout.buddy(victim)
        assert steps(run, 4, 4) == losses[3:4]
        fail(run, 5, [buddy])
        assert restore(run, [buddy]) == 3
        assert steps(run, 4, 6) == losses[3:]
        assert same(run.call("state"), straight)


def test_a_copy_that_a_death_cut_off_does_not_count():
    config = small(3)
    first, second, third = Layout(stages=3, chunks=1, shards=1, replicas=1).members()
    with harness.members(config, samples_of(config)) as run:
        losses = steps(run, 1, 5)
        straight = run.call("state")
    with harness.members(config, samples_of(config)) as run:
        steps(run, 1, 2)
        copy(run, 2)
        steps(run, 3, 3)
        copy(run, 3)
        steps(run, 4, 4)
        dying = run.pipes[1][1]
        dying.send(("die_in_copy", ()))
        dying.recv()
        for _, pipe in run.pipes:
            pipe.send(("copy_state", (4,)))
        assert [pipe.recv() for _, pipe in run.pipes if pipe is not dying] == [None, None]
        fail(run, 5, [second])
        run.recover([second])
        held = dict(zip((first, second, third), run.call("holdings"), strict=True))
        assert held[second] == ((), ())
        assert (held[first].own, held[third].own) == ((3, 4), (3, 4))
        assert held[third].guarded == (3,)  # 2 is overwritten in part by what the dead one was to send
        assert common_step(run.plan.layout, held) == (3,)
        run.call("restore_copies", 3, frozenset({second}))
        assert all(4 not in {*held.own, *held.guarded} for held in run.call("holdings"))
        assert steps(run, 4, 5) == losses[3:]
        assert same(run.call("state"), straight)


def test_a_vote_acknowledges_and_a_failed_exchange_is_told():
    config = small(2)
    with harness.members(config, samples_of(config)) as run:
        assert [vote.held for vote in run.call("advance", 1, None)] == [-1, -1]
        copy(run, 1)
        assert [vote.held for vote in run.call("advance", 2, None)] == [1, 1]
        run.call("close_copies")
        run.call("copy_state", 2)
        for _, pipe in run.pipes:
            pipe.send(("advance", (3, None)))
        answers = [pipe.recv() for _, pipe in run.pipes]
        assert all(answer.peer_lost for answer in answers)
        assert any("failed in the exchange of copies: the group is closed" in str(answer) for answer in answers)


def test_a_checkpoint_that_is_loaded_forgets_copies(tmp_path):
    config = small(2)
    with harness.members(config, samples_of(config)) as run:
        steps(run, 1, 1)
        saved = run.save(tmp_path / "run", 1, 1)
        copy(run, 1)
        run.call("load", saved)
        assert run.call("holdings") == [Holdings(), Holdings()]


def test_no_copies_are_kept_if_none_are_wanted():
    config = dataclasses.replace(small(2), recovery=dataclasses.replace(small(2).recovery, copy_every=0))
    with harness.members(config, samples_of(config)) as run:
        assert [vote.held for vote in run.call("advance", 1, None)] == [-1, -1]
        assert run.call("holdings") == [Holdings(), Holdings()]
        assert all(not bytes[kinds.COPIES] for bytes in run.call("state_bytes"))
        assert not predict_memory(run.plan, config, 0)[kinds.COPIES]


# -- groups -----------------------------------------------------------------------------------------------------------


def test_an_abort_from_another_thread_frees_a_member_that_waits():
    """Its peer sleeps, and leaves the epoch by its other thread too."""
    config = small(2)
    with harness.members(config, samples_of(config)) as run:
        (_, waiting), (_, asleep) = run.pipes
        run.call("abort_in", 0.3)
        waiting.send(("advance", (1, None)))
        asleep.send(("nap", (2.0,)))
        answer = waiting.recv()
        assert not asleep.poll(), "it came free when its peer woke up"
        assert isinstance(answer, MemberError)
        assert answer.peer_lost


def test_an_abort_frees_members_that_wait_for_each_other():
    config = small(2)
    with harness.members(config, samples_of(config)) as run:
        run.call("abort_in", 0.3)
        for _, pipe in run.pipes:
            pipe.send(("wait_for_nothing", ()))
        assert all(pipe.poll(10) for _, pipe in run.pipes)
        assert all("PeerLost" in str(pipe.recv()) for _, pipe in run.pipes)


def together(at: Rendezvous) -> list[Links]:
    """Two stages in this process."""
    found: dict[int, Links] = {}

    def one(p: int) -> None:
        found[p] = connect(at, layout(2), Member(p, 0, 0), host="127.0.0.1")

    threads = [threading.Thread(target=one, args=(p,)) for p in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[p] for p in (0, 1)]


@pytest.fixture
def at():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, epoch=0, timeout_s=30, form_s=1)
    del store


def test_a_peer_that_does_not_come_is_not_waited_for_as_long_as_for_a_transfer(at):
    began = time.monotonic()
    with pytest.raises(PeerLost, match="pipeline-0-0 of epoch 0 was not formed within 1 s"):
        connect(at, layout(2), Member(0, 0, 0), host="127.0.0.1")
    assert time.monotonic() - began < at.timeout_s / 2


def test_transfers_have_their_own_time_limit(at):
    first, second = together(at)
    tensor = torch.zeros(3)
    arriving = first.pipeline.receive(tensor, 1, 7)
    timer = threading.Timer(2 * at.form_s, lambda: second.pipeline.send(torch.ones(3), 0, 7))
    timer.start()
    arriving.wait()
    assert tensor.sum() == 3
    first, _ = together(dataclasses.replace(at, epoch=1, timeout_s=0.2, form_s=15))
    with pytest.raises(PeerLost):
        first.pipeline.receive(tensor, 1, 7).wait()


def test_a_large_message_that_is_cut_off_is_not_waited_for(at):
    """gloo itself does not fail the receive of which a part has come."""

    def finish(transfer) -> None:
        with suppress(PeerLost):  # or it was through in time
            transfer.wait()

    for epoch, delay in enumerate((0.001, 0.002, 0.004, 0.008, 0.016, 0.02)):
        groups = [links.pipeline for links in together(dataclasses.replace(at, epoch=epoch))]
        coming = [group.receive(torch.empty(2**24), 1 - group.rank, 7) for group in groups]
        going = [group.send(torch.empty(2**24), 1 - group.rank, 7) for group in groups]
        waiting = [threading.Thread(target=finish, args=(transfer,), daemon=True) for transfer in coming]
        for thread in waiting:
            thread.start()
        time.sleep(delay)
        for group in groups:
            group.close()
        for thread in waiting:
            thread.join(at.timeout_s / 2)
        assert not any(thread.is_alive() for thread in waiting)
        del going  # not before: gloo reads from it
