"""Copies of shards in host memory, for states without replicas."""

import collections
import dataclasses
import json
import os
import queue
import socket
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from ..store.bounded import in_background
from .plan import Copy, Plan, copy_of
from .tree import Flat, empty_like
from .wire import Addresses, Lines, Sign, Stream, Tensors, carry, unsigned, verified

_JOIN_PATIENCE = 5.0


class Packed(NamedTuple):
    """A copy with its contents.

    Args:
        copy: what it is.
        flat: the state, in host memory of its own.
    """

    copy: Copy
    flat: Flat


class Copies:
    """All copies that a process has. The table is replaced as a whole, so it is right at any moment."""

    def __init__(self) -> None:
        self._packed: dict[tuple[Hashable, int], Packed] = {}
        self._stored = -1

    @property
    def stored(self) -> int:
        """The step of the newest copies that are where they belong, on all ranks; -1 without any."""
        return self._stored if any(step == self._stored for _, step in self._packed) else -1

    def known(self) -> tuple[Copy, ...]:
        """All copies."""
        return tuple(packed.copy for packed in self._packed.values())

    def add(self, packed: Packed) -> None:
        """Adds a copy."""
        self._packed = {**self._packed, (packed.copy.shard, packed.copy.step): packed}

    def flat(self, shard: Hashable, step: int) -> Flat:
        """The state in a copy; its tensors are the copy's own."""
        return self._packed[shard, step].flat

    def drop_older(self, step: int) -> None:
        """Drops the copies from before a step, of which all ranks' copies are there."""
        self._stored = max(step, self.stored)
        self._keep(lambda copy: copy.step >= step)

    def label(self, plan: Plan, number: int) -> None:
        """Says that copies belong to the history, too, that begins with the recovery ``number``."""
        labelled = {
            key: Packed(dataclasses.replace(one.copy, origins=one.copy.origins | {number}), one.flat)
            for key, one in self._packed.items()
            if plan.origin in one.copy.origins and one.copy.step <= plan.step
        }
        self._packed = {**self._packed, **labelled}

    def drop_given_up(self, origin: int, step: int) -> None:
        """Drops the copies of other histories, and of steps that this one has not reached."""
        self._keep(lambda copy: origin in copy.origins and copy.step <= step)

    def _keep(self, wanted: Callable[[Copy], bool]) -> None:
        self._packed = {key: one for key, one in self._packed.items() if wanted(one.copy)}


def in_host_memory(flat: Flat) -> Flat:
    """Copies an exported state."""
    return Flat(flat.skeleton, [tensor.to("cpu", copy=True) for tensor in flat.tensors])


def offsets(nodes: Sequence[str], buddies: int) -> list[int]:
    """How many ranks further each rank's buddies are, with as many as possible on other nodes.

    Args:
        nodes: of all active ranks, by rank.
        buddies: how many each rank has.
    """
    size = len(nodes)
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    pairs = collections.Counter((b - a) % size for each in ranks.values() for a in each for b in each)
    return sorted(range(1, size), key=pairs.__getitem__)[:buddies]


def own_node() -> str:
    """Tells nodes apart; several agents on one machine count as several nodes."""
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"


class Buddies(Lines):
    """Sends this rank's copies to its buddies and receives theirs, in a thread, for one iteration.

    Has its own connections, so that it meets no collective of the training, and an abort ends it.

    Args:
        copies: of the process.
        rank: the caller's active rank.
        host: address to listen on, at which the other ranks reach this one.
        timeout: seconds to wait for another rank.
        sign: of the iteration.
    """

    def __init__(self, copies: Copies, rank: int, host: str, timeout: float, sign: Sign = unsigned) -> None:
        super().__init__(rank, host, timeout, sign)
        self._copies = copies
        self._turn = 0
        self._todo: queue.SimpleQueue[Packed | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()  # empty while one is on its way
        self._sent.put(None)
        self.stored = -1
        """The newest step of which this rank's buddies have its copy, and it has theirs."""
        self._thread = in_background("exchanging copies with buddies", self._run)

    def open(self, addresses: Addresses, nodes: Sequence[str], buddies: int) -> None:
        """Connects; all active ranks call it.

        Args:
            addresses: of all active ranks, by rank.
            nodes: the same.
            buddies: how many each rank has.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        self._pairs = self.connect_around(addresses, offsets(nodes, buddies))

    def send(self, packed: Packed) -> None:
        """Adds a copy, and sends it in the background.

        Raises:
            RuntimeError: the one before could not be sent.
        """
        self.await_sent()
        self._sent.get()
        self._copies.add(packed)
        self._todo.put(packed)

    def await_sent(self) -> None:
        """Waits until no copy is on its way.

        Raises:
            RuntimeError: it could not be sent.
        """
        error = self._sent.get()
        self._sent.put(error)
        if error is not None:
            raise RuntimeError("copies could not be exchanged with the buddies") from error

    def end(self) -> None:
        """Ends the thread; what is on its way arrives, unless that takes long or was aborted."""
        self._todo.put(None)
        self._thread.join(_JOIN_PATIENCE)
        self.abort()  # gives up what has not arrived
        self._thread.join(_JOIN_PATIENCE)

    def _run(self) -> None:
        try:
            while (packed := self._todo.get()) is not None:
                for to, since in self._pairs:
                    self._copies.add(self._exchange(packed, to, since))
                self.stored = packed.copy.step
                self._sent.put(None)
        except Exception as error:  # mostly the iteration is over, and its connections are aborted
            self._sent.put(error)

    def _exchange(self, packed: Packed, to: int, since: int) -> Packed:
        """Sends a copy to a buddy, and receives that of a rank whose buddy this one is."""

        def swap(mine: Tensors, theirs: Tensors) -> None:
            streams = Stream(self, to, True, mine), Stream(self, since, False, theirs)
            carry(streams, self._timeout)

        self._turn += 1
        about = json.dumps(dataclasses.asdict(packed.copy), default=sorted).encode()
        said = about + b"\n" + packed.flat.skeleton
        said += self._sign(f"copy {self._turn} {self._rank} {to}", said)
        head = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        size = torch.empty(1, dtype=torch.int64)
        swap([torch.tensor([len(head)])], [size])
        text = torch.empty(int(size), dtype=torch.uint8)
        swap([head], [text])
        what = f"copy {self._turn} {since} {self._rank}"
        said = verified(self._sign, since, what, bytes(text.tolist()))
        about, _, skeleton = said.partition(b"\n")
        flat = empty_like(skeleton)
        swap(packed.flat.tensors, flat.tensors)
        return Packed(copy_of(json.loads(about)), flat)
