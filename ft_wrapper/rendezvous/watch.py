"""The newest record in memory, and the two threads of a node: one is woken by changes, one keeps it alive."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

from ..exception import StoreError, StoreUnavailable
from . import keys
from .executor import REFRESH, Executor
from .keep_alive import NeighbourWatch
from .register import Register, Snapshot
from .state import Node, State, may_unseat

log = logging.getLogger(__name__)

LOOK_AGAIN = 300.0
"""Seconds after which the watcher reads the record though no one has woken it.

If it was stopped for so long that the key it waits for is gone, no one will. Not shorter, for torch says
two lines for each wait that ends for want of a change.
"""

_FRESH = 1.0  # seconds; in less the record is not so many versions further on that no one wakes a waiter

OnChange = Callable[[State], None]
OnLost = Callable[[Exception], None]


class Board:
    """The newest record that this process knows. For all of its threads.

    A thread that waits here, unlike one that waits in a TCPStore, is interrupted by signals.

    Args:
        on_lost: told, once, that the store is lost.
    """

    def __init__(self, on_lost: OnLost | None = None) -> None:
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._latest: Snapshot | None = None
        self._lost: Exception | None = None

    def latest(self) -> Snapshot | None:
        """The newest record; None if none is known yet."""
        return self._latest

    def learn(self, snapshot: Snapshot) -> None:
        """Takes note of a record, if it is newer."""
        with self._changed:
            if self._latest is None or snapshot.state.version > self._latest.state.version:
                self._latest = snapshot
                self._changed.notify_all()

    def lose(self, error: Exception) -> None:
        """The store is lost: nothing new will come."""
        with self._changed:
            is_first = self._lost is None
            self._lost = self._lost or error
            self._changed.notify_all()
        if is_first and self._on_lost is not None:
            try:
                self._on_lost(error)
            except Exception:
                log.exception("on_lost of the rendezvous failed")

    def check(self) -> None:
        """Raises RendezvousConnectionError if the store is lost."""
        if self._lost is not None:
            raise RendezvousConnectionError(f"the rendezvous store is lost: {self._lost}") from self._lost

    def wait(self, version: int, seconds: float) -> Snapshot | None:
        """Waits for a record newer than this version; None if none came in time.

        Raises:
            RendezvousConnectionError: the store is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self._newer(version), seconds)
            if self._newer(version):
                return self._latest
        self.check()
        return None

    def _newer(self, version: int) -> bool:
        return self._latest is not None and self._latest.state.version > version


class Watcher(threading.Thread):
    """Waits for changes of the record and puts them on the board, until all is over.

    Any other of this node puts a newer record there, `on_change` is told of it as well.

    Args:
        node: the node.
        register: the record, through a client of its own.
        board: where to put it; the first record is there already.
        on_change: told each record that it sees; of several that came at once the newest.
    """

    def __init__(self, node: Node, register: Register, board: Board, on_change: OnChange | None) -> None:
        super().__init__(name=f"ft_wrapper-rendezvous-watch-{node.id}", daemon=True)
        self._node = node
        self._register = register
        self._board = board
        self._on_change = on_change
        first = board.latest()
        assert first is not None
        self._told = first.state.version
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Makes it end with the next change."""
        self._stopping.set()

    def run(self) -> None:
        read_at = self._register.store.now()
        try:
            while True:
                known = self._board.latest()
                assert known is not None
                if known.state.version > self._told:
                    self._told = known.state.version
                    self._tell(known.state)
                    continue  # that may have taken a while
                if known.state.closed:
                    # Said by this thread, which has nothing to ask the store any more.
                    self._register.store.set(keys.goodbye(self._node.name), "")
                    self._register.store.check([keys.STATE])  # a set is not answered: now it has arrived
                    return
                if self._stopping.is_set():
                    return
                try:
                    woken = None
                    if self._register.store.now() < read_at + _FRESH:
                        woken = self._register.wait(known.state.version, LOOK_AGAIN)
                    self._board.learn(woken or self._register.read())
                    read_at = self._register.store.now()
                except StoreUnavailable:
                    read_at = -math.inf  # the heart says so; much may have changed meanwhile
        except (StoreError, DistError, RendezvousError) as error:
            if not self._stopping.is_set():
                self._board.lose(error)
        finally:
            self._register.store.close()

    def _tell(self, state: State) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(state)
        except Exception:
            log.exception("on_change of the rendezvous failed")


class Heart(threading.Thread):
    """Says that a node lives, and takes out neighbours that are silent, until all is over.

    Args:
        node: the node.
        executor: its operations, on a client of its own.
        neighbours: the others that it watches, on the same client.
        board: the newest record.
        interval: seconds between two signs of life.
        close: lets go of the client.
    """

    def __init__(
        self,
        node: Node,
        executor: Executor,
        neighbours: NeighbourWatch,
        board: Board,
        interval: float,
        close: Callable[[], None],
    ) -> None:
        super().__init__(name=f"ft_wrapper-rendezvous-heart-{node.id}", daemon=True)
        self._node = node
        self._executor = executor
        self._neighbours = neighbours
        self._board = board
        self._interval = interval
        self._close = close
        self._beats = 0
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Makes it end."""
        self._stopping.set()

    def run(self) -> None:
        unavailable = False
        try:
            while not self._stopping.is_set():
                began = self._executor.now()
                try:
                    if self._beat():
                        return
                    if unavailable:
                        log.warning("the rendezvous store is back")
                    unavailable = False
                except StoreUnavailable as error:
                    if not unavailable:
                        log.warning("the job goes on; nodes can come and go when this is over: %s", error)
                    unavailable = True
                # One that had to wait for the store is late already: then it says at once that it lives.
                self._stopping.wait(max(0.0, began + self._interval - self._executor.now()))
        except (StoreError, DistError, RendezvousError) as error:
            if not self._stopping.is_set():
                self._board.lose(error)
        finally:
            self._close()

    def _beat(self) -> bool:
        """Once: says that the node lives, and looks after the others. True if all is over."""
        self._executor.keep_alive()
        self._beats += 1
        if self._beats % max(1, int(REFRESH / self._interval)) == 0:
            self._executor.sweep()
        state = self._executor.look().state
        if state.closed:
            return True
        silent = self._neighbours.silent(state)
        if silent and may_unseat(state, self._node, silent):
            log.warning(
                "no sign of life from node %s: taken out of the rendezvous", ", node ".join(map(str, silent))
            )
            self._executor.expel(silent)
        return False
