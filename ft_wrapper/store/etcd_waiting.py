"""Waiting for writes: the threads of a process that wait for the same share a watch.

A watch that begins at a revision which is past by the time that it arrives is served by etcd's own next look,
up to 100 ms later. For keys that are waited for again and again a watch is kept open: `StandingWatch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from .etcd_answers import EtcdCompacted
from .etcd_gateway import EtcdGateway
from .etcd_messages import Event, KeyValue, Span, Watched
from .etcd_watch import Watch

CLOSED_WITHIN = 2.0
"""Seconds for which to wait for the end of a thread that was told to end, and has only to notice."""

# What wakes a waiter: where something was written; None if it has to look again; an error that it raises.
_Waiter = queue.SimpleQueue[Span | None | Exception]
# The same for one who listens: what was written.
_Listener = queue.SimpleQueue[Event | None | Exception]


@dataclasses.dataclass(eq=False)
class _Followed:
    """A span that is watched, and who waits for it with the first revision of interest."""

    span: Span
    start: int
    watch: Watch
    waiters: dict[_Waiter, int] = dataclasses.field(default_factory=dict)
    last: int = 0  # the revision of the last write that was seen


class SharedWatch:
    """Wakes the threads of one process. Each span has a watch, with a thread, while it is waited for.

    One watch for all would be cheaper. But the gateway may lose all requests of a connection but the first:
    it reads on while the answer has begun, and its HTTP server throws away what is unread by then.

    Args:
        gateway: the client.
    """

    def __init__(self, gateway: EtcdGateway) -> None:
        self._gateway = gateway
        self._lock = threading.Lock()
        self._followed: dict[Span, _Followed] = {}

    def wait(self, wanted: Sequence[Watched], seconds: float) -> Span | None:
        """Waits until one of some spans is written. Costs nothing while it blocks.

        Args:
            wanted: the spans, and for each the first revision of interest.
            seconds: how long to wait.

        Returns:
            Which of the spans was written; None after the time, or if one has to look again to know.

        Raises:
            StoreError: no member will serve the watch.
        """
        waiter: _Waiter = queue.SimpleQueue()
        joined: list[_Followed] = []
        try:
            with self._lock:
                for one in wanted:
                    followed = self._follow(one)
                    followed.waiters[waiter] = one.start
                    joined.append(followed)
                    if followed.last >= one.start:
                        return one.span
            woken = waiter.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            with self._lock:
                for followed in joined:
                    followed.waiters.pop(waiter, None)
                    if not followed.waiters:
                        self._forget(followed)
                        followed.watch.close()
        if isinstance(woken, Exception):
            raise woken
        return woken

    def _follow(self, one: Watched) -> _Followed:
        followed = self._followed.get(one.span)
        if followed is None or followed.start > one.start:
            followed = _Followed(one.span, one.start, self._gateway.watch(one))
            self._followed[one.span] = followed
            threading.Thread(
                target=self._run, args=(followed,), name="ft_wrapper-etcd-watch", daemon=True
            ).start()
        return followed

    def _forget(self, followed: _Followed) -> None:
        if self._followed.get(followed.span) is followed:
            del self._followed[followed.span]

    def _run(self, followed: _Followed) -> None:
        try:
            for event in followed.watch.events():
                with self._lock:
                    followed.last = event.revision
                    for waiter, start in followed.waiters.items():
                        if start <= event.revision:
                            waiter.put(followed.span)
        except EtcdCompacted:
            self._end(followed, None)
        except Exception as error:  # whatever it is, no one may wait for ever
            self._end(followed, error)

    def _end(self, followed: _Followed, how: Exception | None) -> None:
        with self._lock:
            self._forget(followed)
            for waiter in followed.waiters:
                waiter.put(how)


class StandingWatch:
    """Follows many keys for as long as it is open, for threads that each wait for some of them.

    It knows which of them are there, so that no one who waits has to look.

    Args:
        gateway: the client.
        keys: the span of all of them, from the revision on that follows
        present: those that were there, with what they hold.
        life: what ends it.
    """

    def __init__(
        self, gateway: EtcdGateway, keys: Watched, present: Iterable[KeyValue], life: Watched
    ) -> None:
        self._lock = threading.Lock()
        self._present = {kv.key: Event(kv.key, kv.value, kv.mod_revision) for kv in present}
        self._listeners: dict[_Listener, frozenset[bytes]] = {}
        self._watches = [gateway.watch(keys), gateway.watch(life)]
        self.ended = False
        """Whether it follows nothing any more: listeners were told to look again, with another one."""
        self._threads = [
            threading.Thread(target=self._run, args=(watch, tell), name="ft_wrapper-etcd-watch", daemon=True)
            for watch, tell in zip(self._watches, (self._tell, self._tell_end), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def listening(self, keys: Iterable[bytes]) -> Iterator[_Listener]:
        """A block in which it is told which of some keys are there, or are written.

        Yields:
            A queue of what was written; None if one has to look again to know; or an error to raise.
        """
        listener: _Listener = queue.SimpleQueue()
        with self._lock:
            self._listeners[listener] = wanted = frozenset(keys)
            for key in wanted & self._present.keys():
                listener.put(self._present[key])
            if self.ended:
                listener.put(None)
        try:
            yield listener
        finally:
            with self._lock:
                del self._listeners[listener]

    def close(self) -> None:
        """Ends it, with its threads; who listens is told to look again."""
        self._end(None)
        for thread in self._threads:
            thread.join(CLOSED_WITHIN)

    def _run(self, watch: Watch, tell: Callable[[Event], None]) -> None:
        try:
            for event in watch.events():
                tell(event)
        except EtcdCompacted:
            self._end(None)
        except Exception as error:  # whatever it is, no one may wait for ever
            self._end(error)

    def _tell(self, event: Event) -> None:
        with self._lock:
            if event.value is None:
                self._present.pop(event.key, None)
                return
            self._present[event.key] = event
            for listener, keys in self._listeners.items():
                if event.key in keys:
                    listener.put(event)

    def _tell_end(self, _: Event) -> None:
        self._end(None)

    def _end(self, how: Exception | None) -> None:
        with self._lock:
            self.ended = True
            for listener in self._listeners:
                listener.put(how)
        for watch in self._watches:
            watch.close()
