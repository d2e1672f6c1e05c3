"""The actor of one member. The main thread runs the program; control calls answer while it does."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.folder import RunFolder
from actors.progress import Position, ProgressFile, read_progress
from zeropp_ray.layout import Member


@dataclass(frozen=True)
class Identity:
    """Which process a member is."""

    pid: int
    host: str
    node_id: str


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})  # type: ignore[call-overload]
class StageWorker:
    """Built in steps, so that constructor arguments stay tiny: ``build``, ``join`` an epoch, one ``advance`` a step."""

    def __init__(self, me: Member) -> None:
        self._me = me
        self._background = ThreadPoolExecutor(1, "checkpoint")

    def identify(self) -> Identity:
        return Identity(os.getpid(), ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())

    def build(self, config: dict[str, Any], plan: Any, folder: RunFolder, identity: dict[str, Any]) -> None:
        """Make the member: its chunks, data and progress file.

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
        from zeropp_ray.errors import ConfigError
        from zeropp_ray.evaluation import MemberWindows
        from zeropp_ray.member import MemberData, StageMember

        run = RunConfig.from_dict(config)
        torch.set_num_threads(max(1, int(run.resources.cpus)))
        keep_freed_memory()
        self._progress = ProgressFile(folder.progress_of(self._me))
        _, f, r = self._me
        data: MemberData
        if text is None:
            corpus = load_corpus(run)
            if identity_of(corpus) != identity:
                here = self.identify().host
                raise ConfigError(
                    f"data.path = {run.data.path!r}: the text on {here} is not the one of the run's start"
                )
            data = Batches(run, corpus, f, r)
        else:
            data = MemberWindows(text.windows(run)[0], run, f, r)
        self._member = StageMember(run, plan, self._me, data)

    def join(self, rendezvous: Any, layout: Any) -> None:
        """Form the groups of an epoch, prove them, and use them from now on."""
        from zeropp_ray.comm.gloo import connect

        self._member.join(connect(rendezvous, layout, self._me, host=ray.util.get_node_ip_address()))

    def time_against_fp32(self) -> float:
        """How long a matrix product takes here in the run's dtype, with that in fp32 as 1."""
        from zeropp_ray.precision import Precision, time_against_fp32

        return time_against_fp32(Precision.of(self._member.config.train.dtype).compute)

    def advance(self, step: int, decision: Any) -> Any:
        """One step, see StageMember.advance."""
        self._progress.step = step
        return self._member.advance(step, decision, self._progress)

    def advance_measured(self, step: int, decision: Any) -> Any:
        """The same, with its tensor memory measured."""
        self._progress.step = step
        return self._member.advance_measured(step, decision, self._progress)

    def flush(self, decision: Any) -> None:
        self._member.flush(decision)

    def evaluate(self) -> tuple[float, int]:
        self._progress.step = -1
        return self._member.evaluate(self._progress)

    def report(self) -> Any:
        return self._member.report()

    def adopt(self) -> None:
        """Begin with the weights of the folder that ``model.init_from`` names."""
        from zeropp_ray.models.hf import initial_weights

        weights = initial_weights(self._member.config)
        assert weights is not None
        self._member.set_weights(weights.__getitem__)

    def load_weights(self, path: Path) -> None:
        """Take the weights of the checkpoint in ``path``, without the optimizer: for an evaluation."""
        from zeropp_ray.checkpoint.reader import open_checkpoint

        self._member.set_weights(open_checkpoint(path).tensor)

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint in ``path``."""
        from zeropp_ray.checkpoint.reader import open_checkpoint

        self._member.load(open_checkpoint(path))

    def snapshot(self, folder: Path) -> None:
        """Copy the committed state and start writing this member's part of a checkpoint; ``saved`` waits for it."""
        self._save = self._background.submit(self._member.save, self._member.copies(), folder)

    @ray.method(concurrency_group="control")
    def saved(self) -> Any:
        """The files of the last ``snapshot``, once they are on disk. Raises what kept them from it."""
        return self._save.result()

    @ray.method(concurrency_group="control")
    def progress_of(self, path: Path) -> Position | None:
        """The position of any member of this node, a dead one included."""
        return read_progress(path)

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Leave the epoch, also while a step blocks: whoever waits for this member comes free."""
        self._member.abort()
