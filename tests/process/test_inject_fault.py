"""Injected faults: what each does to a real process, where they fire, and how they are written."""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_wrapper import events
from ft_wrapper.abort import close_aborted_sockets
from ft_wrapper.state import FrozenState, Mode
from ft_wrapper.testing.inject_fault import (
    ENV,
    FaultKind,
    FaultSpec,
    InjectedFault,
    InjectFinalize,
    InjectInitialize,
    Injector,
    Where,
    inject_fault,
    parse_faults,
    random_faults,
)
from ft_wrapper.torch_groups.gloo import shut_down_gloo_sockets

RETURNED = 40  # a child's exit code: the fault came back
INTERRUPTED = 41
FAILED = 42


class Freed(BaseException):
    """Raised by a signal handler to get out of a hang."""


def fork(body: Callable[[], None]) -> int:
    """Runs body in a child that never comes back into the test."""
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.disable()  # pytest's; it would say where the fault was
        body()
        os._exit(RETURNED)
    except Freed:
        os._exit(INTERRUPTED)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(FAILED)


def status_of(pid: int, options: int = 0) -> int:
    """Waits for a child; pytest's timeout bounds it."""
    return os.waitpid(pid, options)[1]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FaultKind.EXIT, 1),
        (FaultKind.SIGKILL, -signal.SIGKILL),
        (FaultKind.SIGTERM, -signal.SIGTERM),
        (FaultKind.SEGFAULT, -signal.SIGSEGV),
        (FaultKind.ABORT, -signal.SIGABRT),
    ],
)
def test_a_fault_ends_the_process(kind: FaultKind, code: int, tmp_path: Path) -> None:
    def body() -> None:
        os.chdir(tmp_path)  # for the core file that must not be written, though it may
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        inject_fault(kind)

    status = status_of(fork(body))
    assert os.waitstatus_to_exitcode(status) == code
    assert not os.WCOREDUMP(status)


def test_sigstop_stops_the_process_until_it_is_continued() -> None:
    pid = fork(lambda: inject_fault(FaultKind.SIGSTOP))
    assert os.WIFSTOPPED(status_of(pid, os.WUNTRACED))
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(status_of(pid)) == RETURNED


def test_an_exception_is_raised() -> None:
    with pytest.raises(InjectedFault):
        inject_fault(FaultKind.EXCEPTION)


def test_a_sleeping_hang_lasts_until_a_signal_interrupts_it() -> None:
    def free(*_: object) -> None:
        raise Freed

    def body() -> None:
        signal.signal(signal.SIGUSR1, free)
        # Another thread runs during the hang, and ends it.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        inject_fault(FaultKind.SLEEP)

    assert os.waitstatus_to_exitcode(status_of(fork(body))) == INTERRUPTED


def test_a_hang_holding_the_gil_stops_other_threads_and_signal_handlers() -> None:
    seconds = 1.0
    handled: list[float] = []
    stamps: list[float] = []
    done = threading.Event()

    def stamp() -> None:
        while not done.wait(0.001):
            stamps.append(time.monotonic())

    def body() -> None:
        signal.signal(signal.SIGALRM, lambda *_: handled.append(time.monotonic()))
        thread = threading.Thread(target=stamp)
        thread.start()
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, seconds / 2)
        inject_fault(FaultKind.GIL, duration=seconds)
        end = time.monotonic()
        done.set()
        thread.join()
        # The clocks of the deadline and of the stamps are not the same one: hence some slack.
        assert end - begin >= 0.9 * seconds
        assert handled[0] - begin >= 0.9 * seconds
        inside = [begin, *(s for s in stamps if begin <= s <= end), end]
        assert max(after - before for before, after in itertools.pairwise(inside)) >= 0.9 * seconds

    assert os.waitstatus_to_exitcode(status_of(fork(body))) == RETURNED


def test_a_collective_ends_at_its_duration() -> None:
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        inject_fault(FaultKind.COLLECTIVE, duration=0.05)


def test_a_collective_blocks_that_thread_only_until_gloo_is_shut_down() -> None:
    others_run, freed = threading.Event(), threading.Event()

    def abort() -> None:
        while not freed.wait(0.02):
            others_run.set()
            shut_down_gloo_sockets()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        with pytest.raises(RuntimeError) as raised:
            inject_fault(FaultKind.COLLECTIVE)
    finally:
        freed.set()
        thread.join()
        close_aborted_sockets()
    assert others_run.is_set() and "Timed out" not in str(raised.value)


specs = st.builds(
    FaultSpec,
    kind=st.sampled_from(FaultKind),
    rank=st.none() | st.integers(0, 99),
    iteration=st.none() | st.integers(0, 99),
    step=st.none() | st.integers(0, 10**6),
    where=st.sampled_from([Where.STEP, Where.ATOMIC]),
) | st.builds(
    FaultSpec,
    kind=st.sampled_from(FaultKind),
    slot=st.none() | st.integers(0, 99),
    iteration=st.none() | st.integers(0, 99),
    where=st.sampled_from([Where.INITIALIZE, Where.FINALIZE]),
)


@given(st.lists(specs, max_size=4))
def test_what_is_written_is_read_again(written: list[FaultSpec]) -> None:
    assert parse_faults(",".join(map(str, written))) == tuple(written)
    with_spaces = " , ".join(str(one).replace(":", " : ").replace("=", " = ") for one in written)
    assert parse_faults(with_spaces) == tuple(written)


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("sigkil:rank=0", ["'sigkil'", "sigkill", "collective"]),
        ("sleep:rnk=0", ["'rnk=0'", "rank, slot, iteration, step, where"]),
        ("sleep:rank", ["'rank'", "field=value"]),
        ("sleep:rank=x", ["rank='x'", "integer"]),
        ("sleep:step=-1", ["step='-1'", "at least 0"]),
        ("sleep:where=nowhere", ["where='nowhere'", "step, atomic, initialize, finalize"]),
        ("sleep:rank=1:rank=2", ["rank", "twice"]),
        ("sleep:rank=1:slot=2", ["rank=1", "slot=2", "exclude"]),
        ("sleep:step=1:where=finalize", ["step=1", "where=finalize", "where=atomic"]),
    ],
)
def test_malformed_faults_are_refused(
    text: str, complaints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError) as raised:
        parse_faults(f"exit,{text}")
    assert all(complaint in str(raised.value) for complaint in [text, *complaints]), raised.value
    monkeypatch.setenv(ENV, text)
    with pytest.raises(ValueError, match=f"environment variable {ENV}.*{text[:5]}"):
        Injector.from_env()


PLACE = {"rank": 1, "slot": 2, "iteration": 3, "step": 4}


@pytest.mark.parametrize("field", list(PLACE))
def test_a_fault_fires_only_in_its_place(field: str) -> None:
    spec = FaultSpec.parse(f"exception:{field}={PLACE[field]}")
    injector = Injector([spec])
    injector.check("step", **{**PLACE, field: PLACE[field] + 1})
    injector.check("atomic", **PLACE)
    injector.check("step", **{name: value for name, value in PLACE.items() if name != field})
    with pytest.raises(InjectedFault):
        injector.check("step", **PLACE)


def test_a_point_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="where='stop' is not one of step, atomic, initialize, finalize"):
        Injector([]).check("stop")


def fires(injector: Injector) -> bool:
    try:
        injector.check("step", step=1)
    except InjectedFault:
        return True
    return False


def test_each_fault_fires_once() -> None:
    injector = Injector(parse_faults("exception:step=1,exception:step=1"))
    assert [fires(injector) for _ in range(3)] == [True, True, False]


def test_a_folder_makes_it_once_for_all_processes(tmp_path: Path) -> None:
    faults = parse_faults("exit:step=1")

    def body() -> None:
        Injector(faults, tmp_path / "fired").check("step", step=1)

    statuses = [os.waitstatus_to_exitcode(status_of(fork(body))) for _ in range(3)]
    assert statuses == [1, RETURNED, RETURNED]


def test_a_fault_is_recorded_before_it_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "events")
    monkeypatch.setenv(events.ENV, path)
    monkeypatch.setenv(ENV, "sigkill:rank=1")
    status_of(fork(lambda: Injector.from_env().check("step", **PLACE)))
    (record,) = events.load(path)
    expected = {"event": "inject", "kind": "sigkill", "where": "step", **PLACE}
    assert {name: record[name] for name in expected} == expected


@pytest.mark.parametrize("plug_in", [InjectInitialize, InjectFinalize])
def test_plug_ins_ask_with_the_state(plug_in: type[InjectInitialize] | type[InjectFinalize]) -> None:
    where = "initialize" if plug_in is InjectInitialize else "finalize"
    spare = FrozenState(rank=3, world_size=4, initial_rank=3, iteration=1, mode=Mode.INACTIVE)
    for text, other in [("slot=3:iteration=1", "slot=2"), ("iteration=1", "iteration=0")]:
        assert plug_in(Injector(parse_faults(f"exception:where={where}:{other}")))(spare) is spare
        with pytest.raises(InjectedFault):
            plug_in(Injector(parse_faults(f"exception:where={where}:{text}")))(spare)
    active = dataclasses.replace(spare, active_rank=2)
    by_rank = parse_faults(f"exception:where={where}:rank=2")
    assert plug_in(Injector(by_rank))(spare) is spare
    with pytest.raises(InjectedFault):
        plug_in(Injector(by_rank))(active)


@given(st.integers(), st.integers(0, 20))
def test_random_faults_depend_on_the_seed_alone(seed: int, count: int) -> None:
    kinds = [FaultKind.EXCEPTION, FaultKind.SIGKILL, FaultKind.SLEEP]
    faults = random_faults(seed, kinds, ranks=range(3), steps=range(5, 25), count=count)
    assert faults == random_faults(seed, kinds, ranks=range(3), steps=range(5, 25), count=count)
    steps = [fault.step for fault in faults]
    assert len(faults) == count and steps == sorted(set(steps)) and set(steps) <= set(range(5, 25))
    assert {fault.rank for fault in faults} <= {0, 1, 2}
    for begin in range(0, count - 2, 3):
        assert {fault.kind for fault in faults[begin : begin + 3]} == set(kinds)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"kinds": []}, "kinds="), ({"ranks": []}, "ranks="), ({"count": 3}, "count=3.*0..2")],
)
def test_random_faults_need_a_choice(wrong: dict[str, object], message: str) -> None:
    arguments = {"seed": 0, "kinds": [FaultKind.EXIT], "ranks": [0], "steps": [1, 2], "count": 1, **wrong}
    with pytest.raises(ValueError, match=message):
        random_faults(**arguments)  # type: ignore[arg-type]
