"""The actor of one member. The main thread runs the program; control calls answer while it does."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.folder import RunFolder
from actors.processes import started_at
from actors.progress import BETWEEN, EVALUATION, START, ProgressFile
from zeropp_ray.comm.interface import LOOPBACK, choose
from zeropp_ray.faults import Fault, Sockets, Trigger
from zeropp_ray.layout import Member
from zeropp_ray.uri import Place

BEATS = 20  # in the time after which a member that gives no sign of life is suspected
BEAT_S = 0.5  # between them, at most


@dataclass(frozen=True)
class Identity:
    """Which process a member is; ``started``: when, see processes.py. ``address``: where it listens, unless the run is
    on one machine. ``device``: which GPU it computes on, once it is built; empty if on none.
    """

    pid: int
    started: int
    host: str
    node_id: str
    address: str
    device: str = ""


@dataclass(frozen=True)
class Orders:
    """What goes along with a call: ``copy`` the state before the step, ``measure`` its memory, have a ``fault``."""

    copy: bool = False
    measure: bool = False
    fault: Fault | None = None


NONE = Orders()


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2, "saving": 2})  # type: ignore[call-overload]
class StageWorker:
    """Built in steps, so that constructor arguments stay tiny: ``build``, ``join`` an epoch, one ``advance`` a step.

    A spare is one that has not been built: it does not know yet which member it will be.
    """

    def __init__(self) -> None:
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._member: Any = None
        self._trigger: Trigger | None = None
        self._sockets = Sockets()
        self._stepped = False
        self._left = threading.Event()  # an epoch, by an abort

    def identify(self, interface: str) -> Identity:
        """``interface``: the setting. ConfigError if this machine has none like it."""
        pid, host = os.getpid(), ray.util.get_node_ip_address()
        self._listens = choose(interface, host)
        # NCCL looks for its own; "=" is for a name in full.
        if self._listens.name:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={self._listens.name}")
        node_id = ray.get_runtime_context().get_node_id()
        return Identity(pid, started_at(pid), host, node_id, self._listens.address)

    def warm(self, interface: str) -> Identity:
        """Import what a member needs, which takes most of its start."""
        import zeropp_ray.comm.gloo
        import zeropp_ray.data.corpus
        import zeropp_ray.member  # noqa: F401

        return self.identify(interface)

    def build(self, me: Member, config: dict[str, Any], plan: Any, folder: RunFolder, identity: dict[str, Any]) -> str:
        """Make the member ``me``: its chunks, data and progress file. Again to begin anew, with the first weights.
        Returns which GPU it computes on, empty if on none.

        ``identity``: what the text was at the start of the run. ConfigError if it is another one here.
        """
        start_directory, text = folder.start_directory, folder.text
        if start_directory not in sys.path:
            sys.path.append(start_directory)  # behind everything: a user's folder must not hide an installed package
        import torch

        from zeropp_ray.allocator import keep_freed_memory
        from zeropp_ray.checkpoint.resume import identity_of
        from zeropp_ray.config import RunConfig
        from zeropp_ray.data.corpus import load_corpus
        from zeropp_ray.data.sampler import Batches
        from zeropp_ray.device import label, pick, prepare
        from zeropp_ray.errors import ConfigError
        from zeropp_ray.evaluation import MemberWindows
        from zeropp_ray.member import MemberData, StageMember

        run = RunConfig.from_dict(config)
        torch.set_num_threads(max(1, int(run.resources.cpus)))
        keep_freed_memory()
        prepare(run.resources, run.train)
        device = pick(run.resources)
        if self._member is None:
            self._me, self._progress = me, ProgressFile(folder.progress_of(me, os.getpid()))
            self._progress.beat_every(min(BEAT_S, run.recovery.suspect_s / BEATS), self._waits)
        _, f, r = me
        data: MemberData
        if text is None:
            corpus = load_corpus(run)
            if identity_of(corpus) != identity:
                here = ray.util.get_node_ip_address()
                raise ConfigError(
                    f"data.path = {run.data.path!r}: the text on {here} is not the one of the run's start"
                )
            data = Batches(run, corpus, f, r)
        else:
            data = MemberWindows(text.windows(run)[0], run, f, r)
        self._member = StageMember(run, plan, me, data, device)
        self._program = plan.program.ranks[me.p]
        return label(device)

    def _waits(self) -> tuple[int, int]:
        return (0, 0) if self._member is None else self._member.waits

    def join(self, rendezvous: Any, layout: Any, orders: Orders = NONE) -> None:
        """Form the groups of an epoch, prove them, and use them from now on."""
        from zeropp_ray.comm.connect import connect

        self._left.clear()
        self._begin(orders=orders)
        self._reached("recovery")
        # Where the driver meets at the loopback address all are on one machine.
        host = LOOPBACK if rendezvous.host == LOOPBACK else self._listens.address
        with self._sockets.made():
            device, left = self._member.device, self._left
            links = connect(rendezvous, layout, self._me, host=host, device=device, left=left)
        self._member.join(links)

    def _begin(self, step: int = BETWEEN, orders: Orders = NONE) -> None:
        """A call begins, and with it the time it stands still for. ``step``: if it runs one."""
        self._progress.begin(step if step != BETWEEN or self._stepped else START)
        self._stepped = self._stepped or step > 0
        if orders.fault is not None:
            self._trigger = Trigger(orders.fault, self._program, self._sockets)
            self._member.reached = self._reached

    def _reached(self, point: str) -> None:
        if self._trigger is not None:
            self._trigger(point)

    def time_against_fp32(self) -> float:
        """How long a matrix product takes here in the run's dtype, with that in fp32 as 1."""
        from zeropp_ray.precision import Precision, time_against_fp32

        return time_against_fp32(Precision.of(self._member.config.train.dtype).compute)

    def advance(self, step: int, decision: Any, orders: Orders = NONE) -> Any:
        """One step, see StageMember.advance, and how long its instructions took."""
        self._begin(step, orders)
        progress = self._progress if self._trigger is None else self._trigger.watch(self._progress)
        advance = self._member.advance_measured if orders.measure else self._member.advance
        vote = advance(step, decision, progress, copy=orders.copy)
        # On a GPU the host is ahead of the device, and its clock says nothing of single instructions.
        on_cpu = self._member.device.type == "cpu"
        return replace(vote, times=self._progress.seconds(self._program) if on_cpu else {})

    def flush(self, decision: Any, orders: Orders = NONE) -> None:
        self._begin(orders=orders)
        self._member.flush(decision)

    def evaluate(self) -> tuple[float, int]:
        self._begin(EVALUATION)
        return self._member.evaluate(self._progress)

    def report(self) -> Any:
        self._begin()
        return self._member.report()

    def adopt(self) -> None:
        """Begin with the weights of the folder that ``model.init_from`` names."""
        from zeropp_ray.models.hf import initial_weights

        self._begin()
        weights = initial_weights(self._member.config)
        assert weights is not None
        self._member.set_weights(weights.__getitem__)

    def load_weights(self, path: Place) -> None:
        """Take the weights of the checkpoint in ``path``, without the optimizer: for an evaluation."""
        from zeropp_ray.checkpoint.reader import open_checkpoint

        self._begin()
        self._member.set_weights(open_checkpoint(path).tensor)

    def restore(self, path: Place) -> None:
        """Continue from the checkpoint in ``path``."""
        from zeropp_ray.checkpoint.reader import open_checkpoint

        self._begin()
        self._member.load(open_checkpoint(path))

    def holdings(self) -> Any:
        """Which copies of the state are here, see StageMember.holdings."""
        self._begin()
        return self._member.holdings()

    def restore_copies(self, step: int, missing: frozenset[Member], orders: Orders = NONE) -> None:
        """Go back to the state after ``step``, see StageMember.restore_copies."""
        self._begin(orders=orders)
        self._member.restore_copies(step, missing)

    def snapshot(self, folder: Place, orders: Orders = NONE) -> None:
        """Copy the committed state and start writing this member's part of a checkpoint; ``saved`` waits for it."""
        self._begin(orders=orders)
        group = self._member.checkpoint_group  # of this epoch, whenever the thread comes to it
        self._save = self._background.submit(self._member.save, self._member.copies(), folder, group)

    def drop_step(self) -> None:
        """After an abort, once the main thread is free: drop what the step left, so that nobody waits for it."""
        if self._member is not None:
            self._begin()  # its place in the step is nobody's concern any more
            self._member.drop_step()

    @ray.method(concurrency_group="saving")  # apart: a disk that blocks must not keep an abort from being answered
    def saved(self) -> Any:
        """The files of the last ``snapshot``, once they are on disk. Raises what kept them from it."""
        return self._save.result()

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Leave the epoch, also while a step blocks: whoever waits for this member comes free."""
        self._left.set()
        if self._member is not None:
            self._member.abort()
