"""Presence: the two threads that keep a node in the rendezvous, and watch its neighbours."""

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousGracefulExitError

from .._text import IN_LINE, cut
from ..exception import StoreError, StoreUnavailable
from ..protocol.operations import Operations
from . import moves
from .executor import REFRESH, Executor, note_process, observer
from .record import Node, NodePlace, RendezvousRecord, RoundPolicy
from .register import RecordRegister, alive_key, goodbye_key, store_errors

log = logging.getLogger(__name__)

WATCHED = 2
#: Seconds that a client may need to notice that the store is back. `TCPStore` tries for up to 16 s at a time.
RECONNECTS = 20.0
#: Seconds after which the watcher reads the record though no notification has come.
#:
#: If the watcher was stopped for so long that its notification key is gone, none will come. Not shorter,
#: since torch logs two lines for each wait that times out.
LOOK_AGAIN = 300.0

# Seconds after which lost nodes are evicted even if the store was slow or gone repeatedly.
_LONGEST_HELD = 120.0
_FRESH = 1.0  # seconds; fewer than `KEPT_VERSIONS` versions are written in that time


def ring(record: RendezvousRecord, node: Node) -> list[Node]:
    """The nodes that a node may have to evict, the next one first; none if the node is not in the record.

    Under policy ``rank`` a spare has to evict only if all nodes with seats are lost (`moves.may_evict`).
    Other spares may be lost with them, and must not get the seats.
    """
    everybody = record.nodes
    names = [other.name for other in everybody]
    if node.name not in names:
        return []
    here = names.index(node.name)
    if record.policy is RoundPolicy.RANK and record.place_of(node) is not NodePlace.SEAT:
        return [*everybody[:here], *everybody[here + 1 :]]
    return [*everybody[here + 1 :], *everybody[:here]]


def nearest(record: RendezvousRecord, others: list[Node]) -> list[Node]:
    """The nodes of a ring that are watched while nothing is wrong: up to the second node that may evict.

    Under policy ``group`` these are the next two nodes. Under policy ``rank``, where only nodes with seats
    evict, they are the next two nodes with seats and the spares between them; a spare watches the first two
    nodes with seats.
    """
    watching = _watching(record)
    watched: list[Node] = []
    for other in others:
        watched.append(other)
        if sum(one.name in watching for one in watched) == WATCHED:
            break
    return watched


def _watching(record: RendezvousRecord) -> set[str]:
    """Names of the nodes that may evict others."""
    nodes = record.participants if record.policy is RoundPolicy.RANK else record.nodes
    return {node.name for node in nodes}


class NodeWatch:
    """Observes whether a node's neighbours live, by the rules of `CounterObserver`.

    Nodes that are lost together, such as a rack, are watched only by the node in front of them. Once the next
    node has sent no heartbeat for more than half of the timeout, that watcher also looks at all nodes behind
    it. It keeps looking at nodes without a heartbeat, wherever they are in the record later. While nothing is
    wrong, each node costs the same.

    After an outage of the store not all nodes are back at the same time: a client may have begun a long
    attempt to connect just before. So a node that could not look for a while, or has just begun, declares no
    node silent until the other nodes have had time to reconnect.

    Args:
        store: a client of its own.
        node: the node that watches.
        timeout: seconds without a heartbeat after which a node is silent.
        interval: seconds between two looks, and between two heartbeats.
    """

    def __init__(self, store: Operations, node: Node, timeout: float, interval: float) -> None:
        self._store = store
        self._node = node
        self._timeout = timeout
        self._interval = interval
        self._observer = observer(store, timeout)
        self._lived: dict[Node, bool] = {}  # whether a heartbeat came between the last two looks
        # A node that has just begun does not know whether the other nodes were just cut off.
        self._looked = -math.inf
        self._held_since = 0.0
        self._judges_from = 0.0

    def silent(self, record: RendezvousRecord, outside: Iterable[Node] = ()) -> list[Node]:
        """Looks at the neighbours in the record and returns the silent ones.

        Args:
            record: the record of the nodes.
            outside: nodes outside the record that are looked at as well.

        Raises:
            Exception: whatever the store raised; all earlier observations are forgotten then.
        """
        before, self._lived = self._lived, {}
        lived, still = dict[Node, bool](), dict[Node, float]()

        def look(node: Node) -> bool:
            still[node] = self._observer.stillness(node)
            lived[node] = still[node] == 0.0 and node in before
            return lived[node]

        others, watching = ring(record, self._node), _watching(record)
        near = nearest(record, others)
        for node in near:
            look(node)
        first = next((node for node in near if node.name in watching), None)
        # This takes two looks in a row, since the time between two looks counts as at most half of the
        # timeout. One look is not enough: the intervals of two nodes drift past each other.
        if first is not None and still[first] > self._timeout / 2:
            for node in others[len(near) :]:
                if look(node) and node.name in watching:
                    break  # this node watches the nodes behind it
        # Nodes without a heartbeat are looked at again, though their places in the record may have changed.
        doubted = [node for node in others if not before.get(node, True)]
        for node in [*doubted, *outside]:
            if node not in still:
                look(node)
        self._lived = lived
        self._observer.forget_all_but(still)
        now = self._store.now()
        self._note_absence(now)
        if now < self._judges_from and now - self._held_since < _LONGEST_HELD:
            return []
        return [node for node, seconds in still.items() if seconds >= self._timeout]

    def _note_absence(self, now: float) -> None:
        """Postpones all judgements if the last look was too long ago."""
        away, self._looked = now - self._looked - self._interval, now
        if away > self._interval / 2:
            if now >= self._judges_from:
                self._held_since = now
            # An attempt to connect takes as long as all earlier ones; the heartbeat comes with the next one.
            until = now + min(2 * away + self._interval, RECONNECTS) + self._interval
            self._judges_from = max(self._judges_from, until)


class _Keeper(threading.Thread):
    """A thread that helps to keep a node in the rendezvous, with a client of its own, which it closes.

    Args:
        name: name of the thread.
        register: the record, through the thread's client; its board is notified if the store is lost.
    """

    def __init__(self, name: str, register: RecordRegister) -> None:
        super().__init__(name=f"ft_wrapper-rendezvous-{name}", daemon=True)
        self._register = register
        self._store = register.store
        self._board = register.board
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Makes the thread end; a `Watcher` ends with the next change."""
        self._stopping.set()

    def run(self) -> None:
        try:
            self._keep()
        except (StoreError, DistError, RendezvousError) as error:
            if not self._stopping.is_set():
                self._board.lose(error)
        finally:
            self._store.close()

    def _keep(self) -> None:
        """Does the thread's work; returns once it is stopped, or the rendezvous is closed."""
        raise NotImplementedError


class Watcher(_Keeper):
    """Waits for changes of the record and puts them on the board, until the rendezvous is closed.

    It notifies the agent of each newer record on the board, even if another thread of this node has put it
    there; of several records that come at once, it notifies of the newest.

    Args:
        node: the node.
        register: the record, through the thread's own client; its board already has a record.
    """

    def __init__(self, node: Node, register: RecordRegister) -> None:
        super().__init__(f"watch-{node.id}", register)
        self._node = node
        self._notified = self._board.known().version

    def _keep(self) -> None:
        read_at = self._store.now()
        while True:
            known = self._board.known()
            if known.version > self._notified:
                self._notified = known.version
                self._board.on_change(known)
                continue  # the callback may have taken a while
            if known.closed:
                # In this thread, which is the last of the node to use the store. A set has no answer, and a
                # second call would often find the store gone: its host may end after the last goodbye.
                self._store.add(goodbye_key(self._node.name), 1)
                return
            if self._stopping.is_set():
                return
            try:
                is_fresh = self._store.now() < read_at + _FRESH
                if not is_fresh or self._register.wait(known.version, LOOK_AGAIN) is None:
                    self._register.read()
                read_at = self._store.now()
            except StoreUnavailable:
                read_at = -math.inf  # the heart thread logs the outage; read again, as much may have changed


class NodeHeart(_Keeper):
    """Sends a node's heartbeat and evicts silent neighbours, until the rendezvous is closed.

    Args:
        executor: the node's operations, on the thread's own client, which the thread closes.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(f"heart-{executor.node.id}", executor.register)
        self._executor = executor
        self._interval = executor.settings.keep_alive_interval
        self._timeout = executor.settings.keep_alive_timeout
        self._watch = NodeWatch(executor.store, executor.node, self._timeout, self._interval)
        self._beats = 0

    def _keep(self) -> None:
        unavailable = False
        while not self._stopping.is_set():
            began = self._store.now()
            try:
                if self._beat():
                    return
                if unavailable:
                    log.warning("the rendezvous store is back")
                unavailable = False
            except StoreUnavailable as error:
                if not unavailable:
                    log.warning(
                        "the rendezvous store does not answer; the job goes on, and nodes can join and leave "
                        "once it is back: %s",
                        error,
                    )
                unavailable = True
            # If this took longer than the interval, the next heartbeat is due at once.
            self._stopping.wait(max(0.0, began + self._interval - self._store.now()))

    def _beat(self) -> bool:
        """Sends a heartbeat and evicts silent nodes; returns whether the rendezvous is closed."""
        self._executor.keep_alive()
        self._beats += 1
        if self._beats % max(1, int(REFRESH / self._interval)) == 0:
            self._executor.sweep()
        record = self._register.latest()
        if record.closed:
            return True
        node, outside = self._executor.node, list[Node]()
        if not record.nodes or node.is_same(record.nodes[0]):
            outside = [one.node for one in record.quarantine if not node.is_same(one.node)]
        silent = self._watch.silent(record, outside)
        for other in set(outside).intersection(silent):
            log.warning("no heartbeat from node %s for %g s: kept out, now forgotten", other, self._timeout)
            self._register.change(functools.partial(moves.release, node=other))
        silent = [other for other in silent if other not in outside]
        if silent and moves.may_evict(record, node, silent):
            names = ", node ".join(map(str, silent))
            log.warning(
                "no heartbeat from node %s for %g s: removed from the rendezvous", names, self._timeout
            )
            self._executor.evict(silent)
        return False


class Presence:
    """A node that takes part: its place in the record, and the two threads that keep the place.

    Args:
        executor: the node's operations, on a client for the agent's own thread.
        new_register: opens the record through another client; each of the two threads closes its own.

    Raises:
        RendezvousError: the options differ from other nodes', or another agent has this node's id.
    """

    def __init__(self, executor: Executor, new_register: Callable[[], RecordRegister]) -> None:
        node = self.node = executor.node
        self.store = executor.store
        self.executor = executor
        executor.check(executor.register.read())
        note_process(self.store, node)
        self._board = executor.register.board
        with contextlib.ExitStack() as opened:
            of_heart = new_register()
            opened.callback(of_heart.store.close)
            of_watcher = new_register()
            opened.callback(of_watcher.store.close)
            self.heart = NodeHeart(Executor(node, of_heart, executor.settings))
            self.watcher = Watcher(node, of_watcher)
            self.watcher.start()
            self.heart.start()
            opened.pop_all()

    def forget_predecessors(self) -> None:
        """Deletes the heartbeats of earlier agents with this id, which no node watches once this one is in.

        Of the last two agents, since the last one may have ended before it did this.
        """
        for incarnation in range(max(0, self.node.incarnation - 2), self.node.incarnation):
            before = dataclasses.replace(self.node, incarnation=incarnation)
            self.store.delete_key(alive_key(before.name))

    def quarantine(self, reason: str) -> None:
        """Gives up the node's place, if it has one, and puts the node in quarantine: no node waits for it.

        Args:
            reason: why it is in quarantine, for people.

        Raises:
            RendezvousConnectionError: the store is lost.
        """
        with store_errors():
            self.executor.exit()
            now, why = self.store.wall_clock(), cut(reason, IN_LINE)  # all nodes read the record
            self.executor.register.change(lambda record: moves.quarantine(record, self.node, why, now))

    def release(self) -> None:
        """Ends the node's quarantine, or that of an earlier agent of its id, if there is one."""
        self.executor.register.change(lambda record: moves.release(record, self.node))

    def wait_in_quarantine(self, seconds: float) -> None:
        """Waits, unless the job ends.

        Args:
            seconds: how long to wait.

        Raises:
            RendezvousGracefulExitError: the rendezvous is closed.
            RendezvousConnectionError: the store is lost.
        """
        until = self.store.now() + seconds
        while not self._board.is_closed:
            left = until - self.store.now()
            if left <= 0:
                return
            self._board.wait(self._board.known().version, left)
        job, why = self.executor.settings.run_id, self._board.known().reason
        raise RendezvousGracefulExitError(
            f"the rendezvous {job!r} is closed: the job is over{why and f': {why}'}; "
            f"node {self.node} was kept out to its end"
        )

    def give_up(self) -> None:
        """Gives up the node's place, even if the thread that was joining has been interrupted."""
        self.executor.exit()
        self.watcher.stop()
        if self.watcher.is_alive() and not self._board.known().closed:
            self.executor.register.touch()  # wakes the watcher, since the record may not have changed

    def end(self, patience: float) -> None:
        """Stops both threads, and waits up to ``patience`` seconds for each."""
        for thread in (self.heart, self.watcher):
            thread.stop()
        for thread in (self.heart, self.watcher):
            if patience and thread is not threading.current_thread():
                thread.join(patience)
