"""The watch over one rank: reads its messages, waits for its death, keeps its timeouts, serves its stores.

One thread runs it, in a monitor process (`beside`) or, for each of the agent's ranks, inside the agent
(`service`). So nothing here depends on the process. `RankWatch` waits, and makes a `RankMonitor` once the
rank has joined.
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import json
import logging
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from torch._C._distributed_c10d import TCPStore

from .. import events
from .._text import duration
from ..attribution import Interruption
from ..exception import StoreError
from ..protocol import Agreement
from ..protocol import keys as names
from ..protocol.deaths import await_others, report_deaths
from ..protocol.neighbours import NeighbourWatch
from ..protocol.operations import Append, read, set_if_absent
from ..protocol.records import Fault, Member, MemberRecord, View, record_of
from ..settings import AUTO, AllLimits
from ..store import StoreMixin, serve
from ..store.bounded import in_background, take_or_make
from . import messages
from .evidence import IS_SLOW
from .frames import describe_main_thread, is_stopped
from .heart import Heart
from .messages import Message, Reply
from .shared_memory import Phase, RankMemory
from .slow import PacedRank
from .watched import Accusation

log = logging.getLogger(__name__)

RESTART = 0.1  # seconds that a restart mostly takes; anything that can wait is done after it
_STEP_EVERY = 1.0  # seconds between two events with a rank's current step
_SOON = 0.5  # seconds
_MOST_EXCUSES = 9  # times soft_timeout that a compilation may take beyond it
_LATE = 1.0  # seconds; on a busy machine a look is sometimes that late, without a pause
_REMEMBERED = 64  # gaps; older ones lie before any stamp that matters

#: Takes the kind of fault that caused a restart, and the restart's seconds by phase.
OnRestart = Callable[[str, Mapping[str, float]], None]


class Stage(enum.Enum):
    """Where a rank is, according to its messages.

    Attributes:
        IN_CALL: in a wrapped call, or about to join one.
        BETWEEN: between two calls: it has left one in order, and may make another.
        LEFT: has left for good, or continues with another monitor.
    """

    IN_CALL = enum.auto()
    BETWEEN = enum.auto()
    LEFT = enum.auto()


@dataclasses.dataclass
class Idle:
    """What monitors leave for those of the next call, since a new torch connection may take seconds.

    Args:
        clients: clients of the job's store.
        stores: stores for iterations, which no rank has used.
    """

    clients: list[StoreMixin] = dataclasses.field(default_factory=list)
    stores: list[TCPStore] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class RankWatch:
    """The watch over one rank: `run`, then `tell_others` if it has died, then `close`.

    It owns what it makes: the thread that waits for the death, monitors, stores, descriptors. The caller owns
    line, memory, pidfd and heart, and closes them after `close`; it may close the line before.

    Args:
        limits: the timeouts.
        connect: makes a client of the store.
        memory: the memory shared with the rank.
        line: the socket to the rank, blocking.
        questions: the socket for questions to the rank.
        pid: the rank's process.
        pidfd: a pidfd of this process.
        heart: the heart that beats for the rank.
        job: name of the job in events; None for the environment's.
        on_restart: called when the rank reports that all ranks are back.
        idle: what earlier calls left, for this one to use and add to.
        how_it_died: describes the rank's death, once it has died.
    """

    limits: AllLimits
    connect: Callable[[], StoreMixin]
    memory: RankMemory
    line: socket.socket
    questions: socket.socket
    pid: int
    pidfd: int
    heart: Heart
    job: str | None = None
    on_restart: OnRestart = lambda cause, phases: None
    idle: Idle = dataclasses.field(default_factory=Idle)
    how_it_died: Callable[[], str] = lambda: "died"

    def __post_init__(self) -> None:
        self.stage = Stage.IN_CALL
        self._iteration_stores = IterationStores(self.idle.stores)
        self._monitor: RankMonitor | None = None
        self._unread = b""
        self._has_died = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # held to write to `_wake`, and to close it
        with contextlib.ExitStack() as made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            made.callback(self._close_wake)
            waiter = in_background("waiting for a death", self._await_death)
            made.callback(waiter.join)
            made.callback(self._iteration_stores.close)
            self._made = made.pop_all()

    def run(self) -> bool:
        """Watches the rank until it has left for good, has died, or `stop` was called.

        Returns:
            Whether the rank has died as a member of the job, so that the death has to be reported.
        """
        with selectors.DefaultSelector() as selector:
            for fd in (self.line.fileno(), self.pidfd, self._wake):
                selector.register(fd, selectors.EVENT_READ)
            while self.stage is not Stage.LEFT:
                ready = {key.fd for key, _ in selector.select(self._pause())}
                if self.line.fileno() in ready and not self._read():
                    selector.unregister(self.line)
                    if self._monitor is None:
                        return False  # the rank hung up before it joined: another monitor watches it
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._has_died or self.pidfd in ready:
                    self._read()  # the rank's last messages before its death
                    break
                if self._stopped.is_set():
                    return False
                if self._monitor is not None and self.stage is Stage.IN_CALL:
                    self._monitor.keep_time(self.pidfd)
                if not ready and self._iteration_stores.due_in() <= 0.0:
                    self._iteration_stores.open_ahead()
        return self.stage is not Stage.LEFT and self._monitor is not None

    def stop(self) -> None:
        """Ends `run`, if the rank lives, and `tell_others`. From any thread, even after `close`."""
        self._stopped.set()
        self._wake_up()

    def ask_to_leave(self) -> bool:
        """Asks the rank to leave the job. From any thread, before `close`.

        Returns:
            Whether the rank will leave when its next step begins.
        """
        self.memory.leave_requested = self.memory.looks = True
        is_watched = self.memory.phase == Phase.WATCHED
        return self.memory.active and is_watched and self.memory.step is not None

    def tell_others(self) -> None:
        """Reports the rank's death, and keeps its store until the other ranks have gone on without it.

        It retries until the report succeeds, `stop` is called, or the heart has no rank left. In the last
        case the heart's silence shows the death, or the job has ended.
        """
        assert self._monitor is not None
        while True:
            try:
                self._monitor.rank_died(self.how_it_died())
                if self._iteration_stores.serving is not None:
                    self._monitor.await_next()  # peers may yet connect to the store of this iteration
                return
            except StoreError as error:
                level = logging.DEBUG if self.stage is Stage.BETWEEN else logging.INFO
                log.log(level, "cannot tell the other ranks that process %d died: %s", self.pid, error)
            if self._stopped.wait(self.limits.heartbeat_interval) or not self.heart.is_beating:
                return

    def await_goodbyes(self) -> None:
        """Waits until no rank needs the job's store."""
        if self._monitor is not None:
            self._monitor.await_goodbyes()

    def close(self) -> None:
        """Ends everything it owns. Waits until the rank has closed its memory or has died."""
        self._made.close()

    def _pause(self) -> float | None:
        if self.stage is Stage.BETWEEN:
            return None
        pause = self.limits.monitor_process_interval if self._monitor is None else self._monitor.pause()
        return min(pause, max(0.0, self._iteration_stores.due_in()))

    def _wake_up(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _close_wake(self) -> None:
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _await_death(self) -> None:
        """Wakes `run` when the rank dies."""
        try:
            if self.memory.wait_for_death():
                self._has_died = True
                self._wake_up()
        except Exception:
            log.exception("cannot wait for the death of process %d, which will be detected late", self.pid)

    def _answer(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # the rank has died since; its death is reported elsewhere
            # Without waiting: the rank is about to read the reply, so there is room for it.
            self.line.sendall(json.dumps(vars(reply)).encode() + b"\n", socket.MSG_DONTWAIT)

    def _read(self) -> bool:
        """Carries out the rank's messages so far; returns False at the end of file."""
        more = True
        while more:
            try:
                data = self.line.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._unread += data
            more = bool(data)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._carry_out(messages.parse(line))
        return more

    def _carry_out(self, message: Message) -> None:
        match message:
            case messages.Join(member):
                if self._monitor is not None:
                    self._monitor.stop()  # the rank joins as a new incarnation
                line, wake = self.questions, self._wake_up
                whose = self.connect, member, self.memory, self.pid, line, self.limits, self.heart
                self._monitor = RankMonitor(*whose, wake, self.job, self.idle)
                self._made.callback(self._monitor.close)
            case messages.Enter(view):
                assert self._monitor is not None
                self._monitor.view = view
            case messages.Advance(decision, nonce):
                assert self._monitor is not None and self._monitor.view is not None
                self._monitor.view = self._monitor.view.after(decision, nonce)
            case messages.Restarted(cause, phases, seconds):
                self.on_restart(cause, dict(zip(phases, seconds, strict=True)))
            case messages.Serve(host):
                try:
                    reply = Reply(port=self._iteration_stores.next_port(host))
                except OSError as error:
                    reply = Reply(error=f"cannot open the iteration's store on {host}: {error}")
                self._answer(reply)
            case messages.LeaveCall():  # after the reply, the memory is no longer read, nor a store served
                if self._monitor is not None:
                    self._monitor.leave_call()
                self.stage = Stage.BETWEEN
                self._iteration_stores.close(hand_on=True)
                self._answer(Reply())
            case messages.Respond():
                self._answer(Reply())
            case messages.Leave():
                self.stage = Stage.LEFT


class Pauses:
    """Counts time without the gaps in which the watcher could not look when it wanted to.

    The rank may not have run in a gap either. A paused container or a suspended virtual machine stops a rank
    and its monitor together. Afterwards the rank's stamps are as old as the pause, yet the rank is healthy. A
    gap counts from the last look before it, since the pause may have begun right after this look.

    Args:
        interval: the most seconds between two looks. A look that is overdue by more than that, and by more
            than a second, ends a gap.
        now: the watcher's clock, in monotonic seconds.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._late = max(interval, _LATE)
        self._looked = now
        self._due = math.inf
        self._gaps: collections.deque[tuple[float, float]] = collections.deque(maxlen=_REMEMBERED)

    def expect(self, due: float) -> None:
        """Notes when the next look is due."""
        self._due = due

    def look(self, now: float) -> None:
        """Notes that the watcher looks now."""
        if now - self._due > self._late:
            began = self._looked
            if self._gaps and self._gaps[-1][1] == began:
                began = self._gaps.pop()[0]
            self._gaps.append((began, now))
        self._looked = now

    def since(self, moment: float, now: float) -> float:
        """Seconds since a moment, without the gaps."""
        gaps = sum(max(0.0, ended - max(began, moment)) for began, ended in self._gaps)
        return now - moment - gaps


@dataclasses.dataclass(eq=False)
class RankMonitor:
    """The monitor of one rank, outside its process, where neither its death nor a held GIL stops it.

    Args:
        connect: makes a client of the store.
        member: the rank's member of the job.
        memory: the memory shared with the rank.
        pid: the rank's process.
        questions: the socket for questions to the rank.
        limits: the timeouts.
        heart: the heart that beats for the rank, and perhaps for others.
        wake: has `keep_time` called soon; from any thread.
        job: name of the job in events; None for the environment's.
        idle: idle clients, to take one from, and to return it to when the rank has left its call in order.
    """

    connect: Callable[[], StoreMixin]
    member: Member
    memory: RankMemory
    pid: int
    questions: socket.socket
    limits: AllLimits
    heart: Heart
    wake: Callable[[], None] = lambda: None
    job: str | None = None
    idle: Idle = dataclasses.field(default_factory=Idle)
    view: View | None = dataclasses.field(default=None, init=False)  # the iteration that the rank is in
    is_between: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        self._client: StoreMixin | None = take_or_make(self.idle.clients, self.connect)
        self._pauses = Pauses(self.limits.monitor_process_interval, time.monotonic())
        self._reported = names.BEFORE_FIRST - 1  # iteration whose soft timeout has been published
        self._is_dying = False  # or has died
        self._is_death_published = False
        self._left_out_at = math.inf  # when the heart saw that an iteration began without this rank
        self._publishers: list[threading.Thread] = []
        self._publishing = threading.Lock()
        self._step_emitted_at, self._step_emitted = -math.inf, dict[str, Any]()
        self._accusation: Accusation | None = None
        self._excused = -1, 0  # iteration, and how often a compilation there was given more time
        self.heart.add(self)
        if self.limits.looks_for_evidence:
            self.heart.hangs.add(self)

    @property
    def _agreement(self) -> Agreement:
        self._client = self._client or take_or_make(self.idle.clients, self.connect)
        return Agreement(self._client)

    @property
    def rank(self) -> int | None:
        """The number of the rank in its iteration; None before the rank assignment."""
        return self.memory.rank

    def leave_call(self) -> None:
        """Notes that the rank has left its call in order, and may take its time until the next one.

        From now on only its heartbeat and its end matter. Its last iteration ended as done, so its death ends
        no iteration. The store may end with the job while this rank is still working.
        """
        self.is_between = True
        self.heart.hangs.remove(self)
        if self._client is not None and not any(publisher.is_alive() for publisher in self._publishers):
            self.idle.clients.append(self._client)
            self._client = None

    def stop(self) -> None:
        """Stops the heartbeat, and the watch for hangs."""
        self.heart.remove(self)
        self.heart.hangs.remove(self)
        self.wake = lambda: None  # a cycle would keep the rank's memory until a collection

    def close(self) -> None:
        """Stops the heartbeat, and closes the store's client."""
        self.stop()
        for publisher in self._publishers:
            publisher.join()
        if self._client is not None:
            self._client.close()

    def rank_died(self, how: str = "died") -> None:
        """Reports that the rank's process has died, unless that was done when the monitor ended it.

        Args:
            how: in words.

        Raises:
            StoreError: the store cannot be reached. The call may be repeated.
        """
        self.stop()
        # If the store is closed now, it has ended with the job, and so have the other ranks.
        self._agreement.store.patience = self.limits.termination_grace_time
        if self.is_between:
            # Mostly the normal end of a process, so not a fault. Members in a next call must not wait for it.
            self._report_death(None, False, self.limits.termination_grace_time)
        elif not self._is_death_published:
            if self.memory.leave_requested:  # the agent ended it, since it had no step to leave at
                self._publish_death(Interruption.DRAINED, "was drained")
            else:
                self._publish_death(Interruption.TERMINATED, how)
        self._agreement.ends.say_goodbye(self.member)  # in place of the dead member

    def await_next(self) -> None:
        """Waits until the other ranks, if any, have left the iteration in which this rank died."""
        if self.view is not None:
            await_others(self._agreement, self.view, self.limits.barrier_timeout)

    def pause(self) -> float:
        """Seconds until `keep_time` has to look again."""
        now = time.monotonic()
        pause = max(0.0, min(self.limits.monitor_process_interval, *self._left(now)))
        self._pauses.expect(now + pause)
        return pause

    def keep_time(self, pidfd: int) -> None:
        """Publishes a soft timeout. Ends the process at a hard timeout, or if it fails to leave.

        Args:
            pidfd: a pidfd of the rank's process.
        """
        self.memory.monitor_stamp = now = time.monotonic()
        self._pauses.look(now)
        if self._is_dying:
            return
        self._emit_step(now)
        if (accused := self._accusation) is not None:
            self._accusation = None
            self._carry_out(accused, pidfd)
            return
        to_leave, stays, hard, soft = self._left(now)
        if to_leave <= 0.0:
            self._end_rank(pidfd, "did not leave, though the next iteration began without it")
        elif stays <= 0.0:
            timeout = self.limits.barrier_timeout
            words = f"did not leave the function within barrier_timeout={timeout:g} s, though interrupted"
            self._end_rank(pidfd, f"{words} (does it catch RankShouldRestart?)")
        elif hard <= 0.0:
            timeout = self._hard
            no_gil = self._pauses.since(self.memory.gil_stamp, now)
            what = "held the GIL" if no_gil >= timeout / 2 else "made no progress"
            if is_stopped(self.pid):
                what = "was stopped by a signal"
            self._end_rank(pidfd, f"{what} for hard_timeout={timeout:g} s")
        elif soft <= 0.0:
            self._reported = n = self.memory.iteration
            message = f"made no progress for soft_timeout={self._soft:g} s"
            self._publish_hang(Accusation(n, message), excusable=self.limits.looks_for_evidence)

    def _left(self, now: float) -> tuple[float, float, float, float]:
        """Seconds until four deadlines; infinite for those that do not apply now.

        Returns:
            To leave the job; to leave the function; ``hard_timeout``; ``soft_timeout``.
        """
        limits, memory, since = self.limits, self.memory, self._pauses.since
        to_leave = limits.termination_grace_time - since(self._left_out_at, now)
        stays = hard = soft = math.inf
        if memory.hang_protection_disabled == 0:
            hard = self._hard - since(memory.gil_stamp, now)
            if memory.phase == Phase.WATCHED:
                still = since(memory.progress_stamp(limits.progress_watchdog_interval), now)
                hard = min(hard, self._hard - still)
                # For a rank that runs, but catches each interruption. Read once: it may be leaving right now.
                if interrupted_at := memory.leave_stamp:
                    stays = limits.barrier_timeout - since(interrupted_at, now)
                # Once per iteration. A spare's soft timeout ends nothing.
                if memory.active and self._reported < memory.iteration:
                    soft = self._soft - still
        return to_leave, stays, hard, soft

    def await_goodbyes(self) -> None:
        """Waits until all members have said goodbye: they no longer need the store.

        It waits for members of the last iteration as long as they live. Members that died or were left out
        may still say goodbye, and get ``termination_grace_time``.
        """
        ends, limits = self._agreement.ends, self.limits
        watch = NeighbourWatch(self._agreement, str(self.member), limits.heartbeat_timeout)
        alone_since = math.inf
        while True:
            view = self._agreement.iterations.read_current()
            joined = self._agreement.iterations.joins_of(names.BEFORE_FIRST)
            n, members, silent = names.BEFORE_FIRST, joined, frozenset[Member]()
            if view is not None:
                n, members, silent = view.n, set(view.members), watch.look(view, [self.member])
            missing = (members | joined) - ends.goodbyes() - {self.member}
            if not missing:
                return
            here = (missing & members) - ends.deaths_of(n) - silent
            now = time.monotonic()
            alone_since = math.inf if here else min(now, alone_since)
            if now - alone_since >= limits.termination_grace_time:
                return
            # One at a time, so that all of the above is read again only if a member's goodbye is late.
            for member in sorted(here or missing):
                if not ends.await_goodbye(member, limits.heartbeat_interval):
                    break

    def note_left_out(self, left_out: bool) -> None:
        """Notes whether an iteration has begun without this rank; called by its heart."""
        self._left_out_at = min(self._left_out_at, time.monotonic()) if left_out else math.inf

    def _emit_fault(self, view: View, fault: Fault) -> None:
        memory, kind = self.memory, fault.interruption
        more: dict[str, Any] = {"kind": kind.name, "ends": memory.active, "message": fault.message}
        if kind in (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT):
            more["since"] = memory.progress_stamp(self.limits.progress_watchdog_interval)
        step = memory.last_step() if memory.iteration == view.n else {}
        self._emit("fault", view, rank=fault.rank, **more, **step)

    def _emit(self, event: str, view: View, **fields: Any) -> None:
        job = {} if self.job is None else {"job": self.job}
        where = {"iteration": view.n, "call": view.call, "nonce": view.nonce}
        events.emit(event, **job, **where, **vars(self.member), **fields)

    def _emit_step(self, now: float) -> None:
        """Emits the current step, once a second, so that the rank's process need not."""
        view, memory = self.view, self.memory
        if now - self._step_emitted_at < _STEP_EVERY or view is None or not events.are_enabled():
            return
        n, step = memory.iteration, memory.last_step()
        if not step or step == self._step_emitted or memory.iteration != n or view.n != n:
            return
        self._step_emitted_at, self._step_emitted = now, step
        self._emit("step", view, **step)

    @property
    def _excuses(self) -> int:
        n, excuses = self._excused
        return excuses if n == self.memory.iteration else 0

    @property
    def _soft(self) -> float:
        if self.limits.soft_timeout != AUTO:
            return self.limits.soft
        return self.limits.soft * (self.heart.hangs.steps.patience + self._excuses)

    @property
    def _hard(self) -> float:
        least = self._soft * 3 / 2 if self.limits.hard_timeout == AUTO else 0.0
        return max(self.limits.hard, least)

    def accuse(self, accusation: Accusation) -> None:
        """Ends an iteration because of this rank; from any thread."""
        self._accusation = accusation
        self.wake()

    def note_slow(self, slow: PacedRank) -> None:
        """Notes that the rank has become slow, has been so for long, or has ceased to be."""
        how, since, now = slow.slow, slow.since[0], time.monotonic()
        self.memory.slow = 0.0 if how is None else how.share
        if how is not None and slow.is_lasting:
            if self.limits.replaces_slow:
                self._publish("replacing a slow rank", self._replace_slow)
            return
        if how is None:
            words = "%s is no longer slow, after %s; the job would have been %s faster without that"
            log.warning(words, self._name(), duration(now - since), duration(slow.cost))
        else:
            log.warning("%s is slow: %s", self._name(), how)
            how = how._replace(rank=self.rank or 0, slot=self.member.slot, host=socket.gethostname())
            with contextlib.suppress(OSError):  # the rank leaves its call
                said = IS_SLOW + json.dumps(how._asdict()).encode()
                self.questions.send(said, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if (view := self.view) is not None:
            fields = {} if how is None else {"share": how.share, "cause": how.cause, "words": how.words}
            self._emit("slow", view, rank=self.rank, since=since, cost=slow.cost, **fields)
            line = f"{self._name()}: {how}" if how else ""
            entry = Append(names.slow(view.n), json.dumps([self.member.slot, line]))
            self._publish("noting a slow rank", lambda: self._write(entry))

    def _write(self, entry: Append) -> None:
        with contextlib.suppress(StoreError):  # it is only for `ftrun status`
            self._agreement.store.execute([entry])

    def _replace_slow(self) -> None:
        """Lets the rank leave if a spare can take over; one rank of an iteration, no shard's last holder."""
        view, memory = self.view, self.memory
        if view is None or memory.is_only_holder or len(view.members) <= memory.active_world_size:
            log.warning("%s stays: there is no spare, or no other rank has its shard", self._name())
            return
        with contextlib.suppress(StoreError):
            mine = str(self.member)
            if set_if_absent(self._agreement.store, names.slow(view.n, "replaced"), mine) == mine:
                log.warning("%s is slow for long: it leaves, and a spare takes over", self._name())
                memory.leave_requested = memory.looks = True

    def _carry_out(self, accused: Accusation, pidfd: int) -> None:
        if accused.n != self.memory.iteration:
            return  # it has left after all
        if accused.ends:
            self._end_rank(pidfd, accused.message, at_once=True)
        elif self._reported < accused.n:
            self._reported = accused.n
            if not accused.holds_gil:
                self._publish_hang(accused)
                return
            place = describe_main_thread(self.memory, self.pid, pidfd) or "in C"
            self._publish_hang(accused._replace(message=f"{accused.message}, and stood {place}"))
            # A signal ends a call that sleeps, so the rank's threads get the GIL: now they know of the end.
            self._publishers[-1].join(_SOON)
            describe_main_thread(self.memory, self.pid, pidfd)

    def _publish_hang(self, accused: Accusation, *, excusable: bool = False) -> None:
        # In another thread: an unreachable store must not delay the hard timeout.
        what = f"telling the other ranks that {self._name()} hangs"
        publish = functools.partial(self._publish_soft_timeout, accused, excusable=excusable)
        self._publish(what, publish)

    def _publish(self, what: str, action: Callable[[], None]) -> None:
        """Uses the store in a thread that `close` waits for; from any thread."""
        with self._publishing:
            alive = [one for one in self._publishers if one.is_alive()]
            self._publishers = [*alive, in_background(what, action)]

    def _publish_soft_timeout(self, accused: Accusation, *, excusable: bool) -> None:
        view, n = self.view, accused.n
        if view is None or view.n != n:
            return
        if excusable and self._excuses < _MOST_EXCUSES and read(self._agreement.store, names.excuse(n)):
            self._excused = n, self._excuses + 1
            self._reported = n - 1
            return
        fault = self._fault(Interruption.SOFT_TIMEOUT, accused.message)
        if accused.of is None:
            fault = dataclasses.replace(fault, blames=False)
        elif accused.of >= 0:
            member = self._agreement.entering.holder_of(view.n, accused.of)
            record = record_of(self._agreement.store, member)
            fault = record.fault(member, accused.of, fault.interruption, fault.message, fault.at)
        self._emit_fault(view, fault)
        self._agreement.ends.report_fault(view.n, fault)

    def _publish_death(self, interruption: Interruption, message: str) -> None:
        fault = self._fault(interruption, message)
        if self.view is not None and not self._is_dying:
            self._emit_fault(self.view, fault)
        self._is_dying = True
        self._report_death(fault, self.memory.active, self.limits.barrier_timeout)
        self._is_death_published = True

    def _report_death(self, fault: Fault | None, active: bool, timeout: float) -> None:
        returns = self.limits.replaced and not self.memory.leave_requested
        report_deaths(
            self._agreement, self.view, {self.member: fault}, active=active, timeout=timeout, returns=returns
        )

    def _end_rank(self, pidfd: int, message: str, *, at_once: bool = False) -> None:
        """Publishes the death, then ends the process, so that no rank waits until its memory is freed.

        Args:
            pidfd: a pidfd of the rank's process.
            message: what it did.
            at_once: whether SIGTERM is of no use.
        """
        n = self.memory.iteration
        place = None if is_stopped(self.pid) else describe_main_thread(self.memory, self.pid, pidfd)
        if self.memory.iteration != n:  # the question's signal has ended its sleep: in C with the GIL 4 of 4
            log.warning("%s %s; when asked where it stands, it left", self._name(), message)
            return
        if place is not None:
            message += f" and stood {place}"
        log.warning("%s %s: its process is ended", self._name(), message)
        what = f"telling the other ranks that {self._name()} is ended"
        publisher = in_background(what, lambda: self._publish_death(Interruption.HARD_TIMEOUT, message))
        self.memory.end_requested = True
        if at_once:
            publisher.join(_SOON)  # or its peers' sockets would end before they hear of it
        for number in (signal.SIGTERM, signal.SIGKILL)[at_once:]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            if await_exit(pidfd, self.limits.termination_grace_time):
                break
        publisher.join()

    def _name(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return f"{self.member.name} ({rank}pid {self.pid} on {socket.gethostname()})"

    def _fault(self, interruption: Interruption, message: str) -> Fault:
        record = MemberRecord(socket.gethostname(), self.pid)
        return record.fault(self.member, self.rank, interruption, message, time.time())


def await_exit(pidfd: int, seconds: float) -> bool:
    """Waits for the end of a process.

    Args:
        pidfd: a pidfd of the process.
        seconds: the longest wait.

    Returns:
        Whether the process has ended.
    """
    return bool(connection.wait([pidfd], seconds))


class IterationStores:
    """The stores of the iterations in which this rank is rank 0.

    The last rank 0 is likely to be the next one. So once the ranks are back, its next store is opened ahead,
    and the last one ended. Before that the ranks need the CPUs.

    Args:
        unused: stores that no rank has used, to be taken first; `close` adds to them for the next call.

    Attributes:
        serving: the store of the current iteration; None before the first one.
    """

    def __init__(self, unused: list[TCPStore]) -> None:
        self._unused = unused
        self.serving: TCPStore | None = None
        self._last: TCPStore | None = None  # the previous iteration's, which may still have clients
        self._ahead: TCPStore | None = None
        self._opening: threading.Thread | None = None
        self._host = ""
        self._due = math.inf

    def next_port(self, host: str) -> int:
        """Returns the port of a new store, opened ahead or now. The last store ends a little later.

        Raises:
            OSError: no store could be opened.
        """
        self._await_opening()
        store = self._ahead or take_or_make(self._unused, lambda: _open_store(host))
        self._host, self._ahead, self._last, self.serving = host, None, self.serving, store
        self._due = time.monotonic() + RESTART
        return store.port

    def due_in(self) -> float:
        """Seconds until it is time to `open_ahead`."""
        return self._due - time.monotonic()

    def open_ahead(self) -> None:
        """Starts a thread that ends the last store and opens the next one.

        In a thread, since torch's client looks up its own address: that takes seconds without a name server.
        """
        self._due = math.inf
        self._opening = in_background("opening a store ahead", self._open_ahead)

    def close(self, *, hand_on: bool = False) -> None:
        """Ends the stores.

        Args:
            hand_on: whether to leave unused stores to the next call, after all ranks left in order.
        """
        self._await_opening()
        stores = (self._ahead, self.serving) if hand_on else ()
        self._unused += [one for one in stores if one is not None and not one.num_keys()]
        self._ahead = self._last = self.serving = None
        self._due = math.inf

    def _open_ahead(self) -> None:
        self._last = None
        try:
            self._ahead = take_or_make(self._unused, lambda: _open_store(self._host))
        except Exception as error:  # `next_port` tries again
            log.debug("no store is opened ahead: %s", error)

    def _await_opening(self) -> None:
        if self._opening is not None:
            self._opening.join()
            self._opening = None


def _open_store(host: str) -> TCPStore:
    return serve(host, 0, timedelta(seconds=300))
