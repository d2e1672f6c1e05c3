"""Which device a member computes on, what goes between it and the host, and what it says when memory runs out.

The parts for a GPU run here on what stands in for it; on a GPU see test_gpu.py.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.test_parity import configuration, samples_of
from zeropp_ray import member
from zeropp_ray.comm.base import Group, Links
from zeropp_ray.comm.gloo import Former, GlooGroup, Rendezvous
from zeropp_ray.comm.staged import StagedGroup
from zeropp_ray.config import ResourcesSection, TrainSection, overridden
from zeropp_ray.device import Aside, in_range, label, pick, prepare, upload
from zeropp_ray.errors import ConfigError, MemberError
from zeropp_ray.layout import Member
from zeropp_ray.member import StageMember
from zeropp_ray.metrics.out_of_memory import is_out_of_memory
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.schedule import Action, Op

CPU = torch.device("cpu")


# -- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "cuda", "gpus", "expected"),
    [
        ({}, "12.8", 4, ("cuda", "nccl")),
        ({}, "12.8", 3, ("cpu", "gloo")),  # too few
        ({}, None, 4, ("cpu", "gloo")),  # torch cannot use them
        ({"gpus": 0.25}, "12.8", 1, ("cuda", "nccl")),
        ({"device": "cuda"}, None, 0, ("cuda", "nccl")),  # asked for, so what is missing is said
        ({"device": "cuda", "transport": "gloo"}, "12.8", 4, ("cuda", "gloo")),
        ({"device": "cpu"}, "12.8", 4, ("cpu", "gloo")),
    ],
)
def test_auto_is_resolved_by_what_is_there(given, cuda, gpus, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = ResourcesSection(**given).on(4, gpus)
    assert (found.device, found.transport) == expected


def test_what_cannot_be_is_refused_when_it_is_read():
    for setting, text in {
        "resources.device=gpu": r"resources\.device = 'gpu': unknown",
        "resources.gpus=2": r"resources\.gpus = 2\.0: a member has one GPU",
        "resources.transport=mpi": r"resources\.transport = 'mpi': unknown",
    }.items():
        with pytest.raises(ConfigError, match=text):
            overridden({}, [setting])
    for setting in ("resources.transport=nccl", "resources.nvtx=true"):
        with pytest.raises(ConfigError, match="GPUs"):
            overridden({}, ["resources.device=cpu", setting])


def test_a_gpu_that_is_not_there_is_said_to_be_missing(monkeypatch):
    resources = ResourcesSection(device="cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="is built without CUDA"):
        pick(resources)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"no GPU can be used here \(CUDA_VISIBLE_DEVICES = '3'\)"):
        pick(resources)


def test_the_device_is_the_one_that_ray_gave(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert pick(ResourcesSection(device="cuda")) == torch.device("cuda", 0)
    assert chosen == [0]
    assert pick(ResourcesSection(device="cpu")) == CPU
    assert label(CPU) == ""


def test_cuda_and_nccl_are_told_what_they_read_from_the_environment_alone(monkeypatch):
    for name in ("NCCL_MAX_P2P_NCHANNELS", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG")
    for name in ("NCCL_PROTO", *names):
        monkeypatch.setenv(name, "")
    told = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    prepare(ResourcesSection(device="cpu"), TrainSection(deterministic=True))
    assert [os.environ[name] for name in names] == ["", "", "", ""]
    prepare(ResourcesSection(device="cuda"), TrainSection())
    assert [os.environ[name] for name in names] == ["32", "", "", ""]
    prepare(ResourcesSection(device="cuda", gpus=0.5), TrainSection(deterministic=True))
    assert [os.environ[name] for name in names] == ["32", "1", "Ring", ":4096:8"]
    assert (os.environ["NCCL_MAX_P2P_NCHANNELS"], os.environ["CUDA_MODULE_LOADING"]) == ("4", "EAGER")
    assert told == [True]


def test_a_launch_that_blocks_is_refused_where_receives_are_posted_ahead(monkeypatch):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "NCCL_MAX_P2P_NCHANNELS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ConfigError, match=r"CUDA_LAUNCH_BLOCKING = '1': .*unset it, or use resources\.transport=gloo"):
        prepare(ResourcesSection(device="cuda", transport="nccl"), TrainSection())
    prepare(ResourcesSection(device="cuda", transport="gloo"), TrainSection())


# -- between it and the host ------------------------------------------------------------------------------------------


def test_on_the_cpu_nothing_is_copied_but_what_is_asked_for():
    tensor, aside = torch.arange(3.0), Aside(CPU)
    assert upload(tensor, CPU) is tensor
    with aside.copying():
        copy = aside.clone(tensor)
    aside.hold()
    aside.finish()
    tensor.zero_()
    assert copy.tolist() == [0, 1, 2]


class Recorder:
    """In the place of ``torch.cuda``: records what is called."""

    def __init__(self, log: list[str], name: str = "computing") -> None:
        self.log, self.name = log, name

    def Stream(self, device):
        return Recorder(self.log, "copies")

    def current_stream(self):
        return Recorder(self.log)

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for an event of {event.name}")

    def record_event(self):
        self.log.append(f"{self.name} records")
        return self

    def synchronize(self):
        self.log.append(f"the host waits for {self.name}")

    def stream(self, stream):
        self.log.append(f"on {stream.name}:")
        return partial(_nothing)()


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_on_a_gpu_copies_go_beside_the_computation_and_updates_wait_for_them(monkeypatch):
    log: list[str] = []
    recorder = Recorder(log)
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(recorder, name))
    aside = Aside(torch.device("cuda"))
    aside.hold()
    aside.finish()
    assert log == []  # nothing was begun
    with aside.copying():
        log.append("copy")
    aside.hold()
    aside.finish()
    assert log == [
        "copies waits for computing",
        "on copies:",
        "copy",
        "copies records",
        "computing waits for an event of copies",
        "the host waits for copies",
    ]


def test_an_update_waits_for_the_copy_of_what_it_changes(monkeypatch):
    order: list[str] = []
    config = configuration(steps=1)
    with harness.members(config, samples_of(config)) as run:
        member = run.pipes[0][1]._member
        monkeypatch.setattr(member._copies._aside, "hold", lambda: order.append("hold"))
        update = member._optimizer.update
        monkeypatch.setattr(member._optimizer, "update", lambda *given: (order.append("update"), update(*given)))
        vote = member.advance(1, None, copy=True)
        member.flush(harness.decide(1, [vote], 1.0))
    assert order == ["hold", "update"]


@pytest.fixture
def three() -> list[GlooGroup]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at = Rendezvous("127.0.0.1", store.port, 0, 20.0)
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: Former(at, at.store(), "127.0.0.1")("three", rank, 3), range(3)))


def moved(groups: list[Group]) -> list[torch.Tensor]:
    """What each of the operations leaves at all members."""

    def run(group: Group) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(group.rank)
        shard, full, total = (torch.randn(n, generator=random) for n in (4, 12, 5))
        out, into, came = torch.zeros(12), torch.randn(4, generator=random), torch.zeros(4)
        gathering, reducing = group.all_gather(out, shard), group.reduce_scatter(full, into)
        into.add_(1.0)  # what is there when it is waited for is added to
        for transfer in (gathering, reducing, group.all_reduce(total)):
            transfer.wait()
        receiving = group.receive(came, (group.rank - 1) % 3, 2)
        group.send(shard, (group.rank + 1) % 3, 2).wait()
        receiving.wait()
        receiving.wait()
        return [out, into, total, came]

    with ThreadPoolExecutor(3) as pool:
        return [tensor for tensors in pool.map(run, groups) for tensor in tensors]


def test_over_the_host_a_gpu_has_the_bytes_of_the_cpu(three):
    plain, staged = moved(three), moved([StagedGroup(group) for group in three])
    assert all(torch.equal(a, b) for a, b in zip(plain, staged, strict=True))
    for group in three:
        group.close()


def test_ranges_are_named_after_instructions_and_closed_after_errors(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))

    def do(action: Action) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        in_range(do)(Action(Op.F, 1, 3))
    assert log == ["1F3", "pop"]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_out_of_memory_says_what_was_planned_what_was_real_and_what_to_change():
    config = configuration(V=2, steps=1)
    with harness.members(config, samples_of(config)) as run:

        def refuse(x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

        run.pipes[0][1]._member._owned.model.blocks[1].forward = refuse
        with pytest.raises(MemberError) as error:
            run.call("advance", 1, None)
    text = str(error.value)
    assert text.startswith("stage 0 shard 0 replica 0 failed in 1F0 (instruction ")
    assert "): out of memory. The plan gives this member " in text
    assert " at its fullest (" in text
    assert ", its process has had " in text
    assert (
        text.endswith(
            " in memory at most; lower parallel.microbatch_size = 2, set parallel.recompute=full, set "
            "train.dtype=bfloat16, or raise parallel.shards = 1 or parallel.stages = 1"
        )
    )  # fmt: skip
    assert "\n" not in text
    assert "Tried to allocate" in error.value.trace
    assert not error.value.peer_lost


def test_so_it_does_when_the_tensors_are_made(monkeypatch):
    config = configuration(steps=1)

    def refuse(*given, **named) -> None:
        raise RuntimeError("CUDA error: out of memory")  # as of pinned memory

    monkeypatch.setattr(Aside, "empty", refuse)
    with pytest.raises(MemberError) as error, harness.members(config, samples_of(config)):
        pass
    assert "0 replica 0 failed in the making of its tensors: out of memory. The plan gives" in str(error.value)
    assert "CUDA error" in error.value.trace


def test_a_member_that_was_made_in_part_says_why_when_it_is_to_join_again(monkeypatch):
    config = configuration(V=2, steps=1)
    one = StageMember(
        config, make_plan(config), Member(0, 0, 0), harness.MemberSamples(samples_of(config), config, 0, 0)
    )
    alone, make, made = GlooGroup(0, 1, None), member.FlatParameters, itertools.count()

    def refuse_once(*given, **named) -> member.FlatParameters:
        if next(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return make(*given, **named)

    monkeypatch.setattr(member, "FlatParameters", refuse_once)
    for _ in range(2):
        with pytest.raises(MemberError, match="failed in the making of its tensors: out of memory"):
            one.join(Links(alone, alone, alone, alone, alone))


def test_other_errors_are_not_taken_for_it():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(None)


def test_resources_of_a_run_on_the_cpu_are_what_they_were():
    assert replace(ResourcesSection(), device="cpu", transport="gloo") == ResourcesSection().on(4, 0)
