"""Each thing that the check verifies, broken once: it must be refused, and the text must say where and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from zeropp_ray.errors import ScheduleError
from zeropp_ray.schedule import (
    Action,
    Edge,
    Op,
    ScheduleSpec,
    add_communication,
    add_residency,
    check,
    compile_forward,
    compile_program,
    resolve,
)

Ranks = list[list[Action]]
SPEC = resolve(3, 2, 6, unit=3)


def action(text: str) -> Action:
    """The action that prints as ``text``."""
    *word, task = text.split()
    chunk, kind, microbatch = re.fullmatch(r"(\d+)([A-Z]*)(\d*)", task).groups()
    if not kind:
        return Action(Op(word[0]), int(chunk))
    where = int(chunk), int(microbatch)
    return Action(Op(word[0]), *where, kind) if word else Action(Op(kind), *where)


def at(actions: list[Action], text: str) -> int:
    return actions.index(action(text))


def drop(p: int, text: str) -> Callable[[Ranks], None]:
    return lambda ranks: ranks[p].remove(action(text))


def drop_last(p: int, text: str) -> Callable[[Ranks], None]:
    def change(ranks: Ranks) -> None:
        del ranks[p][max(i for i, found in enumerate(ranks[p]) if found == action(text))]

    return change


def again(p: int, text: str) -> Callable[[Ranks], None]:
    """The action a second time, right after the first."""
    return lambda ranks: ranks[p].insert(at(ranks[p], text), action(text))


def insert(p: int, text: str, before: str) -> Callable[[Ranks], None]:
    return lambda ranks: ranks[p].insert(at(ranks[p], before), action(text))


def move(p: int, text: str, before: str) -> Callable[[Ranks], None]:
    def change(ranks: Ranks) -> None:
        ranks[p].remove(action(text))
        ranks[p].insert(at(ranks[p], before), action(text))

    return change


def swap(p: int, one: str, other: str) -> Callable[[Ranks], None]:
    def change(ranks: Ranks) -> None:
        i, j = at(ranks[p], one), at(ranks[p], other)
        ranks[p][i], ranks[p][j] = ranks[p][j], ranks[p][i]

    return change


def append(p: int, text: str) -> Callable[[Ranks], None]:
    return lambda ranks: ranks[p].append(action(text))


BROKEN = [
    # tasks: each once, after what it needs, summed by micro-batch
    (drop(2, "0W4"), r"rank 2, position \d+: 0W5 is out of order: 0W4 comes next"),
    (drop(2, "0W5"), r"rank 2, position \d+: REDUCE 0 comes inside a unit: 0W5 has not run"),
    (again(0, "0F0"), r"rank 0, position \d+: 0F0 runs twice"),
    (again(0, "1B0"), r"rank 0, position \d+: 1B0 runs twice"),
    (again(0, "1W0"), r"rank 0, position \d+: 1W0 runs twice"),
    (move(2, "1F1", "REDUCE 0"), r"rank 2, position \d+: 1B1 runs before 1F1"),
    (swap(2, "1B2", "1W2"), r"rank 2, position \d+: 1W2 runs before 1B2"),
    (swap(2, "0B0", "0B1"), r"rank 2, position \d+: 0B1 runs before the WAIT for its output's gradient"),
    (swap(2, "0W3", "0W4"), r"rank 2, position \d+: 0W4 is out of order: 0W3 comes next"),
    (insert(0, "2F0", "0F0"), r"rank 0, position \d+: 2F0 names a chunk that is not there"),
    (insert(0, "0F6", "0F0"), r"rank 0, position \d+: 0F6 names a micro-batch that is not there"),
    # parameters
    (drop(1, "GATHER 0"), r"rank 1, position \d+: 0F0 runs without the chunk's parameters"),
    (again(1, "GATHER 0"), r"rank 1, position \d+: GATHER 0 gathers a chunk that is resident"),
    (again(1, "RELEASE 0"), r"rank 1, position \d+: RELEASE 0 releases a chunk that is not resident"),
    (move(1, "RELEASE 0", "0F2"), r"rank 1, position \d+: 0F2 runs without the chunk's parameters"),
    (move(1, "RELEASE 1", "1B2"), r"rank 1, position \d+: 1B2 runs without the chunk's parameters"),
    (drop(1, "RELEASE 0"), r"rank 1, position \d+: GATHER 1 makes 2 chunks resident; the program states 1"),
    (drop_last(1, "RELEASE 0"), r"rank 1, end of its list: .* of chunk 0 (is|are) not released"),
    # gradient buffers
    (drop(1, "REDUCE 1"), r"rank 1, position \d+: 0W0 opens a second gradient buffer: chunk 1 is not reduced yet"),
    (again(1, "REDUCE 1"), r"rank 1, position \d+: REDUCE 1 has no gradient buffer to reduce"),
    (move(1, "REDUCE 1", "1W2"), r"rank 1, position \d+: REDUCE 1 comes inside a unit: 1W2 has not run"),
    (insert(1, "REDUCE 1", "0F0"), r"rank 1, position \d+: REDUCE 1 has no gradient buffer to reduce"),
    (drop_last(1, "REDUCE 0"), r"rank 1, end of its list: .* of chunk 0 (is|are) not reduced"),
    # transfers
    (
        drop(1, "RECV 0F0"),
        r"RECV 0F1 breaks the order of edge 0→1 F: SEND 0F0 of the sender meets RECV 0F1",
    ),
    (drop(1, "RECV 1B5"), r"rank 1, position \d+: WAIT 1B5 waits for a receive that is not posted"),
    (again(1, "RECV 0F0"), r"rank 1, position \d+: RECV 0F0 is posted twice"),
    (again(1, "SEND 0F0"), r"rank 1, position \d+: SEND 0F0 is posted twice"),
    (again(1, "WAIT 0F0"), r"rank 1, position \d+: WAIT 0F0 is waited for twice"),
    (again(1, "DRAIN 0F0"), r"rank 1, position \d+: DRAIN 0F0 is drained twice"),
    (insert(0, "RECV 0F0", "0F0"), r"rank 0, position \d+: RECV 0F0 receives what no other rank sends"),
    (insert(0, "WAIT 0F0", "0F0"), r"rank 0, position \d+: WAIT 0F0 waits for a receive that is not posted"),
    (append(2, "SEND 1F0"), r"rank 2, position \d+: SEND 1F0 sends what no other rank takes"),
    (append(2, "DRAIN 1F0"), r"rank 2, position \d+: DRAIN 1F0 drains a send that is not posted"),
    (move(1, "DRAIN 0F0", "SEND 0F0"), r"rank 1, position \d+: DRAIN 0F0 drains a send that is not posted"),
    (drop(1, "WAIT 1F5"), r"rank 1, position \d+: 1F5 runs before the WAIT for its input"),
    (drop(1, "WAIT 0B5"), r"rank 1, position \d+: 0B5 runs before the WAIT for its output's gradient"),
    (move(1, "SEND 0F1", "0F1"), r"rank 1, position \d+: SEND 0F1 is posted before what it sends is made"),
    (move(1, "SEND 0F0", "1F0"), r"breaks the order of edge 1→2 F: SEND 0F1 of the sender meets RECV 0F0"),
    (swap(1, "RECV 0F0", "RECV 0F1"), r"breaks the order of edge 0→1 F: SEND 0F0 of the sender meets RECV 0F1"),
    (move(1, "RECV 0F2", "GATHER 0"), r"rank 1, position \d+: RECV 0F2 puts 3 receives ahead on edge 0→1 F"),
    (
        drop(1, "DRAIN 0F0"),
        r"rank 1, position \d+: SEND 1F0 puts 4 sends in flight on edge 1→2 F; the program states 3",
    ),
    (drop(1, "DRAIN 1F5"), r"rank 1, end of its list: DRAIN 1F5 never runs"),
    # nobody may wait for ever
    (drop(0, "SEND 1B5"), r"deadlock: .*rank 2, position \d+: WAIT 0B5 waits for SEND 1B5 of rank 0"),
    (drop(0, "SEND 1F5"), r"deadlock: .*rank 1, position \d+: WAIT 1F5 waits for SEND 1F5 of rank 0, blocked at \d+"),
    (
        move(0, "WAIT 1F0", "SEND 0F0"),
        r"deadlock: rank 0, position \d+: WAIT 1F0 waits for SEND 0F0 of rank 2, .*rank 1",
    ),
]


def broken(spec: ScheduleSpec, change: Callable[[Ranks], None]) -> Ranks:
    ranks = [list(actions) for actions in compile_program(spec).ranks]
    change(ranks)
    return ranks


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_broken_program(change: Callable[[Ranks], None], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(broken(SPEC, change), SPEC, compile_program(SPEC).in_flight)


AGAIN = resolve(3, 2, 6, unit=3, recompute="full", reduce="step")

BROKEN_AGAIN = [
    (drop(1, "0RF2"), r"rank 1, position \d+: 0B2 runs before 0RF2"),
    (again(1, "0RF2"), r"rank 1, position \d+: 0RF2 runs twice"),
    (move(1, "1RF0", "WAIT 1F0"), r"rank 1, position \d+: 1RF0 runs before 1F0"),
    (swap(1, "1RF2", "1B2"), r"rank 1, position \d+: 1B2 runs before 1RF2"),
    (move(1, "0RF0", "GATHER 1"), r"rank 1, position \d+: 0RF0 runs without the chunk's parameters"),
    (insert(1, "REDUCE 1", "1F3"), r"rank 1, position \d+: REDUCE 1 comes inside a step: 1W3 has not run"),
    (drop(1, "REDUCE 1"), r"rank 1, end of its list: the gradient buffer of chunk 1 is not reduced"),
    (again(1, "REDUCE 1"), r"rank 1, position \d+: REDUCE 1 has no gradient buffer to reduce"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_AGAIN)
def test_broken_program_with_recomputation_and_one_reduce(change: Callable[[Ranks], None], message: str) -> None:
    check(compile_program(AGAIN).ranks, AGAIN, compile_program(AGAIN).in_flight)
    with pytest.raises(ScheduleError, match=message):
        check(broken(AGAIN, change), AGAIN, compile_program(AGAIN).in_flight)


def test_recomputed_activations_count_from_the_second_forward() -> None:
    program = compile_program(AGAIN)
    least = int(2 * max(program.peak_activations)) - 1
    with pytest.raises(ScheduleError, match=rf"\dRF\d makes {least + 1} chunk activations live; .* allows {least}"):
        check(program.ranks, replace(AGAIN, memory_limit=least / 2), program.in_flight)


def test_only_what_is_recomputed_has_an_rf() -> None:
    selective = resolve(3, 2, 6, unit=3, recompute="selective")
    program = compile_program(selective)
    assert not any(str(action).startswith("1RF") for actions in program.ranks for action in actions)
    with pytest.raises(ScheduleError, match=r"rank 1, position \d+: 1RF0 recomputes what its F keeps"):
        check(broken(selective, insert(1, "1RF0", "1B0")), selective, program.in_flight)


def test_inputs_are_kept_within_what_the_program_states() -> None:
    spec = resolve(1, 1, 4, unit=2, recompute="full")  # 2 of a unit, and one more
    ranks = [[action(text) for text in ("GATHER 0", "0F0", "0F1", "0F2", "0F3")]]
    with pytest.raises(ScheduleError, match=r"position 4: 0F3 keeps 4 chunk inputs; the program states 3"):
        check(ranks, spec, {})


def test_no_room_for_the_sends_that_are_made() -> None:
    program = compile_program(SPEC)
    tight = {**program.in_flight, Edge(1, 2, "F"): 2}
    with pytest.raises(ScheduleError, match=r"rank 1, position \d+: SEND 0F2 puts 3 sends .*; the program states 2"):
        check(program.ranks, SPEC, tight)
    with pytest.raises(ScheduleError, match=r"SEND 0F0 puts 1 sends in flight on edge 0→1 F; the program states 0"):
        check(program.ranks, SPEC, {})


def test_more_live_activations_than_the_limit() -> None:
    program = compile_program(SPEC)
    less = replace(SPEC, memory_limit=2.5)
    with pytest.raises(ScheduleError, match=r"rank \d, position \d+: 1F2 makes 6 chunk activations live; .* allows 5"):
        check(program.ranks, less, program.in_flight)


def test_two_resident_only_with_prefetch() -> None:
    ahead = replace(SPEC, prefetch=True)
    program = compile_program(ahead)
    check(program.ranks, ahead, program.in_flight)
    with pytest.raises(ScheduleError, match=r"GATHER 1 makes 2 chunks resident; the program states 1"):
        check(program.ranks, SPEC, program.in_flight)


def test_each_unit_is_reduced() -> None:
    spec = resolve(1, 1, 4, unit=2)  # one chunk: nothing but the REDUCE ends a unit's sum
    with pytest.raises(ScheduleError, match=r"0W2 starts a unit, and the unit before it is not reduced yet"):
        check(broken(spec, drop(0, "REDUCE 0")), spec, {})


def test_chunks_of_one_stage_hand_over_in_order() -> None:
    spec = resolve(1, 2, 2)
    with pytest.raises(ScheduleError, match=r"1F0 runs before 0F0, whose output it takes"):
        check([[action("GATHER 1"), action("1F0")]], spec, {})
    with pytest.raises(ScheduleError, match=r"0B0 runs before 1B0, whose gradient it takes"):
        check([[action("GATHER 0"), action("0F0"), action("0B0")]], spec, {})


def test_forward_only() -> None:
    program = compile_forward(SPEC)
    check(program.ranks, SPEC, program.in_flight, forward_only=True)
    ranks = [list(actions) for actions in program.ranks]
    for text in ("0RF0", "0B0", "0W0"):
        ranks[0].insert(at(ranks[0], "RELEASE 0"), action(text))
        with pytest.raises(ScheduleError, match=f"{text} has no place in a forward-only program"):
            check(ranks, SPEC, program.in_flight, forward_only=True)
        ranks[0].remove(action(text))
    with pytest.raises(ScheduleError, match=r"rank 0, end of its list: 0B0 never runs"):
        check(program.ranks, replace(SPEC, memory_limit=6), program.in_flight)
    ranks[2].remove(action("1F5"))
    with pytest.raises(ScheduleError, match=r"rank 2, end of its list: 1F5 never runs"):
        check(ranks, SPEC, program.in_flight, forward_only=True)


def test_a_send_completes_only_against_its_receive() -> None:
    spec = resolve(2, 1, 2)
    program = compile_forward(spec)
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank 0, position \d+: DRAIN 0F0 waits for RECV 0F0 of rank 1, at"
    ):
        check([program.ranks[0], ()], spec, program.in_flight, forward_only=True)


def test_a_deadlock_of_many_ranks_is_told_in_short() -> None:
    spec = resolve(8, 1, 8)
    with pytest.raises(ScheduleError, match=r"^deadlock: (rank \d, [^;]*; ){4}and 3 more ranks$") as caught:
        check(broken(spec, lambda ranks: ranks[0].clear()), spec, compile_program(spec).in_flight)
    assert "\n" not in str(caught.value)


def test_gradients_are_summed_in_micro_batch_order() -> None:
    ranks = [[action(text) for text in ("GATHER 0", "0F0", "0F1", "0B1")]]
    with pytest.raises(ScheduleError, match=r"rank 0, position 3: 0B1 is out of order: 0B0 comes next"):
        check(ranks, resolve(1, 1, 2, memory_limit=2), {})


def test_use_in_another_order_than_sent_needs_a_wider_window() -> None:
    spec = resolve(2, 1, 3, memory_limit=3)
    order = [list(map(action, ("0F0", "0F1", "0F2"))), list(map(action, ("0F2", "0F1", "0F0")))]
    ranks = add_communication(add_residency(order, spec), spec, {Edge(0, 1, "F"): 3})
    assert list(map(str, ranks[1][:4])) == ["RECV 0F0", "RECV 0F1", "GATHER 0", "RECV 0F2"]
    with pytest.raises(ScheduleError, match=r"RECV 0F2 puts 3 receives ahead on edge 0→1 F; the program states 2"):
        check(ranks, spec, {Edge(0, 1, "F"): 3}, forward_only=True)
