"""The other nodes, by any of torch's rendezvous handlers, as in torch's own agents.

Every change of membership is a new round. Such a handler does not notify: this node asks `num_nodes_waiting`
now and then, and each node notices on its own that another has left. Single ranks are replaced within a
round as with our own rendezvous; nodes are not.
"""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistNetworkError, DistStoreError
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.agent.server.api import WorkerSpec

from ...rendezvous.backends import host_workers_store
from ...store.address import address_of_this_node, host_port, is_this_host, loopback
from ...store.bounded import bounded, call_in_thread, in_background
from ..nodes import Nodes
from ..rounds import News, Round, What

log = logging.getLogger(__name__)

#: Seconds within which the nodes of a round that has formed exchange how many ranks they have.
EXCHANGE_TIMEOUT = 60.0
END_TIMEOUT = 15.0
_JOIN_THREAD = 5.0


class ClassicNodes(Nodes):
    """This node's part, by a handler of torch's.

    Args:
        spec: the workers. Its ``master_addr``, else its ``local_addr``, is this node's address; as
            the handler says when both are None. A node that is alone need not have one that can be looked up.
            The store of the workers, on the first node, is at ``master_port``, unless the handler has that.
        exit_barrier_timeout: seconds to wait for the other nodes, once this node's ranks are done.
        make_handler: makes the handler, with the first round; the spec's when None.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float,
        make_handler: Callable[[], elastic.RendezvousHandler] | None = None,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._exit_barrier_timeout = exit_barrier_timeout
        self._make_handler = make_handler or (lambda: spec.rdzv_handler)
        self._handler: elastic.RendezvousHandler | None = None
        self._store: Store | None = None
        self._round: Round | None = None
        self._worker_store: TCPStore | None = None
        self._asking = contextlib.ExitStack()  # ends the thread that asks

    def next_round(self) -> Round:
        self._asking.close()
        self.inbox.begin_term()
        if self._handler is None:
            self._handler = self._make_handler()
        try:
            info = self._handler.next_rendezvous()
        except elastic.RendezvousClosedError as error:  # torch's own have no text
            error.args = error.args or ("the job is over: its rendezvous is closed",)
            raise
        self._worker_store, own = None, ""
        if info.rank == 0:
            bootstrap = info.bootstrap_store_info
            given = self._spec.master_addr or self._spec.local_addr or (bootstrap and bootstrap.master_addr)
            address = given or address_of_this_node(socket.gethostname())
            if info.world_size == 1 and not is_this_host(address):
                log.warning("%s leads to no address of this host: its ranks use %s", address, loopback())
                address = loopback()
            hosted = self._worker_store = self._open_worker_store(address)
            own = host_port(hosted.host, hosted.port)
        store = _clone(info.store)
        place = call_in_thread(
            lambda: exchange(store, info.rank, info.world_size, self._spec, own), "exchange of places"
        )
        self._store, self._round = store, place
        self._ask(self._handler)
        return place

    def _open_worker_store(self, address: str) -> TCPStore:
        port = self._spec.master_port
        if port:
            try:
                return host_workers_store(address, port)
            except elastic.RendezvousConnectionError as error:
                log.info("the store of the workers is on another port than %d: %s", port, error)
        return host_workers_store(address)

    # Whether others wait ------------------------------------------------------------------------------

    def _ask(self, handler: elastic.RendezvousHandler) -> None:
        """Asks in a thread, until `_asking` is closed."""
        term, stop = self.inbox.term, threading.Event()

        def ask() -> None:
            news = None
            while news is None and not stop.wait(self._spec.monitor_interval):
                try:
                    waiting = handler.num_nodes_waiting()
                    if waiting > 0:
                        news = News(What.COME, f"{waiting} node(s) wait for the next round")
                except (elastic.RendezvousError, DistError) as error:
                    news = News(What.LOST, f"the rendezvous is lost: {error}")
            if news is not None:
                self.inbox.put(term, news)

        thread = in_background("whether nodes wait", ask)
        self._asking.callback(thread.join, _JOIN_THREAD)
        self._asking.callback(stop.set)

    # The end ------------------------------------------------------------------------------------------

    def fail(self, why: str, result: str = "") -> None:
        self._shut_down()

    def await_others(self, said: str, *, as_host_only: bool) -> bool:
        store, where = self._store, self._round
        assert store is not None and where is not None
        if as_host_only and where.group_rank != 0:
            return False
        timeout = self._exit_barrier_timeout

        def wait() -> News:
            late = await_all(store, where.group_rank, where.group_world_size, timeout)
            names = ", ".join(map(str, late))
            return News(What.CLOSED, f"gave up waiting after {timeout:g} s for node {names}" if late else "")

        self._await(wait)
        return True

    def finish(self, result: str) -> None:
        self._shut_down()

    def close(self) -> None:
        self._asking.close()
        self._worker_store = None
        super().close()

    def _shut_down(self) -> None:
        self._asking.close()
        handler, self._handler = self._handler, None
        if handler is not None:
            bounded("the end of the rendezvous", handler.shutdown, END_TIMEOUT)


def exchange(store: Store, rank: int, size: int, spec: WorkerSpec, address: str) -> Round:
    """Publishes how many ranks this node has, and finds its place; O(size) operations in all.

    As in torch's agents, the first node reads what all have written; here it passes on the whole list.

    Args:
        store: fresh in each round.
        rank: this node's number.
        size: number of nodes.
        spec: the workers: how many this node has, and what they do.
        address: of the store of the ranks, on the first node.

    Raises:
        RendezvousTimeoutError: a node has not written anything; says which.
        RendezvousConnectionError: the store is lost.
    """
    store.set_timeout(timedelta(seconds=EXCHANGE_TIMEOUT))
    try:
        store.set(f"ranks/{rank}", json.dumps([spec.local_world_size, spec.role]))
        if rank == 0:
            nodes = [json.loads(_get(store, f"ranks/{other}", other)) for other in range(size)]
            store.set("nodes", json.dumps([address, nodes]))
        address, nodes = json.loads(_get(store, "nodes", 0))
    except DistNetworkError as error:
        raise elastic.RendezvousConnectionError(f"the rendezvous store is lost: {error}") from error
    same = [(other, count) for other, (count, its_role) in enumerate(nodes) if its_role == spec.role]
    world_size = sum(count for count, _ in nodes)
    return Round(
        address,
        world_size=world_size,
        base_rank=sum(count for count, _ in nodes[:rank]),
        group_rank=rank,
        group_world_size=size,
        role_rank=sum(count for other, count in same if other < rank),
        role_world_size=sum(count for _, count in same),
        formation_size=world_size,
        node=str(rank),
    )


def await_all(store: Store, rank: int, size: int, timeout: float) -> list[int]:
    """Waits until all nodes are done, and all of them know it.

    If the store's host ended first, a node that still waits would lose the store and report a failure. A test
    suite saw that once; 80 runs of the test under load did not.

    Args:
        store: of the round.
        rank: this node's number.
        size: number of nodes.
        timeout: seconds to wait.

    Returns:
        The nodes that were not done in time.

    Raises:
        DistNetworkError: the store was lost first.
    """
    store.set(f"done/{rank}", "")
    try:
        store.wait([f"done/{other}" for other in range(size)], timedelta(seconds=max(timeout, 0.001)))
    except DistStoreError:
        return [other for other in range(size) if not store.check([f"done/{other}"])]
    with contextlib.suppress(DistError):  # the store's host may have ended, or a node may have been lost
        store.set(f"knows/{rank}", "")
        seconds = max(min(timeout, END_TIMEOUT), 0.001)
        store.wait([f"knows/{other}" for other in range(size)], timedelta(seconds=seconds))
    return []


def _get(store: Store, key: str, rank: int) -> str:
    try:
        return store.get(key).decode()
    except DistStoreError as error:
        raise elastic.RendezvousTimeoutError(
            f"node {rank} joined the round, but did not say how many ranks it has within "
            f"{EXCHANGE_TIMEOUT:g} s; check that it runs"
        ) from error


def _clone(store: Store) -> Store:
    """A client of its own, where torch can make one: the handler's is busy with heartbeats."""
    innermost: object = store
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    if type(innermost).__module__ != Store.__module__:
        return store  # written in Python: nothing would keep the clone that a PrefixStore makes of it
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return store
    return clone
