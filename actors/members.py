"""The members of a run: placed, started, joined in epochs, called together, replaced, ended."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.failure import TICK_S, MemberFault, Programs, Watch, quietly
from actors.folder import RunFolder
from actors.nodes import ANSWER_S, Nodes
from actors.stage_group import MemberHandle, StageGroup, start_worker
from actors.worker import Orders
from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ZeroppError
from zeropp_ray.layout import Member

Event = dict[str, Any]

WARM_S = 5.0  # how long a spare that still starts is waited for
STUCK_S = 3.0  # how long a member may still wait for a transfer after all have left the epoch
FREE_S = 20.0  # how long members may take to come free of an epoch: longer than to form one
PLACE_S = 60.0  # how long the members' bundles are waited for
START_S = 120.0  # how long members may take to start and to build
NONE = Orders()


class Members:
    """All members of a run, in (p, f, r) order, and spares that wait for the place of a lost one."""

    def __init__(self, config: RunConfig, plan: Any, folder: RunFolder, data: dict[str, Any]) -> None:
        self._config, self._plan, self._folder, self._data = config, plan, folder, data
        self._nodes = Nodes()
        self.all: list[MemberHandle] = []
        self.watch = Watch(config, self.all, self._nodes, folder)
        self.epoch = -1
        self._stages: list[StageGroup] = []
        self._spares: list[tuple[Any, Any, int]] = []  # actor, the reference of its identity once it is warm, bundle
        self._store: Any = None  # the rendezvous of the epoch at hand
        self._group: PlacementGroup | None = None
        self._evaluating = False
        self._unbuilt: set[Member] = set()  # successors that are not yet what they shall be

    def of(self, me: Member) -> MemberHandle:
        return next(member for member in self.all if member.me == me)

    def nodes(self) -> dict[str, str]:
        """The nodes they are on, host by Ray's id."""
        return {member.identity.node_id: member.identity.host for member in self.all if member.identity}

    # -- start and end ------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Find room for all. Raises ZeroppError if there is none."""
        cpus, size = self._config.resources.cpus, self._plan.layout.size + self._config.recovery.spares
        name = group_name(self._config)
        group = placement_group([{"CPU": cpus}] * size, strategy="PACK", name=name)
        self._group = group
        if not group.wait(PLACE_S):
            free = ray.available_resources().get("CPU", 0)
            raise ZeroppError(
                f"{size} members of {cpus:g} CPUs each found no place within {PLACE_S:g} s: the cluster has {free:g} "
                "CPUs free; wait until others finish, add nodes, or lower resources.cpus"
            )

    def start(self) -> None:
        """Start all and build them."""
        assert self._group is not None
        layout = self._plan.layout
        bundles: dict[int, list[Any]] = {p: [] for p in range(layout.stages)}
        for bundle, me in enumerate(layout.members()):
            bundles[me.p].append((me, bundle))
        cpus = self._config.resources.cpus
        self._stages = [StageGroup(p, members, self._group, cpus) for p, members in bundles.items()]
        self.all += [member for stage in self._stages for member in stage.members]
        for member, identity in zip(self.all, self.call("identify", timeout_s=START_S), strict=True):
            member.identity = identity
        self._nodes.watch(set(self.nodes()))
        self._write()
        self.build(self.all)

    def start_spares(self) -> None:
        """Once the run has begun, so that it does not wait for them."""
        for i in range(self._config.recovery.spares):
            self._spare(self._plan.layout.size + i)

    def build(self, members: Sequence[MemberHandle]) -> None:
        """Make ``members`` what they are, with the weights of the start."""
        config = self._config.to_dict()
        self.await_all(
            [m.actor.build.remote(m.me, config, self._plan, self._folder, self._data) for m in members], members
        )

    def join(self, faults: Mapping[Member, Any] | None = None) -> None:
        """Form a new epoch around a rendezvous store of its own, on a port that it binds itself."""
        import torch.distributed as dist

        from zeropp_ray.comm.gloo import Rendezvous

        self.epoch += 1
        host, timeout_s = ray.util.get_node_ip_address(), self._config.resources.step_timeout_s
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        at = Rendezvous(host=host, port=self._store.port, epoch=self.epoch, timeout_s=timeout_s)
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
        if self._group is not None:
            remove_placement_group(self._group)
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

    def replace(self, lost: Sequence[Member]) -> str:
        """Fill the places of the ``lost``: with spares while there are any, else with new actors in the same bundles,
        which Ray moves if their node is gone. Returns which, ``spare`` or ``replace``; ``retry`` if all are there.
        """
        fresh, how = [], "retry"
        for member in [member for member in self.all if member.me in set(lost)]:
            if (spare := self._warm_spare()) is not None:
                member.actor, ready, taken = spare
                self._spare(member.bundle)  # in the place that is free now
                member.bundle, how = taken, "spare"
            else:
                assert self._group is not None
                member.actor = start_worker(self._group, member.bundle, self._config.resources.cpus)
                ready, how = member.actor.identify.remote(), "replace" if how == "retry" else how
            member.identity = None
            fresh.append((member, ready))
        members = [member for member, _ in fresh]
        self._unbuilt |= {member.me for member in members}
        try:
            identities = self.await_all([ready for _, ready in fresh], members)
        except MemberFault as fault:
            if fault.cause != "hang":
                raise
            free, names = ray.available_resources().get("CPU", 0), ", ".join(str(member.me) for member in members)
            raise ZeroppError(
                f"no room for a successor of {names} within {START_S:g} s: the cluster has {free:g} CPUs free; add "
                f"nodes, and go on with: zeropp train --resume {shlex.quote(str(self._folder.path))}"
            ) from None
        for member, identity in zip(members, identities, strict=True):
            member.identity = identity
        self._nodes.watch(set(self.nodes()))
        self.build(members)
        self._unbuilt.clear()
        self._write()
        return how

    def _warm_spare(self) -> tuple[Any, Any, int] | None:
        """A spare that is there. One that died is started again; one that still starts may wait for a node."""
        if self._spares:  # it is ahead of a new one
            ray.wait([ready for _, ready, _ in self._spares], timeout=WARM_S)
        for spare in list(self._spares):
            actor, ready, bundle = spare
            if not ray.wait([ready], timeout=0)[0]:
                continue
            self._spares.remove(spare)
            alive = actor.identify.remote()
            if ray.wait([alive], timeout=ANSWER_S)[0] and _answered(alive):
                return spare
            ray.kill(actor, no_restart=True)
            self._spare(bundle)
        return None

    def _spare(self, bundle: int) -> None:
        assert self._group is not None
        actor = start_worker(self._group, bundle, self._config.resources.cpus)
        self._spares.append((actor, actor.warm.remote(), bundle))

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
            {"stage": m.me.p, "shard": m.me.f, "replica": m.me.r, **asdict(m.identity)} for m in self.all if m.identity
        ]
        with suppress(OSError):
            path = self._folder.path / "members.json"
            path.write_text(json.dumps(members, indent=1) + "\n", encoding="utf-8")


def group_name(config: RunConfig) -> str:
    """Of a run's placement group."""
    return f"zeropp-{config.run.name}"


def _answered(call: Any) -> bool:
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError:
        return True
    except ray.exceptions.RayError:
        return False
    return True
