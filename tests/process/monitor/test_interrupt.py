"""Interrupting the function's thread: what is freed, what is left alone, and that nothing comes late."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import itertools
import multiprocessing
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_wrapper.exception import JobAbort, RankDrained, RankShouldRestart, RestartAbort
from ft_wrapper.monitor import interrupt, safe_points
from ft_wrapper.monitor.frames import current_exception
from ft_wrapper.monitor.interrupt import Interrupter
from ft_wrapper.settings import AllLimits

LIMIT = 30.0


@pytest.fixture(autouse=True)
def quick_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the threads alternate quickly, so that races come out in few cycles.

    Python swallows an interrupt in a finalizer, or in a callback of the collector, and tells a hook. pytest's
    hook is written in Python, so the next interrupt may come inside it. `list.append` cannot be interrupted.
    """
    monkeypatch.setattr(sys, "unraisablehook", [].append)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@contextlib.contextmanager
def installed(
    resend_interval: float = interrupt.RESEND_INTERVAL, cleanup_timeout: float = AllLimits.cleanup_timeout
) -> Iterator[Interrupter]:
    """An interrupter for the calling thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupt, "RESEND_INTERVAL", resend_interval)
        with contextlib.closing(Interrupter(cleanup_timeout)) as interrupter:
            yield interrupter


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    with installed() as interrupter:
        yield interrupter


class Monitor:
    """A monitor thread: once told, it requests the interruption and interrupts until the function left."""

    def __init__(self, interrupter: Interrupter, then: Callable[[], None] | None = None) -> None:
        self.interrupter = interrupter
        self.now = threading.Semaphore(0)
        self.left = False
        self._then = then
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        if self.now.acquire(timeout=LIMIT):
            self.interrupter.request()
            if self._then is not None:
                self._then()
            self.left = self.interrupter.interrupt_until_left(LIMIT)

    def join(self) -> None:
        self.now.release()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        assert self.left


def outside_when_requested(interrupter: Interrupter) -> bool:
    """As `request`, without waiting for the end of an atomic block."""
    interrupter.requested = True
    return not interrupter._depth


@contextlib.contextmanager
def monitor(interrupter: Interrupter, then: Callable[[], None] | None = None) -> Iterator[Callable[[], None]]:
    """Yields what starts the interruption, from the function's thread."""
    thread = Monitor(interrupter, then)
    try:
        yield thread.now.release
    finally:
        thread.join()


def interrupted(interrupter: Interrupter, fn: Callable[..., Any], *args: Any) -> RankShouldRestart:
    """Runs the function, interrupts it, perhaps before its first line, and returns what came out."""

    def call(begin: Callable[[], None]) -> None:
        begin()
        fn(*args)

    return interrupted_inside(interrupter, call)


def interrupted_inside(
    interrupter: Interrupter, fn: Callable[[Callable[[], None]], Any]
) -> RankShouldRestart:
    """Runs the function, which calls what it gets where it may be interrupted; returns what came out."""
    with monitor(interrupter) as begin, pytest.raises(RankShouldRestart) as caught:
        interrupter.call(fn, begin)
    return caught.value


def test_looking_ahead_reads_the_code_of_the_function_that_runs(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(safe_points, "_known", lambda code: read.append(code.co_name))

    def look() -> list[str]:
        read.clear()
        thread = threading.Thread(target=interrupter.look_ahead)
        thread.start()
        thread.join(LIMIT)
        return list(read)

    def train() -> list[str]:
        return step()

    def step() -> list[str]:
        return look()

    assert look() == []
    names = interrupter.call(train)
    assert names[-3:] == ["look", "step", "train"] and "_run" not in names
    assert look() == []


# ---- what a task group has packed

PACKED = st.recursive(
    st.sampled_from(["RankShouldRestart", "ValueError", "CancelledError"]),
    lambda inner: st.lists(inner, min_size=1, max_size=3),
    max_leaves=8,
)


def pack(shape: Any) -> BaseException:
    """What the groups of nested task groups raise together."""
    if isinstance(shape, str):
        kinds = {"RankShouldRestart": RankShouldRestart, "CancelledError": asyncio.CancelledError}
        return kinds.get(shape, ValueError)("in a task")
    return BaseExceptionGroup("unhandled errors in a TaskGroup", [pack(one) for one in shape])


@given(PACKED)
def test_an_interruption_in_groups_of_any_depth_is_one(shape: Any) -> None:
    def raises() -> None:
        raise pack(shape)

    with installed() as interrupter, pytest.raises(BaseException) as caught:
        interrupter.call(raises)
    assert isinstance(caught.value, RankShouldRestart) == ("RankShouldRestart" in str(shape))


@pytest.mark.parametrize("kind", [JobAbort, RestartAbort, RankDrained])
def test_an_order_to_leave_in_a_group_is_obeyed(interrupter: Interrupter, kind: type[RestartAbort]) -> None:
    order = kind() if kind is RankDrained else kind("this cannot work")

    def raises() -> None:
        raise BaseExceptionGroup("tasks", [RankShouldRestart(), BaseExceptionGroup("more", [order])])

    with pytest.raises(kind) as caught:
        interrupter.call(raises)
    assert caught.value is order


def test_a_task_group_is_interrupted(interrupter: Interrupter) -> None:
    async def work() -> None:
        while True:
            sum(range(1000))
            await asyncio.sleep(0)

    async def train(depth: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(train(depth - 1) if depth else work())

    interrupted(interrupter, lambda: asyncio.run(train(2)))


# ---- what is freed


def locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def receive() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.recv(1)


def loop() -> None:
    while True:
        pass


def in_a_generator() -> None:
    def numbers() -> Iterator[int]:
        while True:
            yield 1

    for _ in numbers():
        pass


BLOCKING: dict[str, Callable[[], object]] = {
    "queue.get": lambda: queue.Queue().get(timeout=60),
    "lock.acquire": lambda: locked().acquire(),
    "socket.recv": receive,
    "a Python loop": loop,
    "a generator": in_a_generator,
    "Condition.__enter__": lambda: threading.Condition(locked()).__enter__(),  # stuck in a passing frame
}


@pytest.mark.parametrize("what", BLOCKING)
def test_a_blocked_function_is_freed(interrupter: Interrupter, what: str) -> None:
    interrupted(interrupter, BLOCKING[what])


def test_a_function_written_in_c_is_freed(interrupter: Interrupter) -> None:
    with monitor(interrupter) as begin:
        begin()
        with pytest.raises(RankShouldRestart):
            interrupter.call(time.sleep, 60)


def test_swallowing_it_does_not_help(interrupter: Interrupter) -> None:
    swallowed: list[RankShouldRestart] = []

    def fn(begin: Callable[[], None]) -> str:
        while len(swallowed) < 5:
            try:
                begin()
                time.sleep(60)
            except BaseException as error:
                swallowed.append(error)  # type: ignore[arg-type]
        return "returned all the same"

    interrupted_inside(interrupter, fn)
    # Mostly five: on a busy machine one may come between two tries, and is not swallowed.
    assert {type(error) for error in swallowed} == {RankShouldRestart}


def test_an_interruption_before_the_function_began(interrupter: Interrupter) -> None:
    interrupter.request()
    called: list[int] = []
    with pytest.raises(RankShouldRestart):
        interrupter.call(called.append, 1)
    assert not called
    assert interrupter.interrupt_until_left(LIMIT)
    interrupter.reset()
    assert interrupter.call(lambda: 5) == 5


# ---- what the function raises


def test_arguments_results_and_errors_pass_through(interrupter: Interrupter) -> None:
    assert interrupter.call(divmod, 7, 2) == (3, 1)
    assert interrupter.call(dict, fn=1, self=2) == {"fn": 1, "self": 2}
    with pytest.raises(ZeroDivisionError):
        interrupter.call(divmod, 7, 0)
    with pytest.raises(SystemExit):
        interrupter.call(sys.exit, 3)


def test_an_exception_of_an_interrupted_function_becomes_the_cause(interrupter: Interrupter) -> None:
    def fn(begin: Callable[[], None]) -> None:
        try:
            begin()
            time.sleep(60)
        except BaseException:
            raise OSError("the connection was shut down") from None

    error = interrupted_inside(interrupter, fn)
    assert isinstance(error.__cause__, OSError)


def test_a_base_exception_of_an_interrupted_function_stays(interrupter: Interrupter) -> None:
    with monitor(interrupter) as begin:

        def fn() -> None:
            begin()
            try:
                time.sleep(60)
            finally:
                sys.exit(3)

        with pytest.raises(SystemExit):
            interrupter.call(fn)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_ctrl_c_that_is_leaving_the_function_is_not_lost(
    interrupter: Interrupter, end: type[BaseException]
) -> None:
    with monitor(interrupter) as begin:

        def fn() -> None:
            try:
                raise end
            finally:
                begin()
                time.sleep(60)  # the interruption takes the place of what is on its way

        with pytest.raises(end):
            interrupter.call(fn)


# ---- what is left alone


def test_an_import_is_not_cut_short_but_a_function_that_it_calls_is(
    interrupter: Interrupter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may import the user's script as a module."""
    found: list[bool] = []

    def train() -> None:
        found.append(safe_points.obstacle(sys._getframe(), installed.__code__).for_good)
        interrupted(interrupter, time.sleep, 60)

    monkeypatch.setattr(sys, "ft_wrapper_test", train, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ft_wrapper_script.py").write_text("import sys\nsys.ft_wrapper_test()\n")
    import ft_wrapper_script  # type: ignore[import-not-found]  # noqa: F401

    del sys.modules["ft_wrapper_script"]
    assert found == [True]


class Slow:
    """Takes a while in the methods of a context manager, in their own frames; says when it begins to."""

    def __init__(self, at: Callable[[str], None] = lambda place: None) -> None:
        self.entered = self.exited = False
        self.at = at

    def __enter__(self) -> None:
        self.at("enter")
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            pass
        self.entered = True

    def __exit__(self, *_: object) -> None:
        self.at("exit")
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            pass
        self.exited = True


def test_a_signal_that_arrives_while_the_last_one_is_handled(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raising out of the handler itself would leave the frame that the first one spared."""

    def is_stuck(frame: object) -> bool:
        assert interrupter.signum is not None
        signal.raise_signal(interrupter.signum)
        return False

    monkeypatch.setattr(interrupter._deferral, "_is_stuck", is_stuck)

    class Sends(Slow):
        def __enter__(self) -> None:
            assert interrupter.signum is not None
            signal.raise_signal(interrupter.signum)
            self.entered = True

    slow = Sends()

    def fn() -> None:
        interrupter.request()
        with slow:
            pass

    with pytest.raises(RankShouldRestart):
        interrupter.call(fn)
    assert slow.entered and slow.exited


def test_cleaning_up_after_it_is_not_interrupted() -> None:
    cleaned: list[str] = []

    class Deleted:
        def __del__(self) -> None:
            time.sleep(0.1)
            cleaned.append("deleted")

    def fn(begin: Callable[[], None]) -> None:
        held = Deleted()
        try:
            try:
                begin()
                time.sleep(60)
            finally:
                try:
                    raise KeyError
                except KeyError:
                    time.sleep(0.1)  # several resends long
                cleaned.append("finally")
        except BaseException:
            time.sleep(0.1)
            cleaned.append("except")
            raise
        del held

    with installed(cleanup_timeout=LIMIT) as interrupter:
        error = interrupted_inside(interrupter, fn)
    error.__traceback__ = None
    del error
    gc.collect()
    assert cleaned[:2] == ["finally", "except"]
    assert cleaned[2:] == ["deleted"]


def test_no_lock_is_left_held(interrupter: Interrupter) -> None:
    condition = threading.Condition(threading.Lock())

    def wait() -> None:
        while True:
            with condition:
                condition.wait(0)

    for _ in range(200):
        interrupter.reset()
        interrupted(interrupter, wait)
        assert condition.acquire(blocking=False)
        condition.release()


# ---- the decision whether to raise


class Frame(SimpleNamespace):
    """What is looked at in a frame."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, name: str, back: Frame | None = None, file: str = "train.py", flags: int = 0) -> None:
        code = compile(f"def {name}(): pass", file, "exec").co_consts[0]
        code = code.replace(co_flags=code.co_flags | flags)
        super().__init__(f_code=code, f_lasti=0, f_back=back)


class Decides:
    """A deferral with a grace of one second, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.deferral = interrupt.Deferral(cleanup_timeout=1.0)

    def after(self, seconds: float, frame: Any, handled: BaseException | None = None) -> Any:
        self.now += seconds
        raises, outside = self.deferral.decide(frame, handled)
        return raises, outside and outside.f_code.co_name


@pytest.fixture
def decides(monkeypatch: pytest.MonkeyPatch) -> Decides:
    return Decides(monkeypatch)


def test_an_unsafe_point_gets_its_grace(decides: Decides) -> None:
    """So does each frame that is at one; what is outside of the outermost of them raises meanwhile."""
    outer = Frame("__enter__", Frame("train"))
    assert decides.after(0.0, outer) == (False, "__enter__")
    inner = Frame("close", outer)
    assert decides.after(0.9, inner) == (False, "__enter__")
    assert decides.after(0.2, inner) == (False, "close")  # the outer one has had its grace
    inner.f_lasti = 2  # it moves: it is not stuck
    assert decides.after(0.9, inner) == (True, None)


def test_a_thread_that_is_stuck_at_an_unsafe_point_gets_less(decides: Decides) -> None:
    frame = Frame("__enter__", Frame("train"))
    found = [decides.after(seconds, frame)[0] for seconds in (0.0, 0.1, 0.1, 0.1)]
    assert found == [False, False, False, True]
    assert decides.after(0.1, Frame("train")) == (True, None)
    assert not decides.after(0.1, frame)[0]  # it has moved in between


def test_an_import_is_never_cut_short(decides: Decides) -> None:
    frame = Frame("step", Frame("_find_and_load", Frame("train"), "<frozen importlib._bootstrap>"))
    assert decides.after(0.0, frame) == (False, "_find_and_load")
    assert [decides.after(10.0, frame) for _ in range(5)] == [(False, None)] * 5


def test_a_finalizer_gets_a_grace_of_its_own(decides: Decides) -> None:
    """What calls it raises again: Python swallows what is raised inside."""
    frame = Frame("__del__", Frame("train"))
    assert decides.after(0.0, frame) == (False, "train")
    frame.f_lasti = 2
    assert decides.after(1.0, frame) == (False, "train")
    frame.f_lasti = 4
    assert decides.after(1.0, frame) == (True, "train")


def test_a_clean_up_after_an_interruption_gets_its_grace(decides: Decides) -> None:
    frame, handled = Frame("train"), RankShouldRestart()
    assert decides.after(0.0, frame, handled) == (True, None)  # none of ours
    decides.deferral.interrupted()
    assert decides.after(0.9, frame, handled) == (False, None)
    assert decides.after(0.2, frame, handled) == (True, None)


def test_a_generator_that_is_closed_gets_its_grace(decides: Decides) -> None:
    frame = Frame("step", Frame("generator", Frame("train"), flags=inspect.CO_GENERATOR))
    assert decides.after(0.0, frame, GeneratorExit()) == (False, "train")
    assert decides.after(1.1, frame, GeneratorExit()) == (True, "train")


@pytest.mark.parametrize(
    ("name", "file", "safe"),
    [
        ("step", "train.py", True),
        ("__exit__", "train.py", False),
        ("__del__", "train.py", False),
        ("_find_and_load", "<frozen importlib._bootstrap>", False),
    ],
)
def test_a_traced_frame_raises_at_a_safe_point_only(
    decides: Decides, name: str, file: str, safe: bool
) -> None:
    frame: Any = Frame(name, Frame("train"), file)
    assert decides.deferral.is_safe(frame, None) == safe
    decides.after(0.0, frame)
    decides.after(10.0, frame)
    assert decides.deferral.is_safe(frame, None) == (safe or name == "__exit__")  # which has waited
    assert not decides.deferral.is_safe(frame, GeneratorExit())


# ---- safe points


class Aliased(Slow):
    """Not under those names: as threading.Semaphore."""

    def acquire(self) -> None:
        super().__enter__()

    def release(self, *_: object) -> None:
        super().__exit__()

    __enter__ = acquire  # type: ignore[assignment]
    __exit__ = release  # type: ignore[assignment]


@pytest.mark.parametrize("place", ["enter", "exit"])
def test_entering_and_leaving_are_whole_whatever_they_call(place: str) -> None:
    # One would have to be stuck for thirty seconds to be interrupted.
    with installed(resend_interval=10.0, cleanup_timeout=LIMIT) as interrupter:
        manager = Aliased(lambda now: begin() if now == place else None)

        def fn() -> None:
            with manager:
                pass
            loop()

        with monitor(interrupter) as begin, pytest.raises(RankShouldRestart):
            interrupter.call(fn)
    assert manager.entered and manager.exited


class Interrupts:
    """Interrupts its own thread as it is entered, where nothing may be raised."""

    def __init__(self, interrupter: Interrupter) -> None:
        self.interrupter = interrupter

    def __enter__(self) -> None:
        assert self.interrupter.signum is not None
        self.interrupter.request()
        signal.raise_signal(self.interrupter.signum)

    def __exit__(self, *_: object) -> None:
        pass


def frames_traced(traceback: Any) -> list[str]:
    """The names of the frames that an exception went through and that are traced still."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return [frame.f_code.co_name for frame in frames if frame.f_trace is not None or frame.f_trace_opcodes]


def test_one_signal_is_enough(interrupter: Interrupter) -> None:
    """It lands at an unsafe point; the first safe instruction raises, and nothing is traced any more."""
    reached: list[str] = []

    def inner() -> None:
        with Interrupts(interrupter):
            reached.append("inside")
        reached.append("outside")

    def fn() -> None:
        try:
            inner()
        finally:
            reached.append("finally" if sys.gettrace() is None else "traced")

    with pytest.raises(RankShouldRestart) as caught:
        interrupter.call(fn)
    assert reached == ["finally"]
    assert frames_traced(caught.value.__traceback__) == []
    assert sys.gettrace() is None


def test_nothing_is_traced_once_the_function_left_by_itself(interrupter: Interrupter) -> None:
    frames = []

    class Frames(Interrupts):
        def __enter__(self) -> None:
            frames.append(sys._getframe(1))
            super().__enter__()
            assert frames[0].f_trace is not None
            raise KeyError  # of its own, and the frame it leads to has nothing more to do

    def fn() -> None:
        with Frames(interrupter):
            pass

    with pytest.raises(RankShouldRestart) as caught:
        interrupter.call(fn)
    assert isinstance(caught.value.__cause__, KeyError)
    assert sys.gettrace() is None
    assert [(frame.f_trace, frame.f_trace_opcodes) for frame in frames] == [(None, False)]


def test_a_generator_that_is_suspended_is_not_traced(interrupter: Interrupter) -> None:
    traced: list[tuple[bool, bool]] = []

    def numbers() -> Iterator[int]:
        interrupter._trace_from(sys._getframe())
        yield 1

    def fn() -> None:
        generator: Any = numbers()
        next(generator)
        for frame in (generator.gi_frame, sys._getframe()):
            traced.append((frame.f_trace is not None, frame.f_trace_opcodes))

    interrupter.call(fn)
    assert traced == [(False, False), (True, True)]
    assert sys.gettrace() is None


def test_a_debuggers_trace_is_left_alone(interrupter: Interrupter) -> None:
    calls: list[str] = []

    def debugger(frame: Any, event: str, argument: object) -> None:
        calls.append(frame.f_code.co_name)

    def fn() -> None:
        sys.settrace(debugger)
        with Interrupts(interrupter):
            assert sys.gettrace() is debugger
        thread.start()
        while True:
            with contextlib.nullcontext():
                pass

    thread = threading.Thread(target=lambda: interrupter.interrupt_until_left(LIMIT))
    previous = sys.gettrace()
    try:
        with pytest.raises(RankShouldRestart):
            interrupter.call(fn)
        assert sys.gettrace() in (debugger, None)  # None: raised in the debugger itself, Python drops it
    finally:
        sys.settrace(previous)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert "__enter__" in calls


def test_a_thread_that_gets_no_processor_is_not_stuck(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 100.0).__next__)
    place = SimpleNamespace(f_lasti=2)
    seen: list[bool] = [interrupter._deferral._is_stuck(place) for _ in range(5)]  # type: ignore[arg-type]
    assert seen == [False, False, False, True, True]


# ---- finalizers


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python swallowed, by type."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: found.append(error.exc_type.__name__))
    return found


def busy(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


class Deletes:
    seconds = 0.02

    def __del__(self) -> None:
        busy(self.seconds)


def closed_generator(seconds: float) -> Iterator[int]:
    try:
        yield 1
    except GeneratorExit:
        busy(seconds)


def delete_for_ever() -> None:
    while True:
        Deletes()


def close_for_ever() -> None:
    while True:
        next(closed_generator(0.02))  # type: ignore[call-overload]


@pytest.mark.parametrize("fn", [delete_for_ever, close_for_ever])
def test_a_loop_over_busy_finalizers_is_left(swallowed: list[str], fn: Callable[[], None]) -> None:
    """Between two of them, so that nothing is swallowed."""
    with installed(cleanup_timeout=LIMIT) as interrupter:
        for _ in range(10):
            interrupter.reset()
            interrupted(interrupter, fn)
    assert swallowed == []


def delete_slowly() -> None:
    class Slowly(Deletes):
        seconds = 3 * LIMIT

    Slowly()
    loop()


def close_slowly() -> None:
    next(closed_generator(3 * LIMIT))  # type: ignore[call-overload]
    loop()


@pytest.mark.parametrize("fn", [delete_slowly, close_slowly])
def test_what_a_finalizer_swallows_is_raised_again_outside(
    swallowed: list[str], fn: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the frame outside, at once: the second signal would come much later."""
    send = signal.pthread_kill

    def only_the_first(thread: int, signum: int) -> None:
        if not swallowed:
            send(thread, signum)

    monkeypatch.setattr(signal, "pthread_kill", only_the_first)
    with installed(cleanup_timeout=0.1) as interrupter:
        interrupted(interrupter, fn)
    assert swallowed == ["RankShouldRestart"]


def test_the_handler_asks_no_other_thread(interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which the interpreter would hold its list of threads (CPython's issue 106883)."""
    asked: list[str] = []
    monkeypatch.setattr(sys, "_current_exceptions", lambda: asked.append("exceptions") or {})
    monkeypatch.setattr(sys, "_current_frames", lambda: asked.append("frames") or {})

    def fn() -> None:
        try:
            time.sleep(60)
        finally:
            time.sleep(0.1)

    interrupted(interrupter, fn)
    assert asked == []


# ---- atomic


def test_request_waits_for_the_end_of_an_atomic_block(interrupter: Interrupter) -> None:
    order: list[str] = []
    requested, end = threading.Event(), threading.Event()

    def request() -> None:
        assert not outside_when_requested(interrupter)
        assert not interrupter.interrupt_until_left(0.05)
        requested.set()
        interrupter.request()
        order.append("outside")
        assert interrupter.interrupt_until_left(LIMIT)
        end.set()

    thread = threading.Thread(target=request)

    def fn() -> None:
        with interrupter.atomic():
            with interrupter.atomic():
                thread.start()
                assert requested.wait(LIMIT)
                order.append("inner")
            with interrupter.atomic():  # not the beginning of a block
                order.append("inside")
        order.append("after")

    with pytest.raises(RankShouldRestart):
        interrupter.call(fn)
    thread.join(LIMIT)
    assert end.is_set()
    assert order == ["inner", "inside", "outside"]


def test_request_ends_with_the_block_though_the_function_goes_on(interrupter: Interrupter) -> None:
    waits, outside = threading.Event(), threading.Event()

    def request() -> None:
        assert not outside_when_requested(interrupter)
        waits.set()
        interrupter.request()
        outside.set()

    thread = threading.Thread(target=request)

    def fn() -> bool:
        try:
            with interrupter.atomic():
                thread.start()
                assert waits.wait(LIMIT)
        except RankShouldRestart:
            pass
        if not outside.wait(LIMIT / 3):
            sys.exit("request() still waits")
        return True

    with pytest.raises(RankShouldRestart):
        interrupter.call(fn)
    thread.join(LIMIT)


def test_another_exception_on_its_way_out_of_atomic_stays(interrupter: Interrupter) -> None:
    def fn() -> None:
        with interrupter.atomic():
            interrupter.requested = True
            raise KeyError("checkpoint")

    with pytest.raises(RankShouldRestart) as caught:
        interrupter.call(fn)
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_atomic_block_begins_after_the_request(interrupter: Interrupter) -> None:
    reached: list[str] = []

    def fn() -> None:
        interrupter.request()
        for _ in range(2):
            try:
                with interrupter.atomic():
                    reached.append("block")
            except RankShouldRestart:
                reached.append("refused")

    with pytest.raises(RankShouldRestart):
        interrupter.call(fn)
    assert reached == ["refused", "refused"]


def test_atomic_outside_call_never_raises(interrupter: Interrupter) -> None:
    interrupter.request()
    with interrupter.atomic():
        assert not outside_when_requested(interrupter)
    interrupter.request()


def test_an_atomic_block_that_is_never_left_ends_with_the_function(interrupter: Interrupter) -> None:
    interrupter.call(interrupter.atomic().__enter__)
    interrupter.request()
    interrupter.reset()
    interrupted(interrupter, time.sleep, 60)


def test_atomic_is_for_the_functions_thread(interrupter: Interrupter) -> None:
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            with interrupter.atomic():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(LIMIT)
    assert errors == ["atomic() must be entered by the thread that runs the function"]


def interrupt_atomic_blocks(interrupter: Interrupter, cycles: int) -> None:
    for _ in range(cycles):
        interrupter.reset()
        begun = ended = 0

        def fn() -> None:
            nonlocal begun, ended
            atomic = interrupter.atomic()
            while True:
                with atomic:
                    begun += 1
                    sum(range(50))
                    ended += 1

        interrupted(interrupter, fn)
        assert begun == ended
        assert outside_when_requested(interrupter)  # the depth is back at none


def test_atomic_blocks_are_whole_under_many_interruptions(interrupter: Interrupter) -> None:
    interrupt_atomic_blocks(interrupter, 200)


# ---- nothing comes late


def hammer(interrupter: Interrupter, cycles: int) -> int:
    """Interrupts functions that return at that moment; counts how often they were caught before that.

    Runs Python between the cycles, where a late interruption would surface.
    """
    random_numbers = random.Random(0)
    caught = 0
    for _ in range(cycles):
        interrupter.reset()
        thread = Monitor(interrupter)
        steps = random_numbers.randrange(20_000)

        def fn(begin: Callable[[], None] = thread.now.release, steps: int = steps) -> None:
            begin()
            for _ in range(steps):
                pass

        try:
            interrupter.call(fn)
        except RankShouldRestart:
            caught += 1
        for _ in range(1000):
            pass
        thread.join()
    return caught


def test_nothing_surfaces_after_call(interrupter: Interrupter) -> None:
    caught = hammer(interrupter, 500)
    assert 0 < caught < 500, "both sides of the race are wanted"


def test_call_waits_for_a_signal_that_is_being_sent(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it, the handler may be gone, and the signal would end the process."""
    sending, returned = threading.Event(), threading.Event()
    early: list[bool] = []
    send = signal.pthread_kill

    def send_late(thread: int, signum: int) -> None:
        sending.set()
        early.append(returned.wait(0.2))
        send(thread, signum)

    monkeypatch.setattr(signal, "pthread_kill", send_late)
    with monitor(interrupter) as begin:

        def fn() -> None:
            begin()
            sending.wait(LIMIT)

        with pytest.raises(RankShouldRestart):
            interrupter.call(fn)
        returned.set()
    assert early == [False]


def in_process(test: Callable[[], None]) -> None:
    """Runs a test in a forked process: the default action of a real-time signal ends it."""
    process = multiprocessing.get_context("fork").Process(target=test)
    process.start()
    process.join(LIMIT)
    exitcode = process.exitcode
    process.kill()
    process.join(LIMIT)
    process.close()
    assert exitcode == 0


def test_close_discards_a_signal_on_its_way() -> None:
    def test() -> None:
        with installed() as interrupter:
            assert interrupter.signum is not None
            signum = interrupter.signum
            signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
            signal.pthread_kill(threading.get_ident(), signum)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})

    in_process(test)


def test_closing_while_signals_are_on_their_way() -> None:
    def test() -> None:
        for _ in range(300):
            with installed(resend_interval=0.0001) as interrupter:
                thread = Monitor(interrupter)
                with contextlib.suppress(RankShouldRestart):
                    interrupter.call(thread.now.release)
            thread.join()

    in_process(test)


# ---- the signal


def test_the_signal_is_given_back_and_can_be_taken_again() -> None:
    for _ in range(2):
        interrupter = Interrupter()
        signum = interrupter.signum
        assert signum is not None
        assert signal.getsignal(signum) is not signal.SIG_DFL
        interrupted(interrupter, time.sleep, 60)
        interrupter.reset()
        interrupter.close()
        assert signal.getsignal(signum) is signal.SIG_DFL


def test_a_free_real_time_signal_is_chosen() -> None:
    with installed() as first, installed() as second:
        assert first.signum is not None and second.signum is not None
        assert signal.SIGRTMIN <= first.signum < second.signum <= signal.SIGRTMAX
        chosen = first.signum
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {chosen})
    try:
        with installed() as interrupter:
            assert interrupter.signum != chosen
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_handler_that_only_c_knows_of_is_seen() -> None:
    with installed() as interrupter:
        chosen = interrupter.signum
    assert chosen is not None
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    previous = libc.signal(chosen, ctypes.cast(libc.abs, ctypes.c_void_p))
    try:
        with installed() as interrupter:
            assert interrupter.signum != chosen
    finally:
        libc.signal(chosen, previous)


def test_no_signal_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda signum: signal.SIG_IGN)
    with pytest.raises(RuntimeError, match="every real-time signal is in use"):
        Interrupter()


def test_the_signal_from_elsewhere_does_nothing(interrupter: Interrupter) -> None:
    assert interrupter.signum is not None
    assert interrupter.call(signal.raise_signal, interrupter.signum) is None
    signal.raise_signal(interrupter.signum)


def test_nested_calls_of_two_interrupters(interrupter: Interrupter) -> None:
    """A wrapped function that calls a wrapped function: the outer interruption goes through the inner."""
    with installed() as inner:

        def fn() -> None:
            inner.call(time.sleep, 60)

        interrupted(interrupter, fn)
        assert not inner.requested
        interrupter.reset()

        def outer() -> str:
            interrupted(inner, time.sleep, 60)
            return "goes on"

        assert interrupter.call(outer) == "goes on"


# ---- outside the main thread


def in_thread(test: Callable[[Interrupter], None], resend_interval: float = 0.02) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with installed(resend_interval=resend_interval, cleanup_timeout=LIMIT) as interrupter:
                assert interrupter.signum is None
                test(interrupter)
        except BaseException as error:
            errors.append(error)

    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(2 * LIMIT)
    assert not thread.is_alive()
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    if errors:
        raise errors[0]


def short_waits() -> None:
    while True:
        threading.Event().wait(0.01)


@pytest.mark.parametrize("fn", [loop, short_waits])
def test_another_thread_is_freed_as_it_runs_python(fn: Callable[[], None]) -> None:
    def test(interrupter: Interrupter) -> None:
        interrupted(interrupter, fn)

    in_thread(test)


def test_another_threads_atomic_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # An interruption that a destructor swallows is sent again, and may hit pytest's own report of the first.
    monkeypatch.setattr(sys, "unraisablehook", lambda swallowed: None)

    in_thread(lambda interrupter: interrupt_atomic_blocks(interrupter, 50))


def test_nothing_surfaces_after_call_in_another_thread() -> None:
    def test(interrupter: Interrupter) -> None:
        assert 0 < hammer(interrupter, 300) < 300

    in_thread(test)


def test_another_thread_is_left_alone_at_an_unsafe_point() -> None:
    def test(interrupter: Interrupter) -> None:
        answers: list[bool] = []
        end = threading.Event()

        class Enters(Aliased):
            def acquire(self) -> None:
                begin()
                while not end.is_set():
                    pass
                self.entered = True

            __enter__ = acquire  # type: ignore[assignment]

        manager = Enters()

        def fn() -> None:
            with manager:
                loop()

        def wait() -> None:
            answers.append(interrupter.interrupt_until_left(0.1))
            end.set()

        with monitor(interrupter, then=wait) as begin, pytest.raises(RankShouldRestart):
            interrupter.call(fn)
        assert answers == [False]
        assert manager.entered and manager.exited

    in_thread(test, resend_interval=1.0)  # seconds; a loop seen thrice at one instruction counts as stuck


def test_a_collection_does_not_begin_while_another_threads_exception_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collecting: list[bool] = []
    monkeypatch.setattr(sys, "_current_exceptions", lambda: collecting.append(gc.isenabled()) or {})
    assert current_exception(threading.get_ident()) is None
    assert collecting == [False]
    assert gc.isenabled()


def test_another_threads_exception_is_seen() -> None:
    try:
        raise KeyError
    except KeyError as error:
        assert current_exception(threading.get_ident()) is error


def test_tracing_works_after_a_call_in_another_thread() -> None:
    """CPython 3.11 would look for ever for an exception that had been sent to a thread, and taken back."""

    def call(interrupter: Interrupter) -> None:
        interrupted(interrupter, short_waits)
        interrupter.reset()
        interrupter.call(lambda: None)

    def trace(frame: Any, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        return trace

    def test() -> None:
        in_thread(call)
        sys.settrace(trace)
        (lambda: None)()
        sys.settrace(None)

    in_process(test)
