"""What the engine asks of a communicator. Device, stream and dtype questions stay behind this interface.

On a CPU *done* is done. On a GPU the host runs ahead of the device: there :meth:`Transfer.wait` lets the stream that
computes wait, so that what is launched after it finds the transfer done, and :attr:`Links.settle` lets the host wait.

A member trains in three groups (:class:`Links`): its *pipeline* (the same shard and replica of every stage), its
*stage* (all shards of one stage and replica) and its *replicas* (the same shard of the same stage). Everything is
*posted* and completes in :meth:`Transfer.wait`; the order of posts on a rank comes from its program.

Bytes are logical payload: a gather or a reduce of a chunk of ``n`` bytes (padding included) counts ``n * (F - 1) / F``
at each member, so a group of one counts the operation and no bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Protocol

import torch


class PeerLost(RuntimeError):
    """A transfer failed: the peer is gone, or did not answer within the group's time limit."""


class Transfer(Protocol):
    """Something posted. The tensors that it reads or writes must live until ``wait`` has returned."""

    def wait(self) -> None:
        """What this thread computes from here on finds it done. Raises PeerLost."""


@dataclass
class Waits:
    """How many waits for transfers a member's main thread has begun, and how many are over; another thread may look."""

    begun: int = 0
    over: int = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A wait for others, whatever it consists of."""
        self.begun += 1
        try:
            yield
        finally:
            self.over += 1


@dataclass
class Counters:
    """Operations and logical payload bytes of one member.

    ``gathers`` and ``reduces`` are those of the program, one for a chunk with all that is its own. What chunks share
    is gathered and reduced with them and counted apart, and *exchanged* between the stages that use it. What goes over
    the replicas is counted by set: gradients once a step, and with ZeRO-1 the updated weights once a commit.
    """

    gathers: int = 0
    gathered_bytes: int = 0
    reduces: int = 0
    reduced_bytes: int = 0
    shared_gathers: int = 0
    shared_gathered_bytes: int = 0
    shared_reduces: int = 0
    shared_reduced_bytes: int = 0
    shared_exchanges: int = 0
    shared_exchanged_bytes: int = 0
    replica_reduces: int = 0
    replica_reduced_bytes: int = 0
    replica_gathers: int = 0
    replica_gathered_bytes: int = 0
    sends: int = 0
    sent_bytes: int = 0
    receives: int = 0
    received_bytes: int = 0

    def add(self, other: Counters) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def set(self, other: Counters) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Group(ABC):
    """Members that exchange tensors; ``rank`` is this member's place in it, ``size`` their number."""

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Transfer:
        """Fill ``out`` [size * n] with the shards [n] of all members in rank order. Same dtype, contiguous."""

    @abstractmethod
    def reduce_scatter(self, full: torch.Tensor, into: torch.Tensor) -> Transfer:
        """Add to ``into`` [n] this member's piece of ``full`` [size * n] of every member, added in rank order (but see
        nccl.py). ``full`` may be changed.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> Transfer:
        """Sum ``tensor`` over the members, in place, added in rank order (but see nccl.py): the same bytes at every
        member.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Send a contiguous tensor to rank ``peer``.

        Transfers of one peer and direction match by ``tag``. Those of even tags, and those of odd ones, are posted in
        the same order at both ends, as far as they are many: so a communicator without tags can match them too.
        """

    @abstractmethod
    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Fill a contiguous tensor from rank ``peer``."""

    def exchange(
        self, incoming: Mapping[int, torch.Tensor], outgoing: Mapping[int, torch.Tensor], tag: int
    ) -> list[Transfer]:
        """Receive and send tensors by peer, at the same time. All whom it concerns call it in the same order."""
        received = [self.receive(tensor, peer, tag) for peer, tensor in incoming.items()]
        return [*received, *(self.send(tensor, peer, tag) for peer, tensor in outgoing.items())]

    @abstractmethod
    def close(self) -> None:
        """Leave the group: whoever still waits for this member fails soon instead of waiting for the time limit."""


@dataclass
class Links:
    """The groups of one member in one epoch, and the waits of its main thread."""

    pipeline: Group
    stage: Group
    replicas: Group
    checkpoint: Group  # those that own the stage's pieces, in their order: background traffic apart from training
    copies: Group  # those among whom copies of the state go round, each giving its own to the next: likewise
    waits: Waits = field(default_factory=Waits)
    settle: Callable[[], None] = lambda: None  # until the device has done all that was launched; raises PeerLost

    def close(self) -> None:
        for group in (self.pipeline, self.stage, self.replicas, self.checkpoint, self.copies):
            group.close()
