"""The other nodes, by our own rendezvous (`ft_wrapper.rendezvous`).

Under the policy ``group`` every change of membership is a new round: the node ends its ranks and comes again.
Once the ranks have formed a wrapped job, the agent that hosts their store goes over to ``rank``: from then on
nodes take and lose seats while the ranks of the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousError

from ..exception import StoreError
from ..rendezvous.backend import TcpBackend
from ..rendezvous.handler import FtRendezvousHandler
from ..rendezvous.operations import nodes_waiting
from ..rendezvous.settings import Identity, Settings, TcpOptions
from ..rendezvous.state import GROUP, RANK, Node, Seat, State
from ..store import TCPStore
from ..store import keys as names
from .background import bounded, in_background
from .deaths import holders, log_deaths
from .nodes import News, Nodes, What
from .round import Round
from .watched_job import connect

log = logging.getLogger(__name__)

PLACE_TIMEOUT = 2.0
"""Seconds that looking for one's place may take; it is looked for again."""
LEAVE_TIMEOUT = 5.0
"""Seconds that leaving may take, before the ranks are signalled all the same."""
END_TIMEOUT = 15.0
"""Seconds that the end may take; the host of the store waits for the others' goodbyes within it."""
_FOREVER = timedelta(days=14)  # torch counts a wait's milliseconds in 32 bits


class FtNodes(Nodes):
    """This node's part, by a `FtRendezvousHandler`. It connects with the first round.

    Args:
        endpoint: ``host:port`` of the rendezvous store.
        settings: of the rendezvous.
        identity: who this node is.
        tcp: how the store is reached.
        replaces: whether the job may go over to the policy ``rank``.
        exit_barrier_timeout: seconds for which this node waits for the others, when its own ranks are done.
    """

    def __init__(
        self,
        endpoint: str,
        settings: Settings,
        identity: Identity,
        tcp: TcpOptions,
        *,
        replaces: bool,
        exit_barrier_timeout: float,
    ) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._settings = settings
        self._identity = identity
        self._tcp = tcp
        self._replaces = replaces
        self._exit_barrier_timeout = exit_barrier_timeout
        self._handler: FtRendezvousHandler | None = None
        self._agents: Store | None = None
        self._round: Round | None = None
        self._looking: threading.Thread | None = None
        self._has_place = False
        # What the handler's threads look at: the term, and the record in which it began.
        self._term: tuple[int, State] | None = None

    # Rounds ------------------------------------------------------------------------------------------

    def next_round(self) -> Round:
        self._term = None
        self.inbox.begin_term()
        if self._handler is None:
            self._handler = FtRendezvousHandler(
                self._settings,
                self._identity,
                TcpBackend(self._endpoint, self._tcp),
                on_unseated=self._unseated,
                on_change=self._look,
                on_lost=self._lost,
            )
        handler = self._handler
        while True:
            info = handler.next_rendezvous()
            joined, node = handler.joined, handler.node
            assert joined is not None
            assert node is not None
            workers = info.bootstrap_store_info
            assert workers is not None
            address = f"{workers.master_addr}:{workers.master_port}"
            try:
                store = connect(address)
                break
            except StoreError:
                # Its host may just have been lost: then the others notice, and there is another round.
                limit = 2 * self._settings.keep_alive_timeout
                if handler.wait_for_change(joined.version, limit) is None:
                    raise
        try:
            where = round_of(joined, node, address)
            if where.formed:
                predecessors = holders(store, _slots(joined.seat_of(node)))
                log_deaths(store, predecessors, f"node {node.id} has been started again", return_=True)
        finally:
            store.close()
        info.store.delete_key(_done(node))  # it may have been lost, and be back
        self._agents, self._round = info.store, where
        self._term = (self.inbox.term, joined)
        newest = handler.state
        if newest is not None:
            self._look(newest)  # what has changed meanwhile
        if where.group_rank == 0 and self._replaces and not where.formed:
            in_background("waiting for the head", lambda: self._go_over(handler, address))
        return where

    def _go_over(self, handler: FtRendezvousHandler, address: str) -> None:
        """Waits, in a thread, until the ranks have formed a job: then they are replaced one by one.

        This node hosts the store of the ranks. It is closed with the round, and that ends the wait.
        """
        try:
            # torch's own client: ours would try to find the store again.
            client = connect(address).torch_store
            while not client.check([names.HEAD]):
                client.wait([names.HEAD], _FOREVER)
            if handler.adopt_rank_policy():
                log.info("a job has formed: from now on nodes are replaced while the others go on")
        except (StoreError, DistError, RendezvousError):
            log.debug("the round ended before a job had formed", exc_info=True)

    def has_place(self) -> bool:
        handler = self._handler
        if handler is None:
            return False
        if self._looking is None or not self._looking.is_alive():
            self._has_place = False
            self._looking = in_background("looking for the place", lambda: self._look_for_place(handler))
        self._looking.join(PLACE_TIMEOUT)
        return not self._looking.is_alive() and self._has_place

    def _look_for_place(self, handler: FtRendezvousHandler) -> None:
        state, node = handler.refresh(), handler.node
        self._has_place = node is not None and not state.closed and state.seat_of(node) is not None

    # Told by the handler's threads -------------------------------------------------------------------

    def _look(self, state: State) -> None:
        """Told each record."""
        began, handler = self._term, self._handler
        if began is None or handler is None or handler.node is None:
            return
        term, joined = began
        if state.version < joined.version:
            return
        news = what_follows(state, handler.node, joined.round)
        if news is not None:
            self.inbox.put(term, news)

    def _lost(self, error: Exception) -> None:
        if self._term is not None:
            self.inbox.put(self._term[0], News(What.LOST, f"the rendezvous store is lost: {error}"))

    def _unseated(self, seats: tuple[Seat, ...]) -> None:
        """This node has taken others out. Called in the thread that keeps it alive, so another one works."""
        handler, agents, where = self._handler, self._agents, self._round
        if handler is None or agents is None or where is None:
            return
        lost = ", ".join(str(seat.occupant) for seat in seats)
        in_background(f"loss of node {lost}", lambda: self._bury(handler, agents, where.address, seats))

    def _bury(
        self, handler: FtRendezvousHandler, agents: Store, address: str, seats: tuple[Seat, ...]
    ) -> None:
        state = handler.refresh()
        for seat in seats:
            if seat.occupant is not None and state.place_of(seat.occupant) is None:
                agents.set(_done(seat.occupant), "lost")  # whoever waits for all to be done waits no more
        if state.policy != RANK:
            return  # all ranks are started anew, or their store went with the node
        store = connect(address)
        try:
            for seat in seats:
                dead = holders(store, _slots(seat))
                # Read after these: whoever is given the seat logs them itself, before it starts others.
                if _is_empty(handler.refresh(), seat):
                    log_deaths(store, dead, f"node {seat.occupant} was lost", return_=False)
        finally:
            store.close()

    # The end -----------------------------------------------------------------------------------------

    def leave(self, why: str) -> None:
        handler = self._handler
        if handler is None:
            return
        if handler.is_host:
            # The others cannot go on without the store.
            self.fail(f"node {handler.node}, which hosts the rendezvous store, has left: {why}")
            return
        self._term = None
        bounded("leaving the rendezvous", lambda: self._leave(handler, why), LEAVE_TIMEOUT)

    def _leave(self, handler: FtRendezvousHandler, why: str) -> None:
        seat, node, state, where = handler.seat, handler.node, handler.state, self._round
        store: TCPStore | None = None
        try:
            dead = []
            if state is not None and state.policy == RANK and seat is not None and where is not None:
                store = connect(where.address, timedelta(seconds=LEAVE_TIMEOUT / 2))
                dead = holders(store, _slots(seat))
            if self._agents is not None and node is not None:
                self._agents.set(_done(node), "left")
            handler.leave()
            if store is not None:
                for thread in log_deaths(store, dead, f"node {node} has left: {why}", return_=False):
                    thread.join(0.5)
        finally:
            if store is not None:
                store.close()

    def fail(self, why: str) -> None:
        handler = self._handler
        if handler is None or handler.node is None:
            return
        self._term = None

        def close() -> None:
            handler.set_closed(why)

        bounded("ending the job", close, LEAVE_TIMEOUT)

    def await_others(self, *, as_host_only: bool) -> bool:
        handler, agents, where = self._handler, self._agents, self._round
        assert handler is not None
        assert agents is not None
        assert where is not None
        state = handler.state
        needed = handler.is_host or where.group_rank == 0 or state is None or state.policy == GROUP
        if as_host_only and not needed:
            return False
        timeout = None if as_host_only else self._exit_barrier_timeout
        term = self.inbox.term
        in_background("exit barrier", lambda: self._await(handler, agents, term, timeout))
        return True

    def _await(self, handler: FtRendezvousHandler, agents: Store, term: int, timeout: float | None) -> None:
        why = ""
        try:
            why = _await_all(handler, agents, timeout)
        except (RendezvousError, StoreError, DistError) as error:
            why = f"the other nodes are not waited for: {error}"
        finally:
            self.inbox.put(term, News(What.CLOSED, why))

    def finish(self) -> None:
        """Closes all, if nobody has yet: who waits as a spare ends then, too."""
        self._term = None
        handler = self._handler
        if handler is not None:
            self._end("the end of the rendezvous", lambda: _ignore(handler.shutdown()))

    def close(self) -> None:
        self._term = None
        handler = self._handler
        if handler is not None:
            is_over = handler.state is not None and handler.state.closed
            self._end("leaving", (lambda: _ignore(handler.shutdown())) if is_over else handler.leave)
        super().close()

    def _end(self, what: str, end: Callable[[], None]) -> None:
        self._handler = None
        bounded(what, end, END_TIMEOUT)


def what_follows(state: State, node: Node, round_number: int) -> News | None:
    """What a node that has ranks running does about a record; None: nothing.

    Args:
        state: the record.
        node: the node.
        round_number: the round that its ranks were started in.
    """
    if state.closed:
        return News(What.OVER, f"the job was ended: {state.reason}") if state.reason else News(What.CLOSED)
    if nodes_waiting(state, node, round_number) > 0:
        if state.place_of(node) is None:
            return News(What.COME, f"this node ({node}) was taken out of the rendezvous")
        return News(What.COME, "the nodes come together again")
    empty = [seat.last for seat in state.seats if seat.occupant is None]
    if state.policy == GROUP and empty:
        return News(What.COME, f"node {', '.join(empty)} is lost")
    return None


def _await_all(handler: FtRendezvousHandler, agents: Store, timeout: float | None) -> str:
    """Waits until all nodes that take part are done; returns who is not in time, in words."""
    node = handler.node
    assert node is not None
    agents = agents.clone()  # type: ignore[attr-defined]
    agents.set(_done(node), "")
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        state = handler.refresh()
        waited_for = [other for other in state.participants if not agents.check([_done(other)])]
        if state.closed or not waited_for:
            return ""
        left = _FOREVER if deadline is None else timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            agents.wait([_done(other) for other in waited_for], left)
        except DistNetworkError:
            raise
        except DistStoreError:
            return f"not waited for any longer, after {timeout:g} s: node {', '.join(map(str, waited_for))}"


def round_of(state: State, node: Node, address: str) -> Round:
    """A node's place in a round.

    Args:
        state: the record in which it has its seat.
        node: the node.
        address: of the store of the ranks.
    """
    seat = state.seat_of(node)
    assert seat is not None
    assert seat.group_rank is not None
    same = [other for other in state.seats if other.role == node.role]
    before = [other for other in same if other.base_slot < seat.base_slot]
    return Round(
        address,
        world_size=state.next_slot,
        base_rank=seat.base_slot,
        group_rank=seat.group_rank,
        group_world_size=len(state.seats),
        role_rank=sum(other.nproc for other in before),
        role_world_size=sum(other.nproc for other in same),
        formation_size=state.formation_size,
        restarts=state.restarts,
        formed=state.policy == RANK,
        node=node.id,
    )


def _slots(seat: Seat | None) -> range:
    assert seat is not None
    return range(seat.base_slot, seat.base_slot + seat.nproc)


def _is_empty(state: State, seat: Seat) -> bool:
    return any(other.base_slot == seat.base_slot and other.occupant is None for other in state.seats)


def _done(node: Node) -> str:
    return f"done/{node.name}"


def _ignore(told: bool) -> None:
    """Whether the others could be told is logged already."""
