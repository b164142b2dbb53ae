"""The other nodes, if there are any, by our own rendezvous (`ft_wrapper.rendezvous`).

Under the policy ``group`` every change of membership is a new round: the node ends its ranks and joins again.
Once the ranks have formed a wrapped job, the agent of group rank 0 switches to ``rank``: from then on nodes
take and lose seats while other nodes' ranks go on.

A node without others (`OneNode`) has a record, too: commands are written into it.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousInfo

from ..exception import RestartTimeout, StoreError, StoreUnavailable
from ..protocol import Agreement
from ..protocol import keys as names
from ..protocol.deaths import holders, report_lost
from ..protocol.notice import Notice
from ..protocol.records import Member
from ..rendezvous import drains
from ..rendezvous.backends import Backend, announce_endpoint
from ..rendezvous.handler import FtRendezvousHandler
from ..rendezvous.moves import give_notice
from ..rendezvous.operations import nodes_waiting
from ..rendezvous.presence import Watcher
from ..rendezvous.record import Drain, Node, NodePlace, RendezvousRecord, RoundPolicy, Seat
from ..rendezvous.register import RECORD_KEY, Board, RecordRegister, done_key, end_key
from ..rendezvous.settings import Identity, RendezvousSettings
from ..store import StoreMixin, TCPStore, TCPStoreServer, connect, secret
from ..store.address import host_port, loopback
from ..store.bounded import bounded, call_in_thread, in_background
from ..store.tcp import SERVER_IS_LIBUV
from .job_in_store import STORE_TIMEOUT, JobInStore
from .node_bench import NodeBench, Process, begun, measure_all
from .node_check import NodeCheck, await_pass
from .nodes import Nodes
from .process import Job
from .rounds import INFRASTRUCTURE, JobResult, News, Round, What, alone, worst

log = logging.getLogger(__name__)

_PLACE_TIMEOUT = 2.0  # seconds that a look for this node's place may take; it is repeated
_LEAVE_TIMEOUT = 2.0  # seconds that leaving may take, before the ranks are signalled all the same
# Seconds that the end may take; the host of the store waits for the other nodes' goodbyes within it.
_END_TIMEOUT = 15.0
_WATCHER_TIMEOUT = 5.0  # seconds that a thread may take to end once woken
_LOOK_AGAIN = 10.0  # seconds after which a thread checks whether its round still runs
# Seconds after which a wait for other nodes checks which ones are left: one may leave without notice.
_LOOK_AT_NODES = 300.0
_FOREVER = timedelta(days=14)  # torch counts a wait's milliseconds in 32 bits


class FtNodes(Nodes):
    """This node's part, by a `FtRendezvousHandler`. It connects with the first round.

    Args:
        make_backend: connects to where the record is kept; called with the first round.
        settings: of the rendezvous.
        identity: who this node is.
        replaces: whether the job may switch to the policy ``rank``.
        exit_barrier_timeout: seconds to wait for the other nodes, once this node's ranks are done.
        check: what it has to pass before it takes a seat; None: nothing.
        bench: how nodes are measured before their ranks are first started; None: not at all.
        where: at which endpoint the nodes meet, and for how long it is tried, for the log.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        settings: RendezvousSettings,
        identity: Identity,
        *,
        replaces: bool,
        exit_barrier_timeout: float,
        check: NodeCheck | None = None,
        bench: NodeBench | None = None,
        where: str = "",
    ) -> None:
        super().__init__()
        self._make_backend = make_backend
        self._settings = settings
        self._identity = identity
        self._replaces = replaces
        self._exit_barrier_timeout = exit_barrier_timeout
        self._check = check
        self._bench = bench
        self._handler: FtRendezvousHandler | None = None
        self._agents: Store | None = None
        self._round: Round | None = None
        self._looking: threading.Thread | None = None
        self._has_place = False
        self._out_of_reach = ""
        self._left_unheard = False
        self._where = where
        self._has_said_wait = False
        # What the handler's threads look at: the term, and the record in which it began.
        self._term: tuple[int, RendezvousRecord] | None = None
        self._knows_that_formed = False

    # Rounds ------------------------------------------------------------------------------------------

    def next_round(self) -> Round:
        self._term = None
        self.inbox.begin_term()
        self._has_said_wait = False
        if self._handler is None:
            log.info("looking for the rendezvous store at %s", self._where)
            backend = self._make_backend()
            with contextlib.closing(backend.connect()) as store:
                secret.announce(store, self.agent, RECORD_KEY)
            board = Board(self._evicted, self._look, self._lost)
            self._handler = FtRendezvousHandler(self._settings, self._identity, backend, board)
        handler = self._handler
        self._await_pass(handler, self._check)
        bench = self._bench if self._round is None else None
        if bench is not None and handler.begin().executor.register.latest().complete:
            self._await_pass(handler, bench)  # it comes later, and gives up no seat if it fails
            bench = None
        while True:
            with contextlib.ExitStack() as cleanup:
                process = None if bench is None else cleanup.enter_context(begun())
                info, where = self._take_seat(handler)
                # Spares are checked when they are needed: they may have waited for weeks.
                if handler.was_spare and not self._await_pass(handler, self._check, info.store):
                    continue
                if self._passes_bench(handler, info.store, where, process):
                    break
        joined, node = handler.joined, handler.node
        assert joined is not None and node is not None
        # It may have been lost and be back, in this agent or in another one.
        numbers = range(max(0, node.incarnation - 2), node.incarnation + 1)
        keys = [done_key(dataclasses.replace(node, incarnation=number).name) for number in numbers]
        call_in_thread(lambda: [info.store.delete_key(key) for key in keys], "forgetting this node's end")
        self._agents, self._round = info.store, where
        self._knows_that_formed = where.formed
        self._term = (self.inbox.term, joined)
        newest = handler.record
        if newest is not None:
            self._look(newest)  # what has changed meanwhile
        if where.group_rank == 0 and self._replaces and not where.formed:
            in_background("waiting for the head", lambda: self._switch_to_rank(handler, where))
        return where

    def _take_seat(self, handler: FtRendezvousHandler) -> tuple[RendezvousInfo, Round]:
        """Waits for this node's seat in a round whose store answers; logs the deaths of earlier holders."""
        while True:
            info = handler.next_rendezvous()
            joined, node, workers = handler.joined, handler.node, info.bootstrap_store_info
            assert joined is not None and node is not None and workers is not None
            address = host_port(workers.master_addr, workers.master_port)
            agreed_in = handler.backend.workers_store(joined.round)
            try:
                store = connect(agreed_in or address, STORE_TIMEOUT)
                break
            except StoreError:
                # Its host may just have been lost: then the other nodes notice, and there is another round.
                limit = 2 * self._settings.keep_alive_timeout
                if handler.board.wait(joined.version, limit) is None:
                    raise
        where = round_of(joined, node, address, agreed_in)
        with contextlib.closing(store):
            if where.formed:
                own = joined.seat_of(node)
                assert own is not None
                slots = drains.slots_of(own)
                predecessors = call_in_thread(lambda: holders(Agreement(store), slots), "looking at the seat")
                why = f"was lost: node {node.id} has been started again"
                # If it is about to be checked, the other nodes do not wait for it.
                comes = not (handler.was_spare and self._check)
                log_deaths(store, dict.fromkeys(predecessors, why), return_=comes)
        return info, where

    def _passes_bench(
        self, handler: FtRendezvousHandler, agents: Store, where: Round, process: Process | None
    ) -> bool:
        """Has the nodes measured before their ranks are first started; returns whether they can start."""
        bench, out = self._bench, None
        if bench is None:
            return True
        if not where.formed:
            measure = functools.partial(measure_all, bench, handler, agents, process)
            out = call_in_thread(measure, "measuring the nodes")
        if out is None:
            return process is None or self._await_pass(handler, bench, agents)
        if where.group_rank in out:
            kept_out = dataclasses.replace(bench, command=out[where.group_rank])
            self._await_pass(handler, kept_out, agents)
        return not out

    def _await_pass(
        self, handler: FtRendezvousHandler, check: NodeCheck | None, agents: Store | None = None
    ) -> bool:
        """Waits, without a place in the record, until this node passes; returns whether it passed at once.

        Args:
            handler: connected by this method.
            check: what it has to pass; None: nothing.
            agents: the store of the round in which it has its seat, if it has one.
        """
        if check is None:
            return True
        presence = handler.begin()

        def quarantine(why: str) -> None:
            presence.quarantine(why)
            if agents is not None:
                with contextlib.suppress(DistError):
                    agents.set(done_key(presence.node.name), "kept out")  # the exit barrier does not wait

        return await_pass(check, f"node {presence.node}", quarantine, presence.wait_in_quarantine)

    def _switch_to_rank(self, handler: FtRendezvousHandler, where: Round) -> None:
        """Waits, in a thread, until the ranks have formed a job: then single failed ranks are replaced."""
        while self._is_on(where):
            try:
                if self._await_head(where):
                    handler.adopt_rank_policy()
                return
            except (StoreError, DistError, RendezvousError) as error:
                state = handler.record
                passes = isinstance(error.__cause__ or error, StoreUnavailable)
                if not passes or state is None or state.closed:
                    log.debug("the round ended before a job had formed", exc_info=True)
                    return

    def _await_head(self, where: Round) -> bool:
        """Waits until the ranks of a round have formed a job; False if the round ends first."""
        store = connect(where.store, STORE_TIMEOUT)
        if isinstance(store, TCPStore):
            # This node hosts it. It is closed with the round, which ends the wait of torch's own client; ours
            # would look for the store again.
            client, first = store.torch_store, names.wake_head(names.BEFORE_FIRST + 1)
            while not client.check([names.HEAD]):
                # torch's older server wakes waiters for a set, but not for a compare_set.
                client.wait([names.HEAD if SERVER_IS_LIBUV else store.wake_name(first)], _FOREVER)
            return True
        with contextlib.closing(store):
            while self._is_on(where):
                first = names.wake_head(names.BEFORE_FIRST + 1)
                if store.check([names.HEAD]) or store.wait_for(first, _LOOK_AGAIN) is not None:
                    return True
            return False

    def _is_on(self, where: Round) -> bool:
        return self._round is where and self._term is not None

    def look_for_place(self) -> tuple[bool, str]:
        handler = self._handler
        if handler is None:
            return False, ""

        if self._looking is None or not self._looking.is_alive():  # one at a time: a store may hang
            self._has_place = False
            self._looking = in_background("looking for the place", lambda: self._look_into_record(handler))
        self._looking.join(_PLACE_TIMEOUT)
        is_ours = not self._looking.is_alive() and self._has_place
        return is_ours, self._out_of_reach

    def _look_into_record(self, handler: FtRendezvousHandler) -> None:
        try:
            state, node = handler.refresh(), handler.node
        except RendezvousConnectionError as error:
            self._out_of_reach = str(error)
            return
        self._out_of_reach = ""
        self._has_place = node is not None and not state.closed and state.seat_of(node) is not None

    def states(self) -> dict[str, int]:
        if (state := self._record) is None:
            return {}
        active, waiting = len(state.participants), len(state.waiting)
        lost, spare = len(state.seats) - active, len(state.spares)
        return {"active": active, "lost": lost, "waiting": waiting, "spare": spare}

    def have_formed(self) -> bool:
        state = self._record
        return state is not None and state.policy is RoundPolicy.RANK

    @property
    def _record(self) -> RendezvousRecord | None:
        return None if self._handler is None else self._handler.record

    # Called by the handler's threads -----------------------------------------------------------------

    def _look(self, state: RendezvousRecord) -> None:
        """Called with each record."""
        self._out_of_reach = ""
        began, handler = self._term, self._handler
        if handler is None or handler.node is None:
            return
        if began is None:
            waits_for = what_is_missing(state, handler.node, self._settings.join_timeout)
            if waits_for and not self._has_said_wait:
                self._has_said_wait = True
                log.info("node %s waits: %s", handler.node, waits_for)
            return
        term, joined = began
        if state.version < joined.version:
            return
        if state.policy is RoundPolicy.RANK and not self._knows_that_formed:
            self._knows_that_formed = True
            log.info("a job has formed: from now on nodes are replaced while the other nodes go on")
        for one in news_in(state, handler.node, joined.round):
            self.inbox.put(term, one)

    def _lost(self, error: Exception) -> None:
        why = f"the rendezvous store is lost: {error}"
        if self._term is not None:
            self.inbox.put(self._term[0], News(What.LOST, why, result=JobResult(INFRASTRUCTURE, why)))

    def _evicted(self, seats: tuple[Seat, ...]) -> None:
        """This node has evicted others. Called in the keep-alive thread, so the work is done in another."""
        handler, agents, where = self._handler, self._agents, self._round
        if handler is None or agents is None or where is None:
            return
        lost = ", ".join(str(seat.occupant) for seat in seats)
        in_background(f"loss of node {lost}", lambda: self._report_loss(handler, agents, where.store, seats))

    def _report_loss(
        self, handler: FtRendezvousHandler, agents: Store, address: str, seats: tuple[Seat, ...]
    ) -> None:
        state = handler.refresh()
        for seat in seats:
            if seat.occupant is not None and state.place_of(seat.occupant) is None:
                agents.set(done_key(seat.occupant.name), "lost")  # the exit barrier no longer waits for it
        if state.policy is not RoundPolicy.RANK:
            return  # all ranks are restarted, or their store went with the node
        with contextlib.closing(connect(address, STORE_TIMEOUT)) as store:
            dead = [(seat, holders(Agreement(store), drains.slots_of(seat))) for seat in seats]
            # Read after these: a node that is given a seat logs them itself, before it starts others.
            state = handler.refresh()
            lost = {
                member: f"went down with node {seat.occupant}"
                for seat, members in dead
                if is_empty(state, seat)
                for member in members
            }
            log_deaths(store, lost, return_=False)

    # The end -----------------------------------------------------------------------------------------

    def leave(self, why: str) -> None:
        handler = self._handler
        if handler is None:
            return
        if handler.backend.is_host:
            # The others cannot go on without the store.
            why = f"node {handler.node}, which hosts the rendezvous store, has left: {why}"
            self.fail(why, JobResult(INFRASTRUCTURE, why).to_text())
            return
        self._term = None
        self._left_unheard = True
        bounded("leaving the rendezvous", lambda: self._leave(handler, why), _LEAVE_TIMEOUT)

    def _leave(self, handler: FtRendezvousHandler, why: str) -> None:
        record, node, where = handler.record, handler.node, self._round
        seat = record.seat_of(node) if record and node else None
        with contextlib.ExitStack() as cleanup:
            store: StoreMixin | None = None
            if self.have_formed() and seat is not None and where is not None:
                store = connect(where.store, timedelta(seconds=_LEAVE_TIMEOUT / 2))
                cleanup.callback(store.close)
                dead = holders(Agreement(store), drains.slots_of(seat))
            if self._agents is not None and node is not None:
                self._agents.set(done_key(node.name), "left")
            handler.leave()
            self._left_unheard = False
            if store is not None:
                left = dict.fromkeys(dead, f"left with node {node}: {why}")
                log_deaths(store, left, return_=False).join(0.5)

    def drain(self, within: float, why: str, notice: Notice | None = None) -> str:
        handler, where = self._handler, self._round
        node = None if handler is None else handler.node
        if handler is None or where is None or node is None:
            return "it has no ranks yet"
        asked = Drain(node.name, (), within, why)
        given = notice and dataclasses.replace(notice, leaving=(node.name,))

        def ask() -> None:
            with contextlib.closing(connect(where.store, timedelta(seconds=_LEAVE_TIMEOUT / 2))) as store:
                slots, least = drains.living_slots(store)
            handler.change(lambda record: give_notice(drains.request(record, asked, slots, least), given))

        return _asked(ask, "asking to drain this node")

    def notice(self, notice: Notice) -> str:
        handler = self._handler
        if handler is None or handler.node is None:
            return "it has no ranks yet"
        leaves = notice.ends or not notice.id
        given = dataclasses.replace(notice, leaving=(handler.node.name,) if leaves else ())
        known = handler.record.notice if handler.record is not None else None
        change = functools.partial(give_once, notice=given, known=known)
        return _asked(lambda: handler.change(change), "giving a notice")

    @property
    def keeps_others(self) -> bool:
        handler, where = self._handler, self._round
        hosts = where is not None and where.group_rank == 0 and not where.agreed_in
        return hosts or (handler is not None and handler.backend.is_host)

    def fail(self, why: str, result: str = "") -> None:
        handler = self._handler
        if handler is None or handler.node is None:
            return
        self._term = None
        bounded("ending the job", lambda: handler.set_closed(why, result), _LEAVE_TIMEOUT)

    def closed_with(self) -> JobResult | None:
        state = self._record
        return None if state is None else JobResult.from_text(state.result)

    def await_others(self, said: str, *, as_host_only: bool) -> bool:
        handler, where = self._handler, self._round
        assert handler is not None and where is not None
        state = handler.record
        needed = self.keeps_others or state is None or state.policy is RoundPolicy.GROUP
        if as_host_only and not needed:
            return False
        timeout = None if as_host_only else self._exit_barrier_timeout
        self._await(lambda: _await_all(handler, where, timeout, said))
        return True

    def finish(self, result: str) -> None:
        """Closes the rendezvous unless it is closed: this also ends waiting spare nodes."""
        self._term = None
        handler = self._handler
        if handler is not None:
            self._end("the end of the rendezvous", lambda: handler.shutdown(result))

    def close(self) -> None:
        self._term = None
        handler = self._handler
        if handler is not None:
            is_over = handler.record is not None and handler.record.closed
            if self._left_unheard or self._out_of_reach:
                self._end("leaving", handler.abandon)
            else:
                self._end("leaving", handler.shutdown if is_over else handler.leave)
        super().close()

    def _end(self, what: str, end: Callable[[], object]) -> None:
        self._handler = None
        bounded(what, end, _END_TIMEOUT)


class OneNode(Nodes):
    """No other nodes: this one hosts the store of its ranks, a new one for each round.

    Args:
        job: its ranks.
        address: of this host; the loopback if empty, at which only this host reaches the store.
        port: where the store listens; 0 for a free port, another one in each round.
        check: what the node has to pass before each round; None: nothing.
    """

    def __init__(self, job: Job, address: str = "", port: int = 0, check: NodeCheck | None = None) -> None:
        super().__init__()
        self._check = check
        self._job = job
        self._address = address or loopback()
        self._port = port
        self._rounds = 0
        self._of_round = contextlib.ExitStack()
        self._given = secret.job_secret()

    def next_round(self) -> Round:
        self._of_round.close()
        self.inbox.begin_term()
        if self._given is None:  # a new secret, so that nothing of an earlier round counts
            secret.use(os.urandom(32))
        if self._check is not None:
            await_pass(self._check, "this node", lambda why: None, threading.Event().wait)
        try:
            server = TCPStoreServer(self._port, self._address)
        except StoreError as error:
            if not self._port:
                raise
            raise ValueError(
                f"--master-port {self._port} cannot be used on this host: {error.__cause__}; choose another "
                "port, or leave it out"
            ) from error
        self._of_round.callback(server.close)
        self._watch(server)
        self._rounds += 1
        return alone(host_port(self._address, server.port), self._job.nproc)

    def drain(self, within: float, why: str, notice: Notice | None = None) -> str:
        return "no other node would be left"

    def notice(self, notice: Notice) -> str:
        return _asked(lambda: self._register.change(lambda old: give_notice(old, notice)), "giving a notice")

    def close(self) -> None:
        self._of_round.close()
        secret.use(self._given)
        super().close()

    def _watch(self, server: TCPStoreServer) -> None:
        """Writes the record, and waits for commands in a thread, to the end of the round."""
        address = host_port(self._address, server.port)
        nproc, role = self._job.nproc, self._job.role
        node = Node(socket.gethostname(), self._rounds, self._address, nproc, role)
        record = RendezvousRecord(
            min_nodes=1,
            max_nodes=1,
            round=self._rounds,
            complete=True,
            policy=RoundPolicy.RANK,
            formation_size=nproc,
            next_slot=nproc,
            seats=(Seat(0, 0, nproc, role, node, node.id),),
        )
        store, term = TCPStore(self._address, server.port, timeout=STORE_TIMEOUT), self.inbox.term

        def look(state: RendezvousRecord) -> None:
            for one in news_in(state, node, record.round):
                self.inbox.put(term, one)

        announce_endpoint(store, record.round, address)
        register = RecordRegister(store, record, Board(on_change=look))
        register.touch()
        self._register = waker = RecordRegister(store.clone(), record)
        watcher = Watcher(node, register)
        watcher.start()

        def end() -> None:
            # The thread is woken first: otherwise torch's client would print that it has lost the server.
            watcher.stop()
            with contextlib.closing(waker.store), contextlib.suppress(StoreError, DistError, RendezvousError):
                waker.touch()
                watcher.join(_WATCHER_TIMEOUT)

        self._of_round.callback(end)


def _asked(ask: Callable[[], object], what: str) -> str:
    """Asks the other nodes; returns why they could not be asked, or refused, else nothing. Bounded."""
    try:
        call_in_thread(ask, what=what, seconds=_LEAVE_TIMEOUT)
    except (StoreError, DistError, RendezvousError, ValueError, RestartTimeout) as error:
        return str(error)
    return ""


def log_deaths(store: StoreMixin, lost: Mapping[Member, str], *, return_: bool) -> threading.Thread:
    """Logs deaths in a background thread, until the next iteration leaves them out.

    Args:
        store: of the ranks; not used after the return.
        lost: the dead members, each with the reason, for people.
        return_: whether replacements come, for which a restart may wait a little.
    """
    own = store.clone()

    def report() -> None:
        with contextlib.closing(own):
            report_lost(Agreement(own), lost, returns=return_)

    names = ", ".join(member.name for member in lost)
    return in_background(f"reporting the death of {names}", report)


def _await_all(handler: FtRendezvousHandler, where: Round, timeout: float | None, said: str) -> News:
    """Waits until all nodes that take part are done; names those for which the wait timed out."""
    node = handler.node
    assert node is not None
    agents = handler.agents_store()
    agents.set(end_key(node.id), said)
    agents.set(done_key(node.name), "")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        state = handler.refresh()
        if state.closed:
            return News(What.CLOSED, result=JobResult.from_text(state.result))
        waited_for = [other for other in state.participants if not agents.check([done_key(other.name)])]
        left = deadline - time.monotonic()
        if not waited_for or left <= 0:
            names = ", ".join(map(str, waited_for))
            why = f"gave up waiting after {timeout:g} s for node {names}" if names else ""
            return News(What.CLOSED, why, result=_result_of_all(state, where, waited_for, agents))
        with contextlib.suppress(DistStoreError):
            keys = [done_key(other.name) for other in waited_for]
            agents.wait(keys, timedelta(seconds=min(left, _LOOK_AT_NODES)))


def _result_of_all(
    state: RendezvousRecord, where: Round, waited_for: list[Node], agents: Store
) -> JobResult | None:
    """The worst result that a node has reported; one that has reported none left before its ranks ended.

    That does not count if the job has gone on, and ended, without them.
    """
    keys = {seat: end_key(seat.last) for seat in state.seats if seat.occupant not in waited_for}
    said = {seat: agents.get(key).decode() if agents.check([key]) else "" for seat, key in keys.items()}
    silent = [seat for seat in said if not said[seat]]
    if silent and state.policy is RoundPolicy.RANK:
        with contextlib.closing(JobInStore(where.store, lambda: True, lambda ask, _: ask())) as job:
            slots = set(job.outcome().finished or ())
        silent = [seat for seat in silent if slots.intersection(drains.slots_of(seat))]
    lost = (JobResult(INFRASTRUCTURE, f"node {seat.last} left before its ranks had ended") for seat in silent)
    return worst([*map(JobResult.from_text, said.values()), *lost])


# What the record means for a node and its ranks. Pure -------------------------------------------------------


def round_of(state: RendezvousRecord, node: Node, address: str, agreed_in: str = "") -> Round:
    """A node's place in a round.

    Args:
        state: the record in which it has its seat.
        node: the node.
        address: of the store of the ranks.
        agreed_in: address of the store in which wrapped ranks agree, if that is another one.
    """
    seat = state.seat_of(node)
    assert seat is not None and seat.group_rank is not None
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
        formed=state.policy is RoundPolicy.RANK,
        node=node.id,
        agreed_in=agreed_in,
    )


def what_is_missing(state: RendezvousRecord, node: Node, timeout: float) -> str:
    """What a node waits for while it has no seat in a complete round, and for how long; empty if for nothing.

    Args:
        state: the record.
        node: the node.
        timeout: seconds for which a node waits for a round.
    """
    if state.closed or (state.seat_of(node) is not None and state.complete):
        return ""
    if state.place_of(node) is NodePlace.SPARE:
        until = "until one of them is lost or leaves, or the job ends"
        return f"all seats of the job are taken, by {len(state.seats)} of {state.max_nodes} nodes; {until}"
    if not state.complete and (missing := state.min_nodes - len(state.participants)) > 0:
        return f"for {missing} more of at least {state.min_nodes} nodes, at most {timeout:g} s"
    return ""


def is_empty(state: RendezvousRecord, seat: Seat) -> bool:
    """Whether a seat is empty, in a newer record than the one in which it was found."""
    return any(other.base_slot == seat.base_slot and other.occupant is None for other in state.seats)


def what_follows(state: RendezvousRecord, node: Node, round_number: int) -> News | None:
    """What a record means for a node whose ranks run; None: nothing.

    Args:
        state: the record.
        node: the node.
        round_number: the round that its ranks were started in.
    """
    if state.closed:
        result = JobResult.from_text(state.result)
        if not state.reason:
            return News(What.CLOSED, result=result)
        return News(What.OVER, f"the job was ended: {state.reason}", result=result)
    if nodes_waiting(state, node, round_number) > 0:
        if state.place_of(node) is None:
            return News(What.COME, f"this node ({node}) was taken out of the rendezvous")
        return News(What.COME, "the nodes meet again")
    empty = [seat.last for seat in state.seats if seat.occupant is None]
    if state.policy is RoundPolicy.GROUP and empty:
        return News(What.GONE, f"node {', '.join(empty)} is lost")
    return None


def give_once(state: RendezvousRecord, notice: Notice, known: Notice | None) -> RendezvousRecord:
    """The record with a notice, unless another node has been quicker: a scheduler signals all nodes at once.

    Args:
        state: the record.
        notice: the notice. Each node that is about to leave gives its own.
        known: the one that the node knew as it asked.
    """
    new = state.notice if state.notice != known and not notice.leaving else None
    return state if new is not None and new.why == notice.why else give_notice(state, notice)


def news_in(state: RendezvousRecord, node: Node, round_number: int) -> list[News]:
    """What a record means for a node whose ranks run, and what it asks of them; see `what_follows`."""
    if (news := what_follows(state, node, round_number)) is not None:
        return [news]
    mine = (asked for asked in state.drains if asked.node == node.name)
    notice = [News(What.NOTICE, notice=state.notice)] if state.notice else []
    return [*notice, *(News(What.DRAIN, asked.why, asked.slots, asked.within) for asked in mine)]
