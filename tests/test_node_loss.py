"""A whole node is lost: raylet and workers at once. Several Ray nodes on this machine stand for machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_recovery import Runs

pytestmark = [pytest.mark.ray, pytest.mark.full]

SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """On a cluster of a head without room for members, and three nodes for two members each: one is not needed."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SOON}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    yield Runs(cluster.address, tmp_path)
    cluster.shutdown()


def test_a_lost_node_is_replaced_by_another(runs: Runs) -> None:
    hurt = runs.check((2, 1, 2, 1), "node stage=1 step=8", recovery={"hang_s": 5.0, "suspect_s": 3.0})
    before, after = [event for event in hurt.events if event["kind"] == "placement"]
    for placement in (before, after):  # a stage on each of two nodes, so that buddies are elsewhere
        assert [sorted(p for p, _, _ in node["members"]) for node in placement["nodes"]] == [[0, 0], [1, 1]]
        assert placement["stages_across_nodes"] == placement["beside_their_buddies"] == 0
    at_first, then = ([node["node_id"] for node in placement["nodes"]] for placement in (before, after))
    assert at_first[0] == then[0]
    assert then[1] not in at_first  # the third one
    (recovery,) = hurt.recoveries
    assert recovery["source"] == "copies"
    assert recovery["member"].count("stage 1 ") == 2
    assert "stage 0" not in recovery["member"]
