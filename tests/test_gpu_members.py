"""The driver's side of GPUs: what members ask for, what it refuses and tells them. Without one, and without Ray."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from actors import members, room, stage_group
from actors.members import Members
from actors.room import Bundle, check_room, needs, on_devices
from actors.stage_group import MemberHandle, start_worker
from actors.worker import Identity
from tests.fake_nccl import FakeCuda, FakeNccl
from zeropp_ray.comm import nccl_forming
from zeropp_ray.config import RunConfig, overridden
from zeropp_ray.errors import ConfigError
from zeropp_ray.layout import Member
from zeropp_ray.planner.plan import make_plan


@pytest.fixture
def gpus(monkeypatch):
    """A cluster of two nodes with so many GPUs each, and a torch that can use them."""

    def set_to(each: float) -> None:
        nodes = [
            {"NodeID": name, "NodeManagerAddress": name, "Resources": {"CPU": 8, "GPU": each}, "Labels": {}}
            for name in ("a", "b")
        ]
        monkeypatch.setattr(room, "usable_nodes", lambda config: nodes)
        monkeypatch.setattr(room, "_scales", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", "12.8")

    return set_to


def on(*settings: str) -> RunConfig:
    """A run of 2 x 2 members."""
    return overridden({}, [f"resources.{setting}" for setting in settings])


def test_a_run_takes_gpus_where_there_is_one_for_each_member(gpus):
    gpus(2)
    found = on_devices(on()).resources
    assert (found.device, found.transport) == ("cuda", "nccl")
    assert needs(on_devices(on())) == {"CPU": 1.0, "GPU": 1.0}
    gpus(1)
    assert needs(on_devices(on())) == {"CPU": 1.0}
    assert needs(on_devices(on("gpus=0.5"))) == {"CPU": 1.0, "GPU": 0.5}


def test_gpus_that_lack_are_told_with_the_numbers(gpus):
    gpus(2)
    check_room(on("device=cuda"))
    gpus(1)
    with pytest.raises(ConfigError, match=r"resources\.gpus = 1: 4 members need 4 CPUs and 4 GPUs and the cluster has"):
        check_room(on("device=cuda"))
    check_room(on("device=cuda", "gpus=0.5"))


def test_a_member_asks_ray_for_its_gpu(monkeypatch):
    asked = {}

    class Worker:
        @staticmethod
        def options(**options):
            asked.update(options)
            return Worker

        @staticmethod
        def remote():
            return "actor"

    monkeypatch.setattr(stage_group, "StageWorker", Worker)
    assert start_worker(Bundle(None, 3, "a"), {"CPU": 2.0, "GPU": 0.25}) == "actor"
    assert (asked["num_cpus"], asked["num_gpus"]) == (2.0, 0.25)
    start_worker(Bundle(None, 3, "a"), {"CPU": 1.0})
    assert asked["num_gpus"] == 0


def held(config: RunConfig, devices: list[str]) -> Members:
    """Members that are built, and compute on ``devices``."""
    found = object.__new__(Members)
    found._config, found._plan, found.epoch = config, make_plan(config), -1
    found.all = [
        MemberHandle(Member(0, f, 0), None, identity=Identity(1, 2, "host", "node", "127.0.0.1", device))
        for f, device in enumerate(devices)
    ]
    return found


def test_two_members_on_one_gpu_are_refused_unless_they_were_told_to_share():
    config = on("device=cuda", "transport=nccl")
    with pytest.raises(ConfigError, match=r"stage 0 shard 0 .* and stage 0 shard 2 .* both compute on H200 GPU-1: "):
        held(config, ["H200 GPU-1", "H200 GPU-2", "H200 GPU-1"])._check_devices()
    held(config, ["H200 GPU-1", "H200 GPU-2"])._check_devices()
    held(config, ["", ""])._check_devices()
    shared = replace(config, resources=replace(config.resources, gpus=0.5))
    held(shared, ["H200 GPU-1", "H200 GPU-1"])._check_devices()


def test_each_is_told_with_its_uuid():
    (first, _) = held(on("device=cuda"), ["H200 GPU-1", "H200 GPU-2"])._devices(
        held(on("device=cuda"), ["H200 GPU-1", "H200 GPU-2"]).all
    )
    assert first["text"] == "stage 0 shard 0 replica 0 (process 1 on host) computes on H200 GPU-1"


def test_the_driver_puts_ids_for_an_epoch_in_its_store(monkeypatch):
    config = on("device=cuda", "transport=nccl", "interface=lo")
    run, called = held(config, []), []
    monkeypatch.setattr(nccl_forming, "load", lambda: FakeNccl(FakeCuda(), {}))
    monkeypatch.setattr(members.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    run.call = lambda method, *arguments, **_: called.append((method, *arguments))
    run.join()
    ((method, at, layout),) = called
    assert (method, at.transport, at.epoch, at.form_s) == ("join", "nccl", 0, nccl_forming.FORM_S)
    assert members.os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    store = dist.TCPStore(at.host, at.port, is_master=False, timeout=timedelta(seconds=5))
    for each in nccl_forming.wanted(layout):
        assert len(bytes.fromhex(store.get(f"epoch0/nccl/{each.name}").decode())) == 128
