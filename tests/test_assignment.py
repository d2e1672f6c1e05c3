"""Which node each member goes to: stages packed, buddies elsewhere, whatever the nodes have. Pure."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.assignment import Node, assign, beside_their_buddies, stages_across_nodes
from zeropp_ray.layout import Layout, Member


def mesh(P: int, F: int, R: int = 1, zero1: bool = False) -> Layout:
    return Layout(stages=P, chunks=1, shards=F, replicas=R, zero1=zero1)


def nodes(*slots: int) -> list[Node]:
    return [Node(chr(ord("a") + i), f"10.0.0.{i}", count) for i, count in enumerate(slots)]


def placed(layout: Layout, *slots: int) -> dict[Member, str]:
    found = assign(layout, nodes(*slots))
    assert found is not None
    return found[0]


def of_stages(layout: Layout, where: dict[Member, str]) -> list[str]:
    """The nodes of each stage and replica, such as ``["a", "b"]`` or ``["aab"]``."""
    return [
        "".join(sorted({where[Member(p, f, r)] for f in range(layout.shards)}))
        for p in range(layout.stages)
        for r in range(layout.replicas)
    ]


@pytest.mark.parametrize(
    ("layout", "slots", "stages"),
    [
        (mesh(2, 4), (8, 8), ["a", "b"]),  # two nodes where one would do: buddies elsewhere
        (mesh(2, 4), (8,), ["a", "a"]),
        (mesh(4, 2), (4, 4), ["a", "b", "a", "b"]),  # neighbours of the ring apart
        (mesh(4, 2), (2, 2, 2, 2), ["a", "c", "b", "d"]),
        (mesh(4, 1), (3, 1, 1), ["a", "b", "a", "c"]),
        (mesh(3, 2), (4, 4), ["a", "b", "a"]),  # two nodes, an odd ring: one pair has to share
        (mesh(5, 1), (2, 2, 2), ["a", "b", "a", "c", "b"]),
        (mesh(2, 4), (2, 6, 8), ["c", "b"]),  # the largest first, the one that holds no whole stage last
        (mesh(2, 4), (7, 3), ["a", "ab"]),  # one stage fits whole, the other one takes what is left
        (mesh(2, 4), (2, 2, 2, 2), ["ab", "cd"]),
        (mesh(1, 2, 2), (2, 2), ["a", "b"]),  # replicas are each other's copies
        (mesh(2, 2, 2), (4, 4), ["a", "b", "a", "b"]),  # a pipeline on each node
        (mesh(2, 2, 2, zero1=True), (4, 4), ["a", "a", "b", "b"]),  # copies go round the stages
        (mesh(1, 4), (4, 4), ["a"]),  # buddies are of one stage: fast links come first
    ],
    ids=str,
)
def test_stages_are_packed_and_spread(layout: Layout, slots: tuple[int, ...], stages: list[str]) -> None:
    assert of_stages(layout, placed(layout, *slots)) == stages


def test_no_room() -> None:
    assert assign(mesh(2, 2), nodes(1, 2)) is None
    assert assign(mesh(2, 2), []) is None
    assert assign(mesh(2, 2), nodes(2, 2), spares=1) is None
    found = assign(mesh(2, 2), nodes(3, 4), spares=3)
    assert found is not None
    assert Counter(found[1]) == {"b": 2, "a": 1}


def test_successors_go_to_one_node_and_away_from_their_buddies() -> None:
    layout = mesh(3, 2)
    where = placed(layout, 2, 2, 2)
    assert of_stages(layout, where) == ["a", "c", "b"]
    kept = {me: node for me, node in where.items() if node != "b"}
    found = assign(layout, [Node("a", "", 2), Node("c", "", 1), Node("d", "", 2)], kept)
    assert found is not None
    assert of_stages(layout, found[0]) == ["a", "c", "d"]
    assert {me: found[0][me] for me in kept} == kept
    found = assign(layout, [Node("a", "", 2), Node("c", "", 3)], kept)  # next to a buddy rather than not at all
    assert found is not None
    assert of_stages(layout, found[0])[2] in ("a", "c")


MESHES = st.builds(mesh, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans())


@settings(deadline=None, max_examples=200)
@given(layout=MESHES, slots=st.lists(st.integers(0, 9), max_size=6))
def test_all_find_a_place_if_there_is_room_and_as_many_stages_as_can_be_are_whole(layout, slots) -> None:
    found = assign(layout, nodes(*slots))
    if sum(slots) < layout.size:
        assert found is None
        return
    assert found is not None
    where = found[0]
    assert set(where) == set(layout.members())
    used = Counter(where.values())
    assert all(used[node.id] <= node.slots for node in nodes(*slots))
    stages = layout.stages * layout.replicas
    whole = min(stages, sum(count // layout.shards for count in slots))
    assert len(stages_across_nodes(layout, where)) <= stages - whole
    assert assign(layout, nodes(*slots)) == found


@settings(deadline=None, max_examples=200)
@given(layout=MESHES, count=st.integers(2, 6))
def test_no_node_has_a_member_with_its_buddy_where_there_are_nodes_enough(layout, count) -> None:
    """Nodes of one size, as many as needed: with an even ring two are enough, with an odd one three."""
    ring = len(layout.ring(Member(0, 0, 0)))
    inside = layout.stages == 1 and layout.shards > 1 and not layout.mirrored  # a stage alone: packed all the same
    each = -(-layout.stages * layout.replicas // count) * layout.shards
    together = beside_their_buddies(layout, placed(layout, *[each] * count))
    if ring == 1 or (not inside and count >= 2 + ring % 2):
        assert not together
