"""The members of a run: placed, started, joined in epochs, called together, replaced, ended."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import ray

from actors.assignment import beside_their_buddies, stages_across_nodes
from actors.events import append_event
from actors.failure import TICK_S, Programs, Watch, quietly
from actors.folder import RunFolder
from actors.nodes import ANSWER_S, Nodes
from actors.room import Bundle, Room, needs
from actors.stage_group import MemberHandle, StageGroup, start_worker
from actors.worker import Orders
from zeropp_ray.comm.interface import AUTO, LOOPBACK, choose
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.layout import Member

Event = dict[str, Any]

WARM_S = 5.0  # how long a spare that still starts is waited for
STUCK_S = 3.0  # how long a member may still wait for a transfer after all have left the epoch
FREE_S = 20.0  # how long members may take to come free of an epoch: longer than to form one
START_S = 120.0  # how long members may take to start and to build
NONE = Orders()


class Members:
    """All members of a run, in (p, f, r) order, and spares that wait for the place of a lost one."""

    def __init__(self, config: RunConfig, plan: Any, folder: RunFolder, data: dict[str, Any]) -> None:
        """``config``: with its device and transport known."""
        self._config, self._plan, self._folder, self._data = config, plan, folder, data
        self._nodes = Nodes()
        self.all: list[MemberHandle] = []
        self.watch = Watch(config, self.all, self._nodes, folder)
        self.epoch = -1
        self._stages: list[StageGroup] = []
        self._spares: list[tuple[Any, Any, Bundle]] = []  # actor, the reference of its identity once it is warm, place
        self._store: Any = None  # the rendezvous of the epoch at hand
        self._room = Room(config, plan.layout)
        self._room.stopped = folder.stop.exists
        self._spare_bundles: list[Bundle] = []  # of spares that are not started yet
        self._evaluating = False
        self._unbuilt: set[Member] = set()  # successors that are not yet what they shall be

    def of(self, me: Member) -> MemberHandle:
        return next(member for member in self.all if member.me == me)

    def nodes(self) -> dict[str, str]:
        """The nodes they are on, host by Ray's id."""
        return {member.identity.node_id: member.identity.host for member in self.all if member.identity}

    @property
    def on_gpus(self) -> bool:
        """Whether members compute on GPUs."""
        return self._config.resources.device == "cuda"

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self) -> Generator[Event, None, None]:
        """Find room for all, start them and build them. Yields what is waited for, and where they are.

        Raises ZeroppError if there is no room.
        """
        held, self._spare_bundles = yield from self._room.take(spares=self._config.recovery.spares)
        layout = self._plan.layout
        by_stage: dict[int, list[tuple[Member, Bundle]]] = {p: [] for p in range(layout.stages)}
        for me in layout.members():
            by_stage[me.p].append((me, held[me]))
        self._stages = [StageGroup(p, members, needs(self._config)) for p, members in by_stage.items()]
        self.all += [member for stage in self._stages for member in stage.members]
        interface = self._config.resources.interface
        for member, identity in zip(self.all, self.call("identify", interface, timeout_s=START_S), strict=True):
            member.identity = identity
        self._nodes.watch(set(self.nodes()))
        self._write()
        yield self._placement()
        self.build(self.all)
        yield from self._devices(self.all)

    def start_spares(self) -> None:
        """Once the run has begun, so that it does not wait for them."""
        for bundle in self._spare_bundles:
            self._spare(bundle)

    def _placement(self) -> Event:
        """Where the members are and listen, and what crosses nodes; told to the run's events too."""
        layout, where, hosts = self._plan.layout, self._where(), self.nodes()
        nodes = []
        for node, host in hosts.items():
            here = [member for member in self.all if member.identity and member.identity.node_id == node]
            members = [list(member.me) for member in here]
            nodes.append({"host": host, "node_id": node, "address": self._address(here[0]), "members": members})
        event = {
            "kind": "placement",
            "nodes": nodes,
            "stages_across_nodes": len(stages_across_nodes(layout, where)),
            "beside_their_buddies": len(beside_their_buddies(layout, where)),
        }
        append_event(self._folder.path, event)
        return event

    def _where(self, but: Sequence[MemberHandle] = ()) -> dict[Member, str]:
        """The node of each member, ``but`` of some."""
        return {member.me: member.bundle.node for member in self.all if member not in but and member.bundle}

    def _address(self, of: MemberHandle | None = None) -> str:
        """Where a member listens in the next epoch, or this process: a run on one machine has no need of a network."""
        setting, here = self._config.resources.interface, ray.util.get_node_ip_address()
        if setting == AUTO and {here, *self.nodes().values()} == {here}:
            return LOOPBACK
        return of.identity.address if of is not None and of.identity is not None else choose(setting, here).address

    def build(self, members: Sequence[MemberHandle]) -> None:
        """Make ``members`` what they are, with the weights of the start, and write down who and where they are."""
        config = self._config.to_dict()
        devices = self.await_all(
            [m.actor.build.remote(m.me, config, self._plan, self._folder, self._data) for m in members], members
        )
        for member, device in zip(members, devices, strict=True):
            assert member.identity is not None
            member.identity = replace(member.identity, device=device)
        self._write()
        self._check_devices()

    def _check_devices(self) -> None:
        """Two members on one GPU is for who asked for it: NCCL would refuse it later, and both would be slow."""
        if self._config.resources.gpus < 1:
            return
        by_device: dict[str, MemberHandle] = {}
        for member in self.all:
            device = member.identity.device if member.identity else ""
            if device and by_device.setdefault(device, member) is not member:
                raise ConfigError(
                    f"{by_device[device]} and {member} both compute on {device}: give Ray each GPU once, or set "
                    "resources.gpus below 1 to share one on purpose"
                )

    def _devices(self, members: Sequence[MemberHandle]) -> Iterator[Event]:
        """On which GPUs members compute."""
        for member in members:
            if member.identity is not None and member.identity.device:
                yield {"kind": "log", "text": f"{member} computes on {member.identity.device}"}

    def join(self, faults: Mapping[Member, Any] | None = None) -> None:
        """Form a new epoch around a rendezvous store of its own."""
        from zeropp_ray.comm.gloo import Rendezvous, serve

        self.epoch += 1
        timeout_s = self._config.resources.step_timeout_s
        host = self._address()
        self._store = serve(host)
        at = Rendezvous(host=host, port=self._store.port, epoch=self.epoch, timeout_s=timeout_s)
        if self._config.resources.transport == "nccl":
            from zeropp_ray.comm.nccl_forming import FORM_S, publish

            at = replace(at, transport="nccl", form_s=FORM_S)
            name = choose(self._config.resources.interface, ray.util.get_node_ip_address()).name
            if name:  # NCCL's part of the rendezvous listens in this process
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            publish(self._store, self.epoch, self._plan.layout)
        orders = {me: Orders(fault=fault) for me, fault in (faults or {}).items()}
        self.call("join", at, self._plan.layout, timeout_s=timeout_s, orders=orders)

    def end(self) -> None:
        """Leave nothing: actors, their processes, placement group, scratch files, store."""
        for stage in self._stages:
            stage.kill()
        for actor, _, _ in self._spares:
            ray.kill(actor, no_restart=True)
        by_node: dict[str, list[tuple[int, int]]] = {}
        for identity in [member.identity for member in self.all]:
            if identity is not None:
                by_node.setdefault(identity.node_id, []).append((identity.pid, identity.started))
        for node, processes in by_node.items():
            self._nodes.kill(node, processes)
        self._nodes.end()
        self._room.end()
        shutil.rmtree(self._folder.scratch, ignore_errors=True)
        self._store = None

    # -- calls --------------------------------------------------------------------------------------------------------

    @property
    def _programs(self) -> Programs:
        return (self._plan.evaluation if self._evaluating else self._plan.program).ranks

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, members run the program of an evaluation."""
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False

    def watched(
        self, method: str, *arguments: Any, timeout_s: float, orders: Mapping[Member, Orders] | None = None
    ) -> Generator[Event, None, list[Any]]:
        """Call ``method`` of all: yields events about members that stand still, returns the results in member order.

        ``orders``: added to the arguments of those members. Raises MemberFault.
        """
        calls = []
        for member in self.all:
            more = [] if orders is None or member.me not in orders else [orders[member.me]]
            calls.append(getattr(member.actor, method).remote(*arguments, *more))
        return (yield from self.watch.collect(calls, timeout_s=timeout_s, programs=self._programs))

    def call(
        self, method: str, *arguments: Any, timeout_s: float, orders: Mapping[Member, Orders] | None = None
    ) -> list[Any]:
        """The same, for what does not take long: nothing is told."""
        return quietly(self.watched(method, *arguments, timeout_s=timeout_s, orders=orders))

    def settle(self, calls: list[Any]) -> None:
        """Wait until a call to each member has ended, however it did. Raises MemberFault if one stands still."""
        while ray.wait(calls, num_returns=len(calls), timeout=TICK_S)[1]:
            for _ in self.watch.check(calls, self._programs):  # events that are told when it is over
                pass

    def await_all(self, calls: list[Any], members: Sequence[MemberHandle]) -> list[Any]:
        """The results of one call each of some ``members``, such as the successors of lost ones."""
        watch = self.watch if members is self.all else Watch(self._config, list(members), self._nodes, self._folder)
        return quietly(watch.collect(calls, timeout_s=START_S, programs=self._programs))

    # -- recovery -----------------------------------------------------------------------------------------------------

    def clear(self, lost: Sequence[Member]) -> list[Member]:
        """End the ``lost``, and free all others from what they wait for. Those that do not come free are ended too.

        Returns all that need a successor.
        """
        gone = set(lost) | self._unbuilt
        self._kill([member for member in self.all if member.me in gone])
        self._store = None  # whoever waits for a member in it fails
        left = [member for member in self.all if member.me not in gone]
        # A thread of its own answers an abort; the main thread drops the step once it is free, which frees others.
        calls = [(member, member.actor.abort.remote()) for member in left]
        answers = {ref: member for member, ref in calls + [(m, m.actor.drop_step.remote()) for m in left]}
        began, waiting = time.monotonic(), list(answers)
        limit_s = max(FREE_S, self._config.recovery.hang_s + max(self.watch.step_s, default=0.0))
        while waiting and (passed := time.monotonic() - began) < limit_s:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.2)
            gone |= {answers[ref].me for ref in done if not _answered(ref)}
            # A wait ends within milliseconds of an abort, but for a large send of which a part is gone.
            gone |= self.watch.beyond_help([answers[ref] for ref in waiting], waiting=passed > STUCK_S)
            waiting = [ref for ref in waiting if answers[ref].me not in gone]
        gone |= {answers[ref].me for ref in waiting}
        self._kill([member for member in left if member.me in gone])
        return [member.me for member in self.all if member.me in gone]

    def replace(self, lost: Sequence[Member]) -> Generator[Event, None, str]:
        """Fill the places of the ``lost``: with spares while there are any, else with new actors in the same bundles;
        if their node is gone, on others. Returns which, ``spare`` or ``replace``; ``retry`` if all are there.

        Yields what is waited for. Raises ZeroppError if there is no room for a successor.
        """
        members = [member for member in self.all if member.me in set(lost)]
        gone = self._gone(members)
        how = "replace" if members else "retry"
        ready: dict[Member, Any] = {}
        homeless = []
        for member in members:
            member.identity = None
            assert member.bundle is not None
            if (spare := self._warm_spare(member)) is not None:
                left, how = member.bundle, "spare"
                member.actor, ready[member.me], member.bundle = spare
                if left.node not in gone:
                    self._spare(left)  # in the place that is free now
            elif member.bundle.node in gone:
                homeless.append(member)
            else:
                ready[member.me] = self._start_again(member, member.bundle)
        if homeless:
            held, _ = yield from self._room.take(self._where(but=homeless), avoid=gone)
            for member in homeless:
                ready[member.me] = self._start_again(member, held[member.me])
        self._unbuilt |= {member.me for member in members}
        identities = self.await_all([ready[member.me] for member in members], members)
        for member, identity in zip(members, identities, strict=True):
            member.identity = identity
        self._nodes.watch(set(self.nodes()))
        self.build(members)
        self._unbuilt.clear()
        yield from self._devices(members)
        while len(self._spares) < self._config.recovery.spares:  # those of a lost node
            bundle = self._room.take_now(self._where(), avoid=gone)
            if bundle is None:
                break
            self._spare(bundle)
        if homeless:
            yield self._placement()
        return how

    def _start_again(self, member: MemberHandle, bundle: Bundle) -> Any:
        """A new actor for ``member``; the reference of its identity."""
        member.actor, member.bundle = start_worker(bundle, needs(self._config)), bundle
        return member.actor.identify.remote(self._config.resources.interface)

    def _gone(self, lost: Sequence[MemberHandle]) -> set[str]:
        """Nodes that are gone with ``lost`` members or spares: what was held there is given up.

        Those where others live are not, whatever they answer.
        """
        alive = set(self._where(but=lost).values())
        suspects = {member.bundle.node for member in lost if member.bundle} | {
            bundle.node for *_, bundle in self._spares
        }
        gone = {node for node in suspects - alive if not self._nodes.answers(node)}
        for node in gone:
            self._room.give_up(node)
        self._spares = [spare for spare in self._spares if spare[2].node not in gone]
        return gone

    def _warm_spare(self, lost: MemberHandle) -> tuple[Any, Any, Bundle] | None:
        """A spare that is there, for the place of ``lost``: on the same node if there is one, else away from its
        buddies. One that died is started again; one that still starts may wait for a node.
        """
        if self._spares:  # it is ahead of a new one
            ray.wait([ready for _, ready, _ in self._spares], timeout=WARM_S)
        where, ring = self._where(), set(self._plan.layout.ring(lost.me)) - {lost.me}
        others = {where[me] for me in ring}
        assert lost.bundle is not None
        there = lost.bundle.node
        for spare in sorted(self._spares, key=lambda spare: (spare[2].node != there, spare[2].node in others)):
            actor, ready, bundle = spare
            if not ray.wait([ready], timeout=0)[0]:
                continue
            self._spares.remove(spare)
            alive = actor.identify.remote(self._config.resources.interface)
            if ray.wait([alive], timeout=ANSWER_S)[0] and _answered(alive):
                return spare
            ray.kill(actor, no_restart=True)
            self._spare(bundle)
        return None

    def _spare(self, bundle: Bundle) -> None:
        self._nodes.watch({bundle.node})
        actor = start_worker(bundle, needs(self._config))
        self._spares.append((actor, actor.warm.remote(self._config.resources.interface), bundle))

    def _kill(self, members: Sequence[MemberHandle]) -> None:
        """By signal too, and until they are gone: a stopped process outlives ``ray.kill`` with all it holds."""
        for member in members:
            ray.kill(member.actor, no_restart=True)
        for member in members:
            if member.identity is not None:
                self._nodes.kill(member.identity.node_id, [(member.identity.pid, member.identity.started)])

    def _write(self) -> None:
        """Which process each member is, for whoever looks at the run."""
        members = [
            {"stage": m.me.p, "shard": m.me.f, "replica": m.me.r, **asdict(m.identity), "address": self._address(m)}
            for m in self.all
            if m.identity
        ]
        with suppress(OSError):
            path = self._folder.path / "members.json"
            path.write_text(json.dumps(members, indent=1) + "\n", encoding="utf-8")


def _answered(call: Any) -> bool:
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError:
        return True
    except ray.exceptions.RayError:
        return False
    return True
