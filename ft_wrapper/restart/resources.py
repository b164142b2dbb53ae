"""What one wrapped call owns: memory, monitor, store, interrupter, threads and its place in the job."""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, Protocol

from .. import events
from .._files import check_open_files
from .._text import IN_LINE, cut
from ..abort import close_aborted_sockets, protect_processes, wait_for_released_groups
from ..attribution import Interruption
from ..exception import RankExcluded, StoreError
from ..log_lines import begin_rank
from ..monitor import beside, frames, identity, interrupt, shared_memory, threads
from ..monitor.evidence import IS_SLOW, STEPS, WHERE
from ..monitor.line import MonitorLine, ask_agent
from ..monitor.shared_memory import Votes
from ..monitor.signals import KeptHandlers
from ..monitor.slow import SlowRank
from ..protocol import Agreement
from ..protocol.membership import Membership
from ..protocol.records import FAULT, Member, View
from ..rank_assignment import RankDiscarded
from ..settings import AllLimits
from ..state import State, formation_size
from ..store import PrefixStore, StoreMixin, StorePlan, TCPStore
from ..store.address import is_this_host, own_address
from ..store.bounded import in_background
from ..torch_groups import caches, warm_up
from ..torch_groups.collective import RECORDER_SIZE, limit_recorder, step_timings, whereabouts
from ..torch_groups.kept import KeptGroup
from ..torch_groups.tracker import begin_tracking
from .exit_watch import ExitWatch
from .notices import Notices, hear_signals
from .report import waiting_line
from .settings import Settings

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Remembered:
    """What a process remembers of its last wrapped call, for the next one on the same store.

    Args:
        call: number of the next call; the last one's number if this process left that with an error.
        member: its membership; None if the call had completed before it joined.
        view: the last iteration, which succeeded.
        rank: its rank in that iteration.
        world_size: the size of that iteration.
        monitor: keeps watch between the two calls; to be closed once another monitor has joined.
        has_failed: whether this process left the last call with an error, so that it joins that call again.
    """

    call: int
    member: Member | None = None
    view: View | None = None
    rank: int = 0
    world_size: int = 0
    monitor: MonitorLine | None = None
    has_failed: bool = False


# The environment variables that a call changes.
_CHANGED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
    *RECORDER_SIZE,
)
_FILES_OF_A_CALL = 18  # including the files of its monitor, if that is a process
# What this process remembers of its last wrapped call, by store.
_remembered: dict[str, Remembered] = {}


# Connections to a store that outlives calls, kept for the next call: the call's, its monitor thread's, and
# this host's address towards the store. For a new connection torch asks DNS for its peer's name, which takes
# seconds if an answer is lost. Keyed by store and timeout. A forked process must not use its parent's.
_kept: dict[tuple[str, float], tuple[list[StoreMixin], str]] = {}
os.register_at_fork(after_in_child=_kept.clear)


class Resources:
    """Everything that a call owns: made as a whole, or not at all.

    Args:
        settings: durations, switches and plug-ins.
        plan: the store, and which process hosts it.
        base: this rank's state from the environment; its ranks become those of the last call.
        function_name: name of the wrapped function, the same on all ranks.
        begin_thread: begins the monitor thread, with its own client and the function's interrupter.

    Attributes:
        is_registered: whether this process holds its slot.
        is_in: whether it has joined the job, even if its call had already completed.
        is_in_time: False if the other ranks had completed the call when this one joined.
        has_completed: whether all ranks have finished.
        thread_stays: whether the monitor thread is left waiting for an end that other ranks cause.
        monitor_lost: set if the monitor has ended on its own.
        store_lost: why the store can no longer be reached.
        thread_agreement: what the ranks agree on, over the monitor thread's client.
        address: of this host, as the other ranks see it.

    Raises:
        RestartError: the store cannot be used, or ranks are missing.
        OSError: this process may not open enough files.
    """

    def __init__(
        self,
        settings: Settings,
        plan: StorePlan,
        base: State,
        function_name: str,
        begin_thread: Callable[[StoreMixin, interrupt.Interrupter], threads.MonitorThread],
    ) -> None:
        # Otherwise its monitor or a store client would fail halfway, and the other ranks report it missing.
        check_open_files(_FILES_OF_A_CALL, f"rank {base.initial_rank}")
        self.settings = settings
        self.plan = plan
        self.is_registered = self.is_in = self.has_completed = self.thread_stays = False
        self.monitor_lost = threading.Event()
        self.store_lost: StoreError | None = None
        slot, size = base.initial_rank or 0, formation_size(base.world_size)
        begin_rank(slot)
        remembered = _remembered.get(plan.description, Remembered(call=0))
        _remembered[plan.description] = Remembered(remembered.call, has_failed=True)  # until it has completed
        if plan.port is not None:
            remembered = dataclasses.replace(remembered, call=0)  # each call has its own store
        slots = list(range(size))
        if remembered.view is not None:
            slots = [member.slot for member in remembered.view.members]
        self._hosts = plan.port is not None and slot == min(slots)
        with contextlib.ExitStack() as since_last_call, contextlib.ExitStack() as owned:
            if remembered.monitor is not None:
                since_last_call.callback(remembered.monitor.close, settings.termination_grace_time)
            self._hold_process(owned)
            limits = self._hold_monitor(owned, slot)
            store = self._hold_clients(owned)
            self._hold_main_thread(owned)
            terms = {"function": cut(function_name, IN_LINE), "formation_size": size, **settings.terms}
            self.member = Membership(
                Agreement(store),
                slot,
                slots,
                limits,
                remembered.call,
                terms,
                self._registered,
                self._say_who_is_missing,
                self.monitor.heart,
            )
            owned.callback(self._say_goodbye)  # once the monitor thread no longer uses the store
            self.thread_agreement = Agreement(self._clients[1])
            self.thread = begin_thread(self._clients[1], self.interrupter)
            owned.callback(self._end_thread)
            self.is_in_time = self._join(remembered, base, since_last_call)
            self.is_in = True
            self._owned = owned.pop_all()

    def close(self, error: BaseException | None) -> None:
        """Releases everything: threads, processes, sockets, handlers, variables."""
        kind = None if error is None else type(error)
        # With its traceback, since a context manager made from a generator sets it to the one passed.
        self._owned.__exit__(kind, error, getattr(error, "__traceback__", None))
        self.store_lost = None  # its frames refer to all of this

    def remember(self, state: State) -> None:
        """Notes what the next wrapped call on this store needs to know."""
        self.has_completed = True
        member, last = self.member, Remembered(self.member.call + 1)
        if self.is_in_time:
            last = Remembered(last.call, member.member, member.view, state.rank or 0, state.world_size)
        _remembered[self.plan.description] = last

    # Making it: in reverse order of closing ----------------------------------------------------------------

    def _hold_process(self, owned: contextlib.ExitStack) -> None:
        """Sets up what the call changes in its process, and restores at its end."""
        self.signals = KeptHandlers()
        owned.callback(self.signals.forget)
        owned.callback(self.signals.release)  # once all is closed: the monitor's end is also a signal
        owned.callback(_restore_variables, {name: os.environ.get(name) for name in _CHANGED})
        owned.callback(identity.mark_own())
        self.memory = owned.enter_context(contextlib.closing(shared_memory.RankMemory()))
        self.memory.lock_life()
        self.questions, self._asker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owned.enter_context(self.questions)
        owned.enter_context(self._asker)  # the monitor has its own, once it has begun
        if self.settings.all_limits.looks_for_evidence:
            limit_recorder()
        self.exit_watch = ExitWatch(self.memory)
        self.waiting = shared_memory.Waits(self.memory)
        owned.callback(close_aborted_sockets)
        owned.callback(wait_for_released_groups)
        owned.callback(warm_up.await_early_context)

    def _hold_monitor(self, owned: contextlib.ExitStack, slot: int) -> AllLimits:
        """Gets the monitor that watches this rank; returns the limits, completed from the monitor."""
        limits = self.settings.all_limits
        self.monitor = self._find_monitor(limits, slot)
        owned.push(self._end_monitor)
        owned.enter_context(protect_processes(self.monitor.pid))
        return dataclasses.replace(limits, replaced=self.monitor.replaced)

    def _hold_clients(self, owned: contextlib.ExitStack) -> StoreMixin:
        """Gets two store clients: the call's, which it returns, and its monitor thread's."""
        kept = _kept.pop((self.plan.description, self.settings.barrier_timeout), None)
        self._clients, self.address = kept or ([self.plan.connect()], "")
        owned.push(self._end_clients)
        store = self._clients[0]
        if kept is None:
            # A store on several hosts does not tell the route to the other ranks.
            towards = getattr(store, "host_name", None) or os.environ.get("MASTER_ADDR", "localhost")
            self.address = own_address(towards)
            self._clients.append(store.clone())
        return store

    def _hold_main_thread(self, owned: contextlib.ExitStack) -> None:
        """Sets up what interrupts the function's thread, and what notes its progress."""
        self.interrupter = interrupt.Interrupter(self.settings.limits.cleanup_timeout)
        owned.callback(self.interrupter.close)
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread:
            hear_signals(self.memory, owned)
        self.signals.note()  # including the interrupter's
        owned.callback(self.signals.put_back)
        if is_main_thread:
            owned.enter_context(frames.dumping_stacks(self.memory))
        interval = self.settings.progress_watchdog_interval
        thread, memory = self.interrupter.thread, self.memory
        answers = {
            WHERE: lambda _: whereabouts(thread),
            STEPS: lambda _: step_timings(memory.begins()),
            IS_SLOW: self._call_on_slow,
        }
        watchdog = threads.ProgressWatchdog(memory, interval, self.questions, answers, is_main_thread)
        self._on_slow: threading.Thread | None = None
        owned.callback(self._await_on_slow)
        owned.callback(watchdog.stop)

    def _call_on_slow(self, said: bytes) -> None:
        """Calls the user's function in a thread of its own: the watchdog has to go on."""
        on_slow, slow = self.settings.limits.on_slow, SlowRank(**json.loads(said))

        def call() -> None:
            try:
                if callable(on_slow):
                    on_slow(slow)
            except Exception:
                log.exception("on_slow failed on rank %d; training goes on", slow.rank)

        self._on_slow = in_background("on_slow", call)

    def _await_on_slow(self) -> None:
        if self._on_slow is not None:
            self._on_slow.join(self.settings.termination_grace_time)
            if self._on_slow.is_alive():
                log.warning("on_slow has not returned; it is left behind")

    def _find_monitor(self, limits: AllLimits, slot: int) -> MonitorLine:
        """The monitor inside the agent, if there is one; otherwise one in its own process."""
        paths = (self.settings.monitor_process_logfile, self.settings.monitor_process_pidfile)
        logfile, pidfile = (path and path.replace("{rank}", str(slot)) for path in paths)
        has_none = logfile is None and pidfile is None  # only a monitor process has these
        shared = self.memory, self._asker
        line, replaced = ask_agent(limits, self.plan, *shared, self._on_monitor_lost, watch=has_none)
        if line is not None:
            return line
        limits = dataclasses.replace(limits, replaced=replaced)
        if self._hosts and not is_this_host(self.plan.host):
            words = "this rank hosts the store, and %s leads to no address of this host: see MASTER_ADDR"
            log.warning(words, self.plan.host)
        while True:
            try:
                return beside.start_monitor(
                    limits,
                    self.plan,
                    hosts=self._hosts,
                    memory=self.memory,
                    questions=self._asker,
                    logfile=logfile,
                    pidfile=pidfile,
                    on_lost=self._on_monitor_lost,
                )
            except StoreError:
                # This process may be a replacement: then its predecessor's monitor still has the port. Or the
                # port is that of the user's store.
                if not (self._hosts and self.plan.is_served(by_rank=bool(limits.rejoin))):
                    raise
                self._hosts = False

    def _registered(self, member: Member) -> None:
        self.is_registered = True
        events.emit("register", **vars(member), started=events.started())
        self.monitor.join(member)

    def _join(self, remembered: Remembered, base: State, since_last_call: contextlib.ExitStack) -> bool:
        """Joins the job; False if the call has already completed.

        Args:
            remembered: what is known of the last call.
            base: gets the ranks that this process had there.
            since_last_call: releases the monitor that has kept watch since then.
        """
        member = self.member
        if remembered.member is None or remembered.view is None or self.plan.port is not None:
            member.register()
            warm_up.make_context_early(member.agreement.store, member.member.incarnation)
            if self.settings.limits.collect_garbage:
                self.memory.enter_phase(shared_memory.Phase.WATCHED)
                caches.collect_garbage("call")
            with self.waiting:
                is_in_time = member.join()
            if not is_in_time and remembered.has_failed:
                raise RankDiscarded(
                    f"slot {member.slot} left call {member.call} with an error, and others have completed "
                    "it since: its next call is not theirs; restart its process"
                )
            return is_in_time
        # The store outlived the last call, whose last members go on to the next call's first iteration.
        member.check_terms()
        member.member, member.view = remembered.member, remembered.view
        base.rank, base.world_size = remembered.rank, remembered.world_size
        member.say_who()
        self._registered(member.member)
        since_last_call.close()
        try:
            with self.waiting:
                member.go_on(remembered.rank, remembered.world_size)
        except RankDiscarded:
            raise
        except BaseException as error:
            member.leave(remembered.rank, Interruption.BASE_EXCEPTION, error, ends=False)
            raise
        return True

    # Releasing it ----------------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        port = self.plan.port  # if no rank hosts the store, none waits for a goodbye
        if port is None or not self.is_registered or self.store_lost is not None:
            return
        store = self.member.agreement.store
        with self.waiting, contextlib.ExitStack() as waited_for:
            if self.has_completed and not self._hosts:
                # The host's monitor closes the port once all have said goodbye. The next wrapped call must
                # not find the old server there.
                with contextlib.suppress(StoreError, OSError):  # it is closed
                    if self.plan.is_hosted_by_rank(store):
                        address = getattr(store, "host_name", ""), port
                        line = waited_for.enter_context(socket.create_connection(address, timeout=5.0))
                        patience = min(self.settings.completion_timeout, 1e6)  # poll waits 25 days at most
                        waited_for.callback(connection.wait, [line], patience)
            self.member.say_goodbye()

    def _end_monitor(self, kind: type[BaseException] | None, *_: object) -> None:
        # The monitor ends, or stops looking until the next call.
        self.memory.enter_phase(shared_memory.Phase.IDLE)
        if kind is RankExcluded:
            self.memory.leave_requested = True  # so that the agent does not count it as lost
        if self.has_completed and kind is None and self.plan.port is None and self.monitor.between():
            # Ranks that go on to the next call on this store wait for this rank, as long as it lives.
            last = _remembered[self.plan.description]
            _remembered[self.plan.description] = dataclasses.replace(last, monitor=self.monitor)
        elif self._hosts and kind is not None and self.is_in:
            self.monitor.detach()  # the other ranks go on, and need the store that it hosts
        else:
            # A monitor that hosts nothing is done; it may still be trying to reach a store that has ended.
            settings = self.settings
            self.monitor.close(settings.barrier_timeout if self._hosts else settings.termination_grace_time)

    def _end_thread(self) -> None:
        # It may be waiting for the store, or for an end that this rank does not cause.
        is_left = self.store_lost is not None or self.thread_stays
        with self.waiting:
            has_ended = self.thread.stop(0.0 if is_left else self.settings.barrier_timeout)
        if not has_ended:
            del self._clients[1]  # the thread waits on it, and releases it at its end
        del self.thread  # it refers to the call

    def _end_clients(self, kind: type[BaseException] | None, *_: object) -> None:
        # A store of one call ends with it. etcd's client has threads, and does not ask DNS.
        outlives = self.plan.port is None and isinstance(self._clients[0], TCPStore)
        if outlives and self.has_completed and kind is None and len(self._clients) == 2:
            key = self.plan.description, self.settings.barrier_timeout
            _kept[key] = self._clients, self.address
        else:
            for client in reversed(self._clients):
                client.close()

    def _say_who_is_missing(self, missing: Sequence[Member], waited: float) -> None:
        """Logs which members a restart waits for, and for how long."""
        hang = max(0.0, self.settings.hard - waited)
        silence = max(0.0, self.settings.heartbeat_timeout - waited)
        log.warning("%s", waiting_line(self.member.agreement.store, missing, hang, silence))

    def _on_monitor_lost(self) -> None:
        """Makes this rank leave the job, since its faults would go unnoticed. Runs in its own thread."""
        self.monitor_lost.set()
        # A rank that has not joined finds out when it tells the monitor that it joins. If the monitor hosts
        # the store, that is lost, too: all ranks find out at once.
        if self.is_in and not self._hosts:
            try:
                with contextlib.closing(self.plan.connect()) as store:
                    Agreement(store).ends.end_iteration(self.member.view.n, FAULT)
            except StoreError:
                log.exception("the monitor and the store are lost: this rank leaves the job")


def _restore_variables(saved: dict[str, str | None]) -> None:
    for name, value in saved.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


# For live states and checkpoints -----------------------------------------------------------------------


class HelperConnection(Protocol):
    """Connections of the function's helpers to other ranks, in one iteration."""

    def abort(self) -> None:
        """Ends pending waits there, from any thread, unnoticed by other ranks."""

    def close(self) -> None:
        """Closes them."""


class Services:
    """The only parts of a call that live states and checkpoints use, besides the `CallWrapper`.

    Args:
        own: what the call owns.
        user_store: returns the current iteration's store, on a connection for the function only.

    Attributes:
        notices: of the call.
        settings: durations, switches and plug-ins.
        store: the job's, which outlives iterations.
        atomic: see `CallWrapper.atomic`.
        voting: a block in which this rank waits for the other ranks' votes.
        memory: shared with the monitor.
        has_failed: whether the current iteration has ended by a fault.
        group: the default process group, if it outlives iterations.
        tracker: tracks objects that should not outlive the iteration in which the function made them.
        kept: objects that outlive iterations, by name.
        at_end: callbacks for the end of the iteration on this rank.
        end_fields: fields for the event of that end.
        connections: kept open until all ranks have left the iteration; otherwise others would see a fault.
    """

    def __init__(self, own: Resources, user_store: Callable[[], PrefixStore]) -> None:
        self.settings, self.store = own.settings, own.member.agreement.store
        self.atomic = own.interrupter.atomic
        self.voting, self.memory = Votes(own.memory), own.memory
        self.notices = Notices(own.memory, self.store, own.waiting, self.atomic, user_store)
        self.has_failed = own.member.has_failed
        self.group = KeptGroup(own.settings.limits.keep_groups)
        self.tracker = begin_tracking()
        self.kept: dict[str, Any] = {}
        self.at_end = contextlib.ExitStack()
        self.end_fields: dict[str, Any] = {}
        self.connections: list[HelperConnection] = []
        self._own = own

    @property
    def iteration(self) -> int:
        """The current iteration; its number is unique over the store's lifetime."""
        return self._own.member.view.n

    @property
    def first(self) -> int:
        """The first iteration of this call."""
        return self._own.member.view.decision.first

    def check_iteration(self, n: int, what: str) -> None:
        """Raises RuntimeError unless the function runs in iteration n, to which ``what`` belongs."""
        if not self._own.interrupter.is_running or n != self.iteration:
            how = "make one in the function, in each iteration"
            raise RuntimeError(f"{what} of another iteration, or outside of the wrapped function: {how}")

    def close_connections(self) -> None:
        """Closes the iteration's connections."""
        while self.connections:
            self.connections.pop().close()
