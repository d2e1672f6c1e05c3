"""Faults that are put into a run on purpose: how they are written, when each is due, how a member carries one out.

They are real: a signal to the member's own process, the interpreter lock held for ever, sockets that are shut down. So
what is tried is the recovery that a fault from outside would meet.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.layout import Member
from zeropp_ray.schedule.actions import Action

INSTRUCTIONS = ("F", "B", "W", "RF", "gather", "release", "reduce", "send", "recv")
POINTS = (*INSTRUCTIONS, "vote", "commit", "copy", "checkpoint", "recovery")
"""Where a member can be hit: before an instruction of its program, or at a point that ``StageMember.reached`` names."""

_SPOT = ("stage", "member", "step", "at", "nth")
WORDS: Mapping[str, tuple[str, ...]] = {
    "kill": _SPOT,
    "stop": (*_SPOT, "for"),
    "hang": _SPOT,
    "slow": _SPOT,
    "net": _SPOT,
    "disk-full": ("stage", "member", "step"),
    "node": ("stage", "member", "step"),
    "driver": ("step",),
    "corrupt-checkpoint": ("step",),
    "random": ("seed", "rate", "kinds"),
}
"""The kinds of faults, and the words that say where and when."""

BY_MEMBER = ("kill", "stop", "hang", "slow", "net", "disk-full")  # the member itself carries them out
RANDOM = ("kill", "stop", "hang", "net")


@dataclass(frozen=True)
class Fault:
    """``at`` and ``nth``: before the nth such instruction of the step, the last if it has fewer; or when a point is
    reached for the nth time from the start of the step on. ``factor``: of ``slow``. ``seconds`` after which a stopped
    member goes on; 0: never. ``text``: as it is written.
    """

    kind: str
    stage: int
    shard: int
    replica: int
    step: int
    at: str = "F"
    nth: int = 1
    factor: float = 1.0
    seconds: float = 0.0
    text: str = ""

    @property
    def member(self) -> Member:
        return Member(self.stage, self.shard, self.replica)


# -- how they are written ---------------------------------------------------------------------------------------------


def read_faults(texts: Iterable[str], config: RunConfig, first: int = 1) -> tuple[Fault, ...]:
    """From what a person writes, such as ``kill stage=1 member=0 step=5 at=B``; ``;`` parts several in one text.

    ``random seed=7 rate=0.05`` stands for a fault in one step of twenty; where and of what kind follows from the seed.
    ``first``: the step that the run begins with.

    Raises ConfigError that names the wrong word, its value and what works. A stage, member, step or point that a run of
    ``config`` does not have is wrong too.
    """
    faults: list[Fault] = []
    for line in (line for text in texts for line in text.split(";")):
        words = _Words(line)
        every = _drawn(words, config, first) if words.kind == "random" else [words]
        faults += [_fault(each, config, first) for each in every]
    seen: dict[tuple[Member, int, bool], Fault] = {}
    for fault in faults:
        if fault.kind in BY_MEMBER:
            other = seen.setdefault((fault.member, fault.step, fault.at == "recovery"), fault)
            if other is not fault:
                raise ConfigError(f"--inject '{fault.text}': '{other.text}' hits it in that step; choose another step")
    return tuple(faults)


class _Words:
    """One fault as text, ``KIND[=VALUE] NAME=VALUE …``, to be asked for its values."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())
        head, *rest = self.text.split(" ")
        self.kind, _, self.value = head.partition("=")
        if self.kind not in WORDS:
            raise self.error(f"'{self.kind}' is no fault; {_near(self.kind, WORDS)}")
        if self.value and self.kind != "slow":
            raise self.error(f"'{head}': only slow takes a value; write {self.kind}")
        self._values: dict[str, str] = {}
        for word in rest:
            name, _, value = word.partition("=")
            if name not in WORDS[self.kind]:
                raise self.error(f"'{word}': {self.kind} takes {', '.join(WORDS[self.kind])}")
            if not value or name in self._values:
                raise self.error(f"'{word}': expected {name}=VALUE, and once")
            self._values[name] = value

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"--inject '{self.text}': {problem}")

    def whole(self, name: str, default: int | None, low: int, high: int, what: str) -> int:
        text = self._values.get(name, default)
        if text is None:
            raise self.error(f"{name} is missing: {what}, from {low} to {high}")
        if not str(text).isdecimal() or not low <= int(text) <= high:
            raise self.error(f"{name}={text}: expected {what}, from {low} to {high}")
        return int(text)

    def number(self, name: str, default: float, works: str, low: float, high: float) -> float:
        """Above ``low``, up to ``high``; ``default`` need not be."""
        text = self.value.removesuffix("x") if name == self.kind else self._values.get(name, "")
        if not text and name != self.kind:
            return default
        try:
            value = float(text)
        except ValueError:
            value = low
        if not low < value <= high:
            raise self.error(f"{name}={text}: expected a number above {low:g}, such as {works}")
        return value

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        value = self._values.get(name, default)
        for each in value.split(","):
            if each not in known:
                raise self.error(f"{name}={each}: {_near(each, known)}")
        return value


def _near(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _fault(words: _Words, config: RunConfig, first: int) -> Fault:
    parallel, kind = config.parallel, words.kind
    stage = words.whole("stage", 0, 0, parallel.stages - 1, "a stage")
    number = words.whole("member", 0, 0, parallel.shards * parallel.replicas - 1, "a member of the stage, f·R + r")
    shard, replica = divmod(number, parallel.replicas)
    step = words.whole("step", None, first, config.train.steps, "a step of the run")
    at = "checkpoint" if kind == "disk-full" else words.choice("at", "F", POINTS)
    if "," in at:
        raise words.error(f"at={at}: expected one place")
    if problem := _never_there(at, replica, config):
        raise words.error(problem)
    if kind == "net" and parallel.members == 1:
        raise words.error("net: the only member of a run has no connections; try kill")
    of_each = parallel.microbatches * parallel.chunks  # F, B and W of a step
    most = of_each if at in ("F", "B", "W") else 1000
    nth = words.whole("nth", 1, 1, most, f"which {at} of the step")
    factor = words.number("slow", 1.0, "slow=3x", 1.0, 1000.0) if kind == "slow" else 1.0
    seconds = words.number("for", 0.0, "for=2", 0.0, 86400.0)
    return Fault(kind, stage, shard, replica, step, at, nth, factor, seconds, words.text)


def _never_there(at: str, replica: int, config: RunConfig) -> str:
    """Why a member of this replica never gets to ``at``, in words; empty if it does."""
    parallel, recovery = config.parallel, config.recovery
    if at == "RF" and not _recomputes(config):
        return f"at=RF: no forward runs again with parallel.recompute = {parallel.recompute!r}; try at=F"
    if at in ("send", "recv") and parallel.stages == 1:
        return f"at={at}: a single stage sends nothing; try at=gather"
    if at in ("copy", "recovery") and not recovery.enabled:
        return f"at={at}: recovery.enabled = false"
    if at == "copy" and not recovery.copy_every:
        return "at=copy: recovery.copy_every = 0, so none is made; set it to 1 or more"
    if at == "copy" and parallel.replicas > 1 and not parallel.zero1:
        return "at=copy: replicas are each other's copies, so none are exchanged; try at=commit"
    if at == "checkpoint" and replica and not parallel.zero1:
        return f"at=checkpoint: replica {replica} saves nothing, the first one does; take a member of that"
    return ""


def _recomputes(config: RunConfig) -> bool:
    how = config.parallel.recompute
    return how == "full" or (how == "selective" and config.parallel.chunks > 1)  # which spares the last chunk


def _drawn(words: _Words, config: RunConfig, first: int) -> list[_Words]:
    """The faults that ``random …`` stands for. Each step has a generator of its own: a run that goes on from a
    checkpoint meets what it would have met.
    """
    parallel = config.parallel
    seed = words.whole("seed", 0, 0, 2**63 - 1, "a seed")
    rate = words.number("rate", 0.0, "rate=0.05", 0.0, 1.0)
    if not rate:
        raise words.error("rate is missing: the faults per step, such as rate=0.05")
    alone = parallel.members == 1
    kinds = words.choice("kinds", ",".join(RANDOM[:-1] if alone else RANDOM), RANDOM).split(",")
    instructions = ["F", "B", "W", "gather", "release", "reduce"]
    instructions += ["send", "recv"] if parallel.stages > 1 else []
    instructions += ["RF"] if _recomputes(config) else []
    drawn = []
    for step in range(first, config.train.steps + 1):
        draw = random.Random(f"{seed} {step}")
        if draw.random() >= rate:
            continue
        kind, stage = draw.choice(kinds), draw.randrange(parallel.stages)
        member = draw.randrange(parallel.shards * parallel.replicas)
        at = draw.choice([*instructions, "vote", "commit"])
        nth = draw.randint(1, parallel.microbatches * parallel.chunks) if at in INSTRUCTIONS else 1
        drawn.append(_Words(f"{kind} stage={stage} member={member} step={step} at={at} nth={nth}"))
    return drawn


# -- when they are due ------------------------------------------------------------------------------------------------


class Faults:
    """The faults that are still to come, at the driver. Each is handed out once: steps that are taken again do not meet
    it again.
    """

    def __init__(self, faults: Sequence[Fault], noted: Path | None = None) -> None:
        """``noted``: a file of the run in which what was handed out is noted, for the next driver if this one dies."""
        self._left, self._noted, self._step = dict(enumerate(faults)), noted, 0
        for number in noted.read_text().split() if noted is not None and noted.exists() else ():
            self._left.pop(int(number), None)

    def due(self, step: int) -> dict[Member, Fault]:
        """Those that members carry out in ``step``, or from there on: a copy or a checkpoint need not be in it."""
        self._step = step
        return self._one_each(lambda fault: fault.at != "recovery" and fault.step == step)

    def due_in_recovery(self) -> dict[Member, Fault]:
        """Those that members carry out in a recovery at the step that :meth:`due` was asked for last."""
        return self._one_each(lambda fault: fault.at == "recovery" and fault.step <= self._step)

    def due_at_driver(self, step: int) -> list[Fault]:
        """Of kind ``driver`` and ``node``, before the calls of ``step``; see ``actors/injection.py``."""
        return self._take(lambda fault: fault.kind in ("driver", "node") and fault.step == step)

    def due_at_checkpoint(self, step: int) -> list[Fault]:
        """Of kind ``corrupt-checkpoint``, when the checkpoint of ``step`` is published."""
        return self._take(lambda fault: fault.kind == "corrupt-checkpoint" and fault.step <= step)

    def _one_each(self, wanted: Callable[[Fault], bool]) -> dict[Member, Fault]:
        first: dict[Member, Fault] = {}
        for fault in self._left.values():
            if fault.kind in BY_MEMBER and wanted(fault):
                first.setdefault(fault.member, fault)
        self._take(lambda fault: fault is first.get(fault.member))
        return first

    def _take(self, wanted: Callable[[Fault], bool]) -> list[Fault]:
        numbers = [number for number, fault in self._left.items() if wanted(fault)]
        if numbers and self._noted is not None:
            with self._noted.open("a", encoding="utf-8") as file:
                file.write("".join(f"{number}\n" for number in numbers))
        return [self._left.pop(number) for number in numbers]


# -- how a member carries one out -------------------------------------------------------------------------------------


class Sockets:
    """The connections of a member's process groups, which cannot be asked for them: those that joining makes."""

    def __init__(self) -> None:
        self._made: dict[int, str] = {}  # what each descriptor was, to tell it from a later one of that number

    @contextmanager
    def made(self) -> Iterator[None]:
        """Take those that are made inside for the ones that are meant, instead of those of an earlier epoch."""
        before = _sockets()
        yield
        self._made = dict(_sockets().items() - before.items())

    def cut(self) -> None:
        """Shut the TCP connections down, so that both ends of each see it broken. The process itself is unharmed."""
        for number, _ in self._made.items() & _sockets().items():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # raises for one that listens
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """The open sockets of this process, descriptor to kernel's name; none where the system does not tell."""
    found = {}
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            if (name := str(path.readlink())).startswith("socket:"):
                found[int(path.name)] = name
    return found


class Trigger:
    """Carries out one fault in the process of its member, once. Call it with the points that the member reaches, and
    :meth:`watch` its instructions.
    """

    def __init__(self, fault: Fault, program: Sequence[Action], sockets: Sockets) -> None:
        """``program``: the member's, of a training step."""
        self._fault, self._sockets = fault, sockets
        self._ops = ops = [action.op.name for action in program]
        self._left, self._position = fault.nth, -1
        if fault.at in INSTRUCTIONS:
            positions = [position for position, op in enumerate(ops) if op == fault.at.upper()] or [len(ops)]
            self._position = positions[min(fault.nth, len(positions)) - 1]
        self._done = self._slow = False

    def __call__(self, point: str) -> None:
        """The member is at ``point``: vote, commit, copy, checkpoint or recovery."""
        if point == self._fault.at:
            self._left -= 1
            if self._left == 0:
                self._carry_out()

    def watch(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        """To be called instead of ``progress`` before each instruction of a training step."""
        began = 0.0

        def before(position: int) -> None:
            nonlocal began
            if self._slow and position and self._ops[position - 1] not in ("WAIT", "DRAIN"):
                time.sleep((self._fault.factor - 1) * (time.perf_counter() - began))
            progress(position)  # the place is known before it is hit, and a slow instruction lasts until here
            if position == self._position and not self._done:
                self._carry_out()
            began = time.perf_counter()

        return before

    def _carry_out(self) -> None:
        self._done, kind = True, self._fault.kind
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            self._stop()
        elif kind == "hang":
            hold = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter lock
            while True:
                hold.sleep(2**31 - 1)
        elif kind == "slow":
            self._slow = True
        elif kind == "net":
            self._sockets.cut()
        elif kind == "disk-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _stop(self) -> None:
        pid, seconds = os.getpid(), self._fault.seconds
        if seconds:  # by somebody else, who does not end with this process
            later = f"(sleep {seconds:g}; kill -CONT {pid}) </dev/null >/dev/null 2>&1 &"
            subprocess.run(["sh", "-c", later], start_new_session=True, check=True)
        os.kill(pid, signal.SIGSTOP)
