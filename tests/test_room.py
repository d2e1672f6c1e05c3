"""Room in a cluster of several nodes, on this machine: found, waited for, held where it is chosen, and given back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actors import room as module
from actors.failure import quietly
from actors.room import Bundle, Room, check_room, remove_groups
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError, Stopped, ZeroppError
from zeropp_ray.layout import Layout, Member

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Joined from here: a head without room for members, a node of two CPUs and one of four in the pool "large"."""
    import ray
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    started.add_node(num_cpus=2)
    started.add_node(num_cpus=4, labels={"pool": "large"})
    ray.init(address=started.address, logging_level="ERROR", log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.3)
    monkeypatch.setattr(module, "TICK_S", 0.05)


def config(P: int, F: int, **resources: Any) -> RunConfig:
    parallel = {"stages": P, "shards": F, "chunks": 1}
    return RunConfig.from_dict({"run": {"name": "room"}, "parallel": parallel, "resources": resources})


def room(config: RunConfig, name: str = "room") -> Room:
    """``name``: of the run. Two of one job have different ones."""
    p, config = config.parallel, dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))
    return Room(config, Layout(stages=p.stages, chunks=1, shards=p.shards, replicas=p.replicas))


def cpus_of_bundles() -> dict[str, int]:
    """How many bundles there are on each node, by how many CPUs it has."""
    import ray
    from ray.util.placement_group import placement_group_table

    sizes = {node["NodeID"]: f"{node['Resources'].get('CPU', 0):g}" for node in ray.nodes()}
    count: dict[str, int] = {}
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            assert group["name"].startswith("zeropp-room")
            for node in group["bundles_to_node_id"].values():
                count[sizes.get(node, "nowhere")] = count.get(sizes.get(node, "nowhere"), 0) + 1
    return count


def nodes_of(held: dict[Member, Bundle]) -> list[set[str]]:
    """Of each stage."""
    stages: dict[int, set[str]] = {}
    for me, bundle in held.items():
        stages.setdefault(me.p, set()).add(bundle.node)
    return [stages[p] for p in sorted(stages)]


def test_stages_are_held_where_they_were_assigned_and_given_back(cluster: Any) -> None:
    taken = room(config(2, 2))
    held, (spare,) = quietly(taken.take(spares=1))
    (first,), (second,) = nodes_of(held)
    assert first != second
    assert spare.node == first  # of the large node, which has more left
    assert cpus_of_bundles() == {"4": 3, "2": 2}
    taken.give_up(second)
    assert cpus_of_bundles() == {"4": 3}
    where = {me: bundle.node for me, bundle in held.items() if me.p == 0}
    again, _ = quietly(taken.take(where, avoid=[first]))
    assert set(again) == {Member(1, 0, 0), Member(1, 1, 0)}
    assert nodes_of(again) == [{second}]
    taken.end()
    assert cpus_of_bundles() == {}


def test_labels_confine_members(cluster: Any) -> None:
    taken = room(config(2, 2, labels={"pool": "large"}))
    quietly(taken.take())
    assert cpus_of_bundles() == {"4": 4}
    taken.end()
    with pytest.raises(ConfigError, match=r"cluster has 4 CPUs on nodes with the labels {'pool': 'large'}; lower"):
        check_room(config(3, 2, labels={"pool": "large"}))


def test_what_the_cluster_cannot_hold_is_refused_unless_it_may_grow(cluster: Any, monkeypatch) -> None:
    check_room(config(2, 3))
    with pytest.raises(
        ConfigError, match=r"8 members need 8 CPUs and the cluster has 6 CPUs; lower .* resources\.wait_s"
    ):
        check_room(config(2, 4))
    with pytest.raises(ConfigError, match=r"2 members need 6 CPUs .* has 6 CPUs, on nodes that hold 1 members"):
        check_room(config(2, 1, cpus=3))
    check_room(config(2, 4, wait_s=1))
    monkeypatch.setattr(module, "NODE_GROUP", module.NODE_ID)  # as if nodes were of a group
    check_room(config(2, 4))


def test_room_is_waited_for_and_told(cluster: Any) -> None:
    """Others use it at first; then it is not there until a node comes; then never."""
    first, second = room(config(2, 2)), room(config(2, 2, wait_s=60), "room2")
    quietly(first.take())
    waiting = second.take()
    text = next(waiting)["text"]
    assert text.startswith("waiting for room, for 60 s at most: 4 members of 1 CPU each; free is room for 2 (")
    assert cpus_of_bundles() == {"4": 2, "2": 2, "nowhere": 4}  # those that are asked for
    first.end()
    held, _ = quietly(waiting)
    assert len(held) == 4
    second.end()
    assert cpus_of_bundles() == {}

    third = room(config(3, 3, wait_s=60))
    waiting = third.take()
    assert "9 members of 1 CPU each; free is room for 6 (" in next(waiting)["text"]
    cluster.add_node(num_cpus=3)
    held, _ = quietly(waiting)
    assert sorted(map(len, nodes_of(held))) == [1, 1, 2]  # nodes of 2, 3 and 4
    assert cpus_of_bundles() == {"2": 2, "3": 3, "4": 4}

    late = room(config(1, 2, wait_s=0.6), "room2")
    began = time.monotonic()
    with pytest.raises(
        ZeroppError, match=r"no room within 0\.6 s \(resources\.wait_s\): 2 members .* room for 0 \(no node"
    ):
        quietly(late.take())
    assert time.monotonic() - began < 5
    asked = room(config(1, 2), "room2")
    asked.stopped = lambda: True
    with pytest.raises(Stopped, match="it waited for room"):
        quietly(asked.take())
    remove_groups(config(1, 1))  # as the supervisor does
    assert cpus_of_bundles() == {}
