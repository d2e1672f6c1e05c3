"""How the NCCL communicators of an epoch come to be: which there are, in which order, proven and warmed up.

The driver makes a unique id for each and puts it in the store of the epoch (:func:`publish`); it needs NCCL for that,
and no GPU. Members make their communicators one after the other in an order that is the same for all: the first in it
that is not made yet has all its members waiting, so none waits for ever. (In several threads at once, memory that one
frees on the device waits for the kernels of another.) All are warmed up likewise: what NCCL connects at the first use
of an algorithm or of a pair of peers is connected before the first step, in which it would hold the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import distributed as dist

from zeropp_ray.comm import gloo
from zeropp_ray.comm.base import Group, Links, PeerLost, Waits
from zeropp_ray.comm.gloo import Former, GlooGroup, Rendezvous
from zeropp_ray.comm.nccl import Communicators, Edge, NcclGroup, NcclPipeline, load
from zeropp_ray.layout import Layout, Member

FORM_S = 60.0  # for all of an epoch; the first communicator of a process alone takes seconds
LOOK_S = 0.05  # between looks whether the forming is over, or to be given up
WARM = (1, 2**20)  # elements of all members in what a group is warmed up with: NCCL chooses its algorithm by size


class Wanted(NamedTuple):
    """A communicator: its members in rank order, and which edge of their pipeline it is, if it is one."""

    kind: str  # stage, replicas, pipeline or edge
    members: tuple[Member, ...]
    edge: Edge | None = None

    @property
    def name(self) -> str:
        which = "" if self.edge is None else "-back" if self.edge[2] else "-forward"
        return f"{self.kind}{which}-" + "-".join("{}.{}.{}".format(*self.members[i]) for i in (0, -1))


def wanted(layout: Layout) -> list[Wanted]:
    """All communicators of an epoch, in the order in which they are made. Of one member alone there is none."""
    P, F, R = range(layout.stages), range(layout.shards), range(layout.replicas)
    found = [Wanted("stage", tuple(Member(p, f, r) for f in F)) for p in P for r in R]
    found += [Wanted("replicas", tuple(Member(p, f, r) for r in R)) for p in P for f in F]
    found += [Wanted("pipeline", tuple(Member(p, f, r) for p in P)) for f in F for r in R]
    crossed = [(layout.stage_of(c), layout.stage_of(c + 1)) for c in range(layout.stages * layout.chunks - 1)]
    edges = {(s, d, 0) for s, d in crossed} | {(d, s, 1) for s, d in crossed}
    # Edges of even sources first: neighbours that are not each other's peers are then made side by side.
    for s, d, back in sorted(edges, key=lambda edge: (edge[2], edge[0] % 2, edge)):
        if s != d:
            found += [Wanted("edge", (Member(s, f, r), Member(d, f, r)), (s, d, back)) for f in F for r in R]
    return [each for each in found if len(each.members) > 1]


def _key(at_epoch: int, name: str) -> str:
    return f"epoch{at_epoch}/nccl/{name}"


def publish(store: dist.Store, epoch: int, layout: Layout) -> None:
    """The driver's part: an id for each communicator. Raises ConfigError if NCCL is not installed."""
    nccl = load()
    for each in wanted(layout):
        store.set(_key(epoch, each.name), nccl.get_unique_id().hex())


def connect(
    at: Rendezvous, layout: Layout, me: Member, *, host: str, device: torch.device, left: threading.Event | None = None
) -> Links:
    """Form this member's groups: those of training over NCCL, the others over gloo.

    Every member of the epoch calls this once. ``left``: set by who does not want it any more. Raises PeerLost when the
    driver or a peer does not come within ``form_s``, RuntimeError when a proof fails, ConfigError without NCCL.
    """
    nccl, store, waits = load(), at.store(), Waits()
    # gloo looks for no abort, so it must end sooner than members that an abort does not free are given up.
    background = replace(at, form_s=min(at.form_s, gloo.FORM_S))
    checkpoint, copies = Former(background, store, host).background(layout, me)
    ours = Communicators(nccl, waits, at.form_s)
    _arrive(store, at, layout.size, left)

    def form() -> tuple[Group, Group, Group]:
        torch.cuda.set_device(device)
        return form_groups(ours, store, at.epoch, layout, me, device)

    pipeline, stage, replicas = _in_time(form, ours, at, left)
    ours.limit_s = at.timeout_s
    ours.watch()
    return Links(pipeline, stage, replicas, checkpoint, copies, waits, ours.settle)


def _arrive(store: dist.Store, at: Rendezvous, size: int, left: threading.Event | None) -> None:
    """Wait for all members: making a communicator waits for its own without a limit."""
    key, end = _key(at.epoch, "arrived"), time.monotonic() + at.form_s
    arrived = store.add(key, 1)
    while arrived < size:
        if left is not None and left.is_set():
            raise PeerLost(f"epoch {at.epoch} was given up")
        if time.monotonic() > end:
            raise PeerLost(f"{arrived} of {size} members came to epoch {at.epoch} within {at.form_s:g} s")
        time.sleep(LOOK_S)
        arrived = store.add(key, 0)


def _in_time(
    form: Callable[[], tuple[Group, Group, Group]], ours: Communicators, at: Rendezvous, left: threading.Event | None
) -> tuple[Group, Group, Group]:
    """What ``form`` gives, in a thread that is left behind if it takes too long: nothing ends a call that NCCL is in,
    but what it gives late is aborted at once.
    """
    formed: list[tuple[Group, Group, Group]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            formed.append(form())
        except BaseException as error:
            failed.append(error)

    thread, end = threading.Thread(target=run, name="nccl forming", daemon=True), time.monotonic() + at.form_s
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        gone = left is not None and left.is_set()
        if thread.is_alive() and (gone or time.monotonic() > end):
            ours.close()
            why = "was given up" if gone else f"was not formed within {at.form_s:g} s"
            raise PeerLost(f"epoch {at.epoch} {why}")
    if failed:
        ours.close()
        raise failed[0]
    return formed[0]


def form_groups(
    ours: Communicators, store: dist.Store, epoch: int, layout: Layout, me: Member, device: torch.device
) -> tuple[Group, Group, Group]:
    """Make, prove and warm up the communicators of ``me``: pipeline, stage and replicas."""
    mine = [each for each in wanted(layout) if me in each.members]
    made: list[tuple[Wanted, NcclGroup]] = []
    for each in mine:
        unique_id = bytes.fromhex(store.get(_key(epoch, each.name)).decode())
        made.append((each, ours.add(each.name, each.members.index(me), len(each.members), unique_id)))
    for each, group in made:
        try:
            if each.edge:
                proven = _edge_is_proven(group, device, ours)
            else:
                proven = all(_group_is_proven(group, device, ours, max(1, numel // group.size)) for numel in WARM)
        except PeerLost as error:
            raise PeerLost(f"{each.name} of epoch {epoch} was not formed: {error}") from error
        if not proven:
            raise RuntimeError(f"{each.name} of epoch {epoch} failed its proof")
    groups: dict[str, Group] = {each.kind: group for each, group in made if each.edge is None}
    if "pipeline" in groups:
        edges = {each.edge: group for each, group in made if each.edge is not None}
        groups["pipeline"] = NcclPipeline(groups["pipeline"], edges)  # type: ignore[arg-type]
    alone = GlooGroup(0, 1, None)  # moves nothing, wherever its tensors are
    return groups.get("pipeline", alone), groups.get("stage", alone), groups.get("replicas", alone)


def _group_is_proven(group: NcclGroup, device: torch.device, ours: Communicators, numel: int) -> bool:
    """Sums, gathers and exchanges of known answers, between all, with ``numel`` elements of each."""
    size, rank = group.size, group.rank
    mine = torch.full((numel,), rank + 1.0, device=device)
    total, gathered, share = mine.clone(), mine.new_zeros(size * numel), torch.zeros_like(mine)
    group.all_reduce(total).wait()
    group.all_gather(gathered, mine).wait()
    group.reduce_scatter(gathered.clone(), share).wait()
    peers = [peer for peer in range(size) if peer != rank]
    incoming = {peer: torch.zeros_like(mine) for peer in peers}
    for transfer in group.exchange(incoming, dict.fromkeys(peers, mine), 0):
        transfer.wait()
    ours.settle()
    expected = [float(peer + 1) for peer in range(size)]
    return (
        _is_all(total, sum(expected))
        and all(_is_all(part, value) for part, value in zip(gathered.split(numel), expected, strict=True))
        and _is_all(share, size * (rank + 1))
        and all(_is_all(tensor, peer + 1) for peer, tensor in incoming.items())
    )


def _is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def _edge_is_proven(group: NcclGroup, device: torch.device, ours: Communicators) -> bool:
    tensor = torch.full((1,), float(group.rank), device=device)
    (group.send(tensor, 1, 0) if group.rank == 0 else group.receive(tensor, 0, 0)).wait()
    ours.settle()
    return tensor.item() == 0
