"""The NCCL path on a fake of NCCL and of CUDA's streams (fake_nccl.py): what is called, in which order and where, and
that members can train over it where sends wait for receives. What a GPU says to it is asked in test_gpu.py.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from actors.members import FREE_S
from tests import harness
from tests.fake_nccl import DTYPES, FakeCuda, FakeNccl
from tests.test_parity import TOLERANCE, configuration, plain, samples_of
from zeropp_ray.comm import gloo, nccl, nccl_forming
from zeropp_ray.comm.base import Links, PeerLost, Waits
from zeropp_ray.comm.gloo import GlooGroup, Rendezvous
from zeropp_ray.comm.nccl import Communicators, NcclGroup, check_version
from zeropp_ray.comm.nccl_forming import form_groups, publish, wanted
from zeropp_ray.errors import ConfigError, MemberError
from zeropp_ray.layout import Layout, Member
from zeropp_ray.member import StageMember
from zeropp_ray.planner.plan import make_plan
from zeropp_ray.vote import decide

CPU = torch.device("cpu")
LIMIT_S = 20.0


class Device:
    """One member's fake device and its communicators."""

    def __init__(self, worlds: dict, limit_s: float = LIMIT_S) -> None:
        self.cuda = FakeCuda()
        self.nccl = FakeNccl(self.cuda, worlds)
        self.waits = Waits()
        self.ours = Communicators(self.nccl, self.waits, limit_s, self.cuda)
        self.log = self.cuda.log


def together(*calls):
    """Each in a thread of its own; their results, or the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def two() -> tuple[list[Device], list[NcclGroup]]:
    """Two members and a group of both; what making it recorded is forgotten."""
    worlds: dict = {}
    devices = [Device(worlds), Device(worlds)]
    unique = devices[0].nccl.get_unique_id()
    groups = together(*(partial(device.ours.add, "stage", rank, 2, unique) for rank, device in enumerate(devices)))
    for device in devices:
        device.log.clear()
    return devices, groups


# -- what is called ---------------------------------------------------------------------------------------------------


def test_a_gather_waits_for_what_is_computed_and_the_computation_for_it(two):
    devices, groups = two
    outs, shards = [torch.zeros(4), torch.zeros(4)], [torch.tensor([1.0, 2]), torch.tensor([3.0, 4])]
    posted = [group.all_gather(out, shard) for group, out, shard in zip(groups, outs, shards, strict=True)]
    code = devices[0].nccl.NCCL_FLOAT32
    launched = [("stream 1", "waits for", "computing"), ("allGather", 2, code, "stream 1"), ("stream 1", "records")]
    assert devices[0].log == devices[1].log == launched
    for transfer in posted:
        transfer.wait()
    assert devices[0].log[3:] == [("computing", "waits for", "event"), ("computing", "records")]
    assert all(out.tolist() == [1, 2, 3, 4] for out in outs)
    posted[0].wait()  # once more is nothing
    assert len(devices[0].log) == 5


def test_a_reduce_is_in_place_and_added_on_its_stream(two):
    devices, groups = two
    fulls, intos = [torch.arange(4.0), torch.arange(4.0) * 10], [torch.full((2,), 100.0), torch.full((2,), 200.0)]

    def reduce(rank: int) -> None:
        groups[rank].reduce_scatter(fulls[rank], intos[rank]).wait()

    together(partial(reduce, 0), partial(reduce, 1))
    assert intos[0].tolist() == [100, 111]
    assert intos[1].tolist() == [222, 233]
    names = [entry[:2] if entry[0] != "reduceScatter" else entry for entry in devices[1].log]
    code = devices[1].nccl.NCCL_FLOAT32
    assert names == [
        ("stream 1", "waits for"),
        ("reduceScatter", 2, code, 0, 8, "stream 1"),  # its own piece begins 8 bytes behind the whole
        ("stream 1", "computes"),
        ("stream 1", "records"),
        ("computing", "waits for"),
        ("computing", "records"),
    ]


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_goes_under_its_name(two, name):
    devices, groups = two
    tensors = [torch.ones(3, dtype=DTYPES[name]), torch.full((3,), 2, dtype=DTYPES[name])]
    together(*(lambda rank=rank: groups[rank].all_reduce(tensors[rank]).wait() for rank in (0, 1)))
    assert all(tensor.tolist() == [3, 3, 3] for tensor in tensors)
    assert devices[0].log[1] == ("allReduce", 3, getattr(devices[0].nccl, name), 0, "stream 1")


def test_what_stages_exchange_is_one_group_call(two):
    devices, groups = two
    outgoing, incoming = [torch.tensor([1.0]), torch.tensor([2.0])], [torch.zeros(1), torch.zeros(1)]

    def exchange(rank: int) -> None:
        for transfer in groups[rank].exchange({1 - rank: incoming[rank]}, {1 - rank: outgoing[rank]}, 7):
            transfer.wait()

    together(partial(exchange, 0), partial(exchange, 1))
    assert [tensor.item() for tensor in incoming] == [2, 1]
    assert [entry[0] for entry in devices[0].log[1:5]] == ["group starts", "recv", "send", "group ends"]


def test_the_host_stays_within_a_few_waits_of_the_device(two):
    devices, groups = two
    tensors = [torch.zeros(1) for _ in range(nccl.AHEAD + 1)]
    held = threading.Event()
    devices[0].cuda.computing.put = lambda work: None if not held.is_set() else work()  # a device that stands still
    devices[0].ours.limit_s = 0.2
    posted = [groups[0].receive(tensor, 1, 0) for tensor in tensors]
    for transfer in posted[:-1]:
        transfer.wait()
    assert devices[0].waits.begun == 0
    with pytest.raises(PeerLost, match=r"not done within 0\.2 s"):
        posted[-1].wait()
    assert (devices[0].waits.begun, devices[0].waits.over) == (1, 1)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_all_are_aborted_together_and_closed_first():
    worlds: dict = {}
    device = Device(worlds)
    groups = [device.ours.add(name, 0, 1, device.nccl.get_unique_id()) for name in ("stage", "edge")]
    device.log.clear()
    seen = []
    starts = device.nccl.groupStart
    device.nccl.groupStart = lambda: (seen.append(device.ours._closed.is_set()), starts())
    groups[0].close()
    groups[1].close()
    assert seen == [True]
    assert device.log == [("group starts",), ("abort", 0), ("abort", 0), ("group ends",)]
    with pytest.raises(PeerLost, match="closed"):
        groups[1].send(torch.zeros(1), 0, 0)
    with pytest.raises(PeerLost, match="closed"):
        device.ours.settle()


def test_one_that_cannot_be_aborted_keeps_no_other_from_it(monkeypatch):
    device = Device({})
    groups = [device.ours.add(name, 0, 1, device.nccl.get_unique_id()) for name in ("stage", "edge")]
    device.log.clear()

    def broken() -> None:
        raise device.nccl.NcclError(1)

    monkeypatch.setattr(groups[0]._communicator, "abort", broken)
    groups[0].close()
    assert device.log == [("group starts",), ("abort", 0), ("group ends",)]


def test_a_member_that_waits_for_a_peer_is_freed_by_its_own_abort(two):
    devices, groups = two
    transfer = groups[0].receive(torch.zeros(1), 1, 0)
    threading.Timer(0.1, devices[0].ours.close).start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="closed"):
        settled(devices[0], transfer)
    assert time.monotonic() - began < 5


def settled(device: Device, transfer) -> None:
    transfer.wait()
    device.ours.settle()


def test_an_asynchronous_error_closes_all(two):
    devices, groups = two
    devices[0].nccl.failed = 7  # in progress
    devices[0].ours.look()
    devices[0].ours.check()
    devices[0].nccl.failed = 6
    devices[0].ours.look()
    assert [entry[0] for entry in devices[0].log] == ["group starts", "abort", "group ends"]
    with pytest.raises(PeerLost, match="transfer failed: NCCL error 6"):
        groups[0].send(torch.zeros(1), 1, 0)


def test_the_watch_finds_an_asynchronous_error(two, monkeypatch):
    devices, _ = two
    monkeypatch.setattr(nccl, "WATCH_S", 0.01)
    devices[0].ours.watch()
    devices[0].nccl.failed = 6
    assert devices[0].ours._closed.wait(5)


@pytest.mark.parametrize(("status", "lost"), [(6, True), (2, True), (4, False), (1, False)])
def test_only_what_peers_and_network_do_is_a_lost_peer(two, status, lost):
    devices, groups = two

    def fail(*arguments) -> None:
        raise devices[0].nccl.NcclError(status)

    groups[0]._communicator.send = fail
    with pytest.raises(RuntimeError) as error:
        groups[0].send(torch.zeros(1), 1, 0)
    assert isinstance(error.value, PeerLost) == lost
    groups[0].receive(torch.zeros(1), 1, 0)  # the lock is free


def test_a_post_during_an_abort_is_a_lost_peer(two):
    devices, groups = two

    def gone(*arguments) -> None:
        devices[0].ours._closed.set()
        raise devices[0].nccl.NcclError(4)  # cupy has no communicator any more

    groups[0]._communicator.send = gone
    with pytest.raises(PeerLost):
        groups[0].send(torch.zeros(1), 1, 0)


# -- what is installed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(22803, 22809))
def test_the_broken_versions_are_refused_by_name(version):
    with pytest.raises(ConfigError, match=rf"NCCL 2\.28\.{version % 100} must not be used"):
        check_version(version, shared=False)


@pytest.mark.parametrize("version", [22707, 22802, 22809, 23203])
def test_others_are_not(version):
    check_version(version, shared=False)


def test_sharing_a_gpu_needs_a_newer_one():
    check_version(23200, shared=True)
    with pytest.raises(ConfigError, match=r"NCCL 2\.31\.2 refuses several members on one GPU"):
        check_version(23102, shared=True)


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ConfigError, match="pip install cupy-cuda12x nvidia-nccl-cu12"):
        nccl.load()


# -- how they are formed ----------------------------------------------------------------------------------------------


LAYOUTS = [
    Layout(stages=4, chunks=2, shards=2, replicas=2),
    Layout(stages=2, chunks=1, shards=1, replicas=1),
    Layout(stages=3, chunks=2, shards=1, replicas=2, placement="v"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_is_a_communicator_for_each_group_and_edge(layout):
    names = [each.name for each in wanted(layout)]
    assert len(names) == len({*names})
    edges = {(each.edge, each.members) for each in wanted(layout) if each.edge}
    expected = set()
    for chunk in range(layout.stages * layout.chunks - 1):
        s, d = layout.stage_of(chunk), layout.stage_of(chunk + 1)
        for f in range(layout.shards):
            for r in range(layout.replicas):
                if s != d:
                    there = Member(s, f, r), Member(d, f, r)
                    expected |= {((s, d, 0), there), ((d, s, 1), there[::-1])}
    assert edges == expected
    kinds = {each.kind for each in wanted(layout)}
    assert ("stage" in kinds, "replicas" in kinds) == (layout.shards > 1, layout.replicas > 1)


def test_one_alone_needs_none():
    assert wanted(Layout(stages=1, chunks=2, shards=1, replicas=1)) == []


def test_neighbours_form_side_by_side():
    """However long the pipeline, a member waits for at most one edge before each of its own."""
    edges = [each.edge[:2] for each in wanted(Layout(stages=8, chunks=1, shards=1, replicas=1)) if each.edge]
    waits: dict[int, int] = {}
    for s, d in edges:
        waits[s] = waits[d] = max(waits.get(s, 0), waits.get(d, 0)) + 1
    assert max(waits.values()) <= 4


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def faked(monkeypatch):
    """``connect`` over fakes: the devices of the members that came, as they come."""
    worlds: dict = {}
    mine = threading.local()
    made = []

    def load():
        mine.device = Device(worlds)
        return mine.device.nccl

    def communicators(library, waits, limit_s):
        device = mine.device
        device.waits, device.ours = waits, Communicators(library, waits, limit_s, device.cuda)
        made.append(device)
        return device.ours

    monkeypatch.setattr(nccl_forming, "load", load)
    monkeypatch.setattr(nccl_forming, "Communicators", communicators)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return made


def connecting(store, layout: Layout, me: Member, form_s: float = LIMIT_S, left: threading.Event | None = None):
    at = Rendezvous("127.0.0.1", store.port, 3, LIMIT_S, form_s, "nccl")
    return partial(nccl_forming.connect, at, layout, me, host="127.0.0.1", device=CPU, left=left)


def test_members_meet_by_the_ids_of_the_driver(store, faked):
    layout = Layout(stages=2, chunks=2, shards=2, replicas=1)
    publish(store, 3, layout)
    links = together(*(connecting(store, layout, me) for me in layout.members()))
    for each, device in zip(links, faked, strict=True):
        assert (each.pipeline.size, each.stage.size, each.replicas.size) == (2, 2, 1)
        assert (type(each.checkpoint), type(each.copies)) == (GlooGroup, GlooGroup)
        made = [entry for entry in device.log if entry[0] == "made"]
        assert len(made) == 6  # stage, pipeline and four edges
        assert max(i for i, entry in enumerate(device.log) if entry in made) == len(made) - 1  # before any is used
        each.settle()
    for each in links:
        each.close()
        with pytest.raises(PeerLost):
            each.settle()


def test_a_member_that_does_not_come_ends_the_forming(store, faked):
    layout = Layout(stages=2, chunks=1, shards=1, replicas=1)
    publish(store, 3, layout)
    with pytest.raises(PeerLost, match="not formed within"):  # over gloo, which comes first
        connecting(store, layout, Member(0, 0, 0), form_s=1.0)()
    at = Rendezvous("127.0.0.1", store.port, 3, LIMIT_S, 0.1, "nccl")
    with pytest.raises(PeerLost, match=r"1 of 2 members came to epoch 3 within 0\.1 s"):
        nccl_forming._arrive(store, at, 2, None)


def test_a_member_that_does_not_come_holds_nobody_who_is_told_to_leave(store, faked, monkeypatch):
    """Within the time in which members must come free of an epoch: who does not loses its state."""
    assert gloo.FORM_S < FREE_S
    layout, left = Layout(stages=2, chunks=1, shards=1, replicas=1), threading.Event()
    publish(store, 3, layout)
    monkeypatch.setattr(gloo, "FORM_S", 0.5)
    with pytest.raises(PeerLost, match=r"not formed within 0\.5 s"):  # over gloo, which is not told
        connecting(store, layout, Member(0, 0, 0))()
    left.set()
    with pytest.raises(PeerLost, match="epoch 3 was given up"):
        nccl_forming._arrive(store, Rendezvous("127.0.0.1", store.port, 3, LIMIT_S, 5.0, "nccl"), 2, left)


def test_a_forming_that_nccl_does_not_come_back_from_is_left(store, faked, monkeypatch):
    layout = Layout(stages=2, chunks=1, shards=1, replicas=1)
    publish(store, 3, layout)
    stands = threading.Event()
    monkeypatch.setattr(FakeNccl, "NcclCommunicator", lambda *arguments: stands.wait())
    left = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(connecting(store, layout, Member(0, 0, 0), form_s=3.0))
        told = pool.submit(connecting(store, layout, Member(1, 0, 0), left=left))
        wait([late, told], timeout=0.5)
        left.set()
        with pytest.raises(PeerLost, match="epoch 3 was given up"):
            told.result(5)
        with pytest.raises(PeerLost, match=r"epoch 3 was not formed within 3 s"):
            late.result(10)
    stands.set()


def test_groups_are_warmed_up_with_little_and_with_much(store, faked):
    layout = Layout(stages=1, chunks=1, shards=2, replicas=1)
    publish(store, 3, layout)
    together(*(connecting(store, layout, me) for me in layout.members()))
    for kind in ("allReduce", "allGather", "reduceScatter"):
        assert [entry[1] for entry in faked[0].log if entry[0] == kind] == [1, 2**19]


def test_a_wrong_answer_is_no_proof(store, monkeypatch):
    layout, worlds = Layout(stages=1, chunks=1, shards=2, replicas=1), {}
    devices = [Device(worlds), Device(worlds)]
    monkeypatch.setattr(nccl_forming, "load", lambda: devices[0].nccl)
    publish(store, 0, layout)
    gather = NcclGroup.all_gather
    monkeypatch.setattr(NcclGroup, "all_gather", lambda self, out, shard: gather(self, out, shard + 1))
    members = layout.members()
    forming = [
        partial(form_groups, device.ours, store, 0, layout, me, CPU)
        for device, me in zip(devices, members, strict=True)
    ]
    with pytest.raises(RuntimeError, match=r"stage-0\.0\.0-0\.1\.0 of epoch 0 failed its proof"):
        together(*forming)


# -- training over it -------------------------------------------------------------------------------------------------


class Run:
    """Members in threads, each on a fake device."""

    def __init__(self, config, store, limit_s: float = LIMIT_S) -> None:
        self.config, samples = config, samples_of(config)
        self.plan = make_plan(config)
        layout = self.plan.layout
        worlds: dict = {}
        self.devices = [Device(worlds, limit_s) for _ in layout.members()]
        for each in wanted(layout):
            store.set(f"epoch0/nccl/{each.name}", self.devices[0].nccl.get_unique_id().hex())
        data = [harness.MemberSamples(samples, config, me.f, me.r) for me in layout.members()]
        self.members = [
            StageMember(config, self.plan, me, d) for me, d in zip(layout.members(), data, strict=True)
        ]  # one after the other: torch has one generator
        groups = together(
            *(
                partial(form_groups, device.ours, store, 0, layout, me, CPU)
                for device, me in zip(self.devices, layout.members(), strict=True)
            )
        )
        alone = GlooGroup(0, 1, None)
        for member, device, (pipeline, stage, replicas) in zip(self.members, self.devices, groups, strict=True):
            device.log.clear()
            member.join(Links(pipeline, stage, replicas, alone, alone, device.waits, device.ours.settle))

    def call(self, method: str, *arguments):
        return together(*(partial(getattr(member, method), *arguments) for member in self.members))

    def train(self) -> harness.Trained:
        last, losses, gradients = None, [], {}
        for step in range(1, self.config.train.steps + 1):
            last = decide(step, self.call("advance", step, last), self.config.train.clip_norm)
            losses.append(last.loss)
            if not gradients:
                gradients = {name: tensor / last.tokens for name, tensor in self._whole("gradients").items()}
        self.call("flush", last)
        return harness.Trained(losses, gradients, self._whole("weights"), 0.0, [], self.plan)

    def _whole(self, what: str) -> dict[str, torch.Tensor]:
        pieces: dict[str, list] = {}
        for member in self.members:
            for name, first, piece in member.named_shards(what):
                pieces.setdefault(name, []).append((first, piece.clone()))
        return {name: torch.cat([piece for _, piece in sorted(found)]) for name, found in pieces.items()}


TIED = configuration(3, 1, 1, N=6, steps=2)
TIED = replace(TIED, model=replace(TIED.model, tie_embeddings=True))
TRAINED = {
    "sharded": configuration(2, 2, 2, steps=3),
    "a ring of stages": configuration(4, 2, 1, N=8, steps=2),
    "a V": configuration(3, 2, 1, N=6, steps=2, policy="zb-v"),
    "replicas": configuration(2, 1, 1, 2, steps=3, zero1=True),
    "bfloat16": configuration(2, 2, 2, steps=2, dtype="bfloat16"),
    "what stages share": TIED,
}


@pytest.mark.parametrize("name", TRAINED)
def test_members_train_as_the_plain_loop_does(name, store):
    config = TRAINED[name]
    trained, expected = Run(config, store).train(), plain(config, samples_of(config))
    tolerance = TOLERANCE[config.train.dtype]
    assert trained.losses == pytest.approx(expected.losses, rel=tolerance)
    for parameter, gradient in expected.gradients.items():
        difference = (trained.gradients[parameter] - gradient.flatten()).norm() / gradient.norm()
        assert difference <= tolerance, parameter


def test_one_communicator_for_all_edges_would_stand(store, monkeypatch):
    """That the fake has the semantics that can deadlock: sends behind receives that are posted ahead, in one stream."""
    config = configuration(2, 2, 1, N=4, steps=1)
    run = Run(config, store, limit_s=2.0)
    for member in run.members:
        pipeline = member._links.pipeline
        pipeline._edges = {edge: _Shared(pipeline._all, edge, pipeline.rank) for edge in pipeline._edges}
    threading.Timer(3.0, lambda: [device.ours.close() for device in run.devices]).start()
    with pytest.raises(MemberError, match=r"closed|not done within"):
        run.call("advance", 1, None)


class _Shared:
    """An edge over the communicator of all."""

    def __init__(self, all: NcclGroup, edge: tuple[int, int, int], rank: int) -> None:
        self._all, self._peer = all, edge[1] if edge[0] == rank else edge[0]

    def send(self, tensor, peer, tag):
        return self._all.send(tensor, self._peer, tag)

    def receive(self, tensor, peer, tag):
        return self._all.receive(tensor, self._peer, tag)


def test_every_member_posts_in_the_order_of_its_program(store):
    run = Run(configuration(2, 2, 2, steps=1), store)
    run.call("advance", 1, None)
    names = {"GATHER": "allGather", "REDUCE": "reduceScatter", "SEND": "send", "RECV": "recv"}
    for member, device in zip(run.members, run.devices, strict=True):
        launched = [entry[0] for entry in device.log if entry[0] in names.values()]
        program = run.plan.program.ranks[member.me.p]
        assert launched == [names[action.op.name] for action in program if action.op.name in names]
