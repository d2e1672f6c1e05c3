"""The processes of one variant: started once, then asleep until they are told to run steps.

They sleep in a read of their pipe, so that what is measured has the cores for itself. Time is taken here, from the call
to the last answer, alike for all.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from bench.tensor_bytes import Watched
from bench.variant import Place, Variant
from zeropp_ray.config import RunConfig
from zeropp_ray.vote import Decision, decide

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["bench.peers", "bench.ours", "torch._dynamo"])

PATIENCE_S = 300.0


class VariantFailed(RuntimeError):
    """A process of a variant failed, or did not answer in time."""


def _serve(pipe: Any, variant: Variant, config: RunConfig, place: Place) -> None:
    try:
        worker = _worker(variant, config, place)
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            method, arguments = request
            pipe.send(time.process_time() if method == "cpu_time" else getattr(worker, method)(*arguments))
    except EOFError:
        return
    except BaseException:
        with suppress(OSError):  # told already by another
            pipe.send(VariantFailed(traceback.format_exc()))


def _worker(variant: Variant, config: RunConfig, place: Place) -> Any:
    if variant.kind == "ours":
        from bench.ours import Ours

        return Ours(config, place)
    from bench.peers import PEERS

    return PEERS[variant.kind](variant, config, place)


class Crew(ABC):
    """Started by the constructor; every step is taken by all processes together.

    ``loss`` is the mean loss of the last step, in nats per token.
    """

    def __init__(self, variant: Variant, config: RunConfig, device: str) -> None:
        self.variant, self.config = variant, config
        self.steps, self.loss = 0, float("nan")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Any] = []
        self._started: list[Any] = []
        size = config.parallel.members
        try:
            for rank in range(size):
                mine, theirs = _processes.Pipe()
                place = Place(rank, size, self._store.port, device)
                process = _processes.Process(target=_serve, args=(theirs, variant, config, place), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._started.append(process)
            self._answers()
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> float:
        """Take ``steps`` steps; seconds until the last process is done."""
        start = time.perf_counter()
        self._run(steps)
        seconds = time.perf_counter() - start
        self.steps += steps
        return seconds

    @abstractmethod
    def _run(self, steps: int) -> None: ...

    @abstractmethod
    def watch(self) -> list[Watched]:
        """One step under observation, by process; not for timing."""

    def cpu_time(self) -> float:
        """Seconds of processor time that all processes have used, with all their threads."""
        return sum(self._call("cpu_time"))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._started:
            process.join(5)
            process.kill()
            process.join()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in answers], PATIENCE_S)
            if not ready:
                raise VariantFailed(f"{self.variant.name}: no answer within {PATIENCE_S:g} s")
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()  # type: ignore[union-attr,call-arg]
                except EOFError:
                    raise VariantFailed(f"{self.variant.name}: a process is gone") from None
                if isinstance(answers[pipe], VariantFailed):
                    raise answers[pipe]
        return [answers[pipe] for pipe in self._pipes]


class PeerCrew(Crew):
    """Runs by itself for as many steps as it is told; each process gives its part of the loss."""

    def _run(self, steps: int) -> None:
        self.loss = sum(self._call("run", self.steps, steps))

    def watch(self) -> list[Watched]:
        losses, found = zip(*self._call("watch", self.steps), strict=True)
        self.loss = sum(losses)
        self.steps += 1
        return list(found)


class OurCrew(Crew):
    """As the driver does it: the votes of every step are decided on, and the decision goes out with the next call."""

    _decision: Decision | None = None

    def _run(self, steps: int) -> None:
        for step in range(self.steps + 1, self.steps + steps + 1):
            self._decide(step, self._call("advance", step, self._decision))

    def watch(self) -> list[Watched]:
        self.steps += 1
        votes, found = zip(*self._call("watch", self.steps, self._decision), strict=True)
        self._decide(self.steps, votes)
        return list(found)

    def _decide(self, step: int, votes: Any) -> None:
        self._decision = decide(step, votes, self.config.train.clip_norm)
        self.loss = self._decision.loss


def start(variant: Variant, config: RunConfig, device: str) -> Crew:
    """Start the processes of a variant. Raises VariantFailed."""
    return (OurCrew if variant.kind == "ours" else PeerCrew)(variant, config, device)
