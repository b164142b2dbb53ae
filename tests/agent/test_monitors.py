"""The monitors inside the agent: who gets one, and what they notice."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver as forkservers
from multiprocessing import resource_tracker as trackers
from pathlib import Path
from typing import Any

import pytest
from agent_job import FtRun, await_that
from monitored_rank import SETTINGS, TIMEOUT, Rank

from ft_wrapper.agent import monitors as module
from ft_wrapper.agent.monitors import Monitors
from ft_wrapper.monitor import wire
from ft_wrapper.store import Member, TCPStore, TCPStoreServer
from ft_wrapper.store.keys import BEFORE_FIRST


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    """Ranks are forked from a process that has torch, and nothing of this one."""
    server: Any = vars(forkservers)["_forkserver"]  # its _stop is for tests
    tracker: Any = vars(trackers)["_resource_tracker"]
    tracked = tracker._fd is not None
    server._stop()
    multiprocessing.set_forkserver_preload(["ft_wrapper.monitor.line"])
    yield
    server._stop()
    multiprocessing.set_forkserver_preload([])
    if not tracked:
        tracker._stop()


@pytest.fixture
def store() -> Iterator[TCPStore]:
    server = TCPStoreServer()
    client = TCPStore("127.0.0.1", server.port)
    yield client
    client.close()
    server.close()


@pytest.fixture
def monitors() -> Iterator[Monitors]:
    with Monitors("job") as monitors:
        yield monitors


Start = Callable[[], Rank]


@pytest.fixture
def start(monitors: Monitors, store: TCPStore) -> Iterator[Start]:
    """Starts a process that is a rank's in the monitors' eyes."""
    with contextlib.ExitStack() as ranks:

        def start() -> Rank:
            rank = Rank(monitors.name, f"127.0.0.1:{store.port}")
            ranks.callback(rank.close)
            monitors.add(rank.pid)
            return rank

        yield start


def join(rank: Rank, store: TCPStore, slot: int) -> Member:
    """Has a rank begin a call and say who it is, in a job that nobody else is in."""
    member = store.register(slot, "{}")
    assert rank.tell("begin")
    rank.tell("join", member.slot, member.incarnation)
    return member


def await_death(store: TCPStore, member: Member) -> None:
    deadline = time.monotonic() + TIMEOUT
    while member not in store.deaths_of(BEFORE_FIRST):
        assert time.monotonic() < deadline, f"nobody has said that {member} died"
        time.sleep(0.005)


def threads() -> int:
    return threading.active_count()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def await_level(measure: Callable[[], int], level: int) -> None:
    """Waits until no more are left than there were."""
    deadline = time.monotonic() + TIMEOUT
    while measure() > level:
        assert time.monotonic() < deadline, f"{measure()} {measure.__name__} instead of {level}"
        time.sleep(0.01)


def test_deaths_are_told_and_nothing_piles_up(monitors: Monitors, start: Start, store: TCPStore) -> None:
    """Every other rank dies in its call; the others leave in order, and have a second call."""
    dead = set()
    idle = threads()
    for slot in range(20):
        rank = start()
        member = join(rank, store, slot)
        assert rank.tell("serve") > 0
        if slot % 2:
            rank.kill()
            await_death(store, member)
            dead.add(member)
        else:
            rank.tell("end")
            join(rank, store, slot)
            rank.tell("end")
        monitors.remove(rank.pid)
        rank.close()
        if slot == 1:
            await_level(threads, idle)
            level = descriptors()
    await_level(threads, idle)
    await_level(descriptors, level)
    assert store.deaths_of(BEFORE_FIRST) == dead


def test_one_monitor_at_a_time_for_each_process(start: Start) -> None:
    rank = start()
    assert rank.tell("begin")
    assert not rank.tell("begin")
    assert start().tell("begin")
    rank.tell("end")
    assert rank.tell("begin")


def test_who_is_no_rank_is_refused(
    monitors: Monitors, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(TIMEOUT)
            line.connect(f"\0{monitors.name}")
            return str(wire.receive(line)["refused"])

    # This process is not below itself.
    assert refused() == f"process {os.getpid()} is no rank's"
    monkeypatch.setattr(module, "_KNOWN_WITHIN", 0.1)
    with contextlib.closing(Rank(monitors.name, f"127.0.0.1:{store.port}")) as unknown:
        assert not unknown.tell("begin")
        monitors.add(unknown.pid)
        assert unknown.tell("begin")
        unknown.tell("end")
        monitors.remove(unknown.pid)
        assert not unknown.tell("begin")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert refused() == f"process {os.getpid()} is user {os.getuid()}'s"
    monkeypatch.undo()

    def gone(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", gone)
    assert refused() == f"process {os.getpid()} has ended"


def test_a_process_is_waited_for_that_is_at_work_before_it_is_known(
    monitors: Monitors, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KNOWN_WITHIN", TIMEOUT)
    with contextlib.closing(Rank(monitors.name, f"127.0.0.1:{store.port}")) as rank:
        idle = threads()
        answer: list[bool] = []
        teller = threading.Thread(target=lambda: answer.append(rank.tell("begin")))
        teller.start()
        deadline = time.monotonic() + TIMEOUT
        while threads() < idle + 2:  # the teller, and the one who attends
            assert time.monotonic() < deadline
            time.sleep(0.005)
        monitors.add(rank.pid)
        teller.join(TIMEOUT)
        assert answer == [True]


def hello(**changes: object) -> bytes:
    settings = dataclasses.asdict(SETTINGS)
    whole = {"version": wire.VERSION, "settings": settings, "store": {"address": "a:1", "timeout": 1.0}}
    return json.dumps({**whole, **changes}).encode() + b"\n"


def test_what_one_rank_says_harms_no_other(
    monitors: Monitors, start: Start, store: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    watched, odd = start(), start()
    member = join(watched, store, 0)
    for words, with_memory in (
        (b"}{ \xff\n", True),
        (b"[]\n", True),
        (b"x" * (1 << 17) + b"\n", True),
        (hello(), False),
        (hello(version=-1), True),
        (hello(settings={"soft_timeout": 1.0}), True),
        (hello(store={"address": "nowhere", "timeout": 1.0}), True),
        (hello(store=None), True),
    ):
        assert odd.tell("say hello", words, with_memory).startswith("no proper hello: ")
    assert odd.tell("say hello", hello()[:9], True) is None  # and no more, for as long as that one lives
    join(odd, store, 1)
    odd.tell("say", b"garbage\n")
    assert odd.tell("await loss")
    assert "a rank is without its monitor" in caplog.text
    watched.kill()
    await_death(store, member)
    assert store.deaths_of(BEFORE_FIRST) == {member}
    odd.tell("end")
    caplog.clear()
    monitors.close()
    assert not caplog.records


def test_the_end_waits_for_nobody_for_ever(
    monitors: Monitors, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that lives yet, and lets go of nothing, is left without its monitor, and sees that."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.1)
    before = threads()
    rank = start()
    assert rank.tell("begin")
    monitors.close()
    assert "1 monitors are not through after 0.1 s" in caplog.text
    assert rank.tell("await loss")
    assert not rank.tell("begin")
    rank.tell("end")
    await_level(threads, before - 1)


# ---- under ftrun

JOB = """
    import os, signal, time
    from pathlib import Path
    from ft_wrapper import CallWrapper, Wrapper

    often = dict.fromkeys(
        ["heartbeat_interval", "monitor_process_interval", "progress_watchdog_interval"], 0.2
    )

    @Wrapper(use_global_iteration=True, join_window=0.1, soft_timeout=5, hard_timeout=6,
             termination_grace_time=0.2, **often)
    def train(call, call_wrapper: CallWrapper = None):
        n, rank = call_wrapper.iteration, os.environ["RANK"]
        Path(f"in.{call}.{n}.{rank}").touch()
        while not Path(f"done.{call}").exists():
            if rank == "2" and Path(f"stop.{n}").exists():
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.01)

    train(0)
    train(1)
"""


def test_no_process_is_needed_beside_a_rank(tmp_path: Path) -> None:
    """Whatever happens: a rank is killed, one is stopped past its timeout, another call begins."""
    script, folder = tmp_path / "script.py", tmp_path / "job"
    script.write_text(textwrap.dedent(JOB))
    with FtRun(folder, "--nproc-per-node", "3", str(script)) as job:

        def expect_all_in(call: int, after: int) -> int:
            """In an iteration of the call, which is returned; with nobody but the ranks at work."""
            found: list[int] = []

            def look() -> bool:
                files = [path.name.split(".") for path in folder.glob(f"in.{call}.*.*")]
                here = [int(n) for _, _, n, _ in files]
                found.extend(n for n in here if n > after and here.count(n) == 3)
                return bool(found)

            await_that(look, job)
            family = job.family()
            assert [process for process in family if process.ppid() != job.process.pid] == []
            known = {pid for rank in range(3) for pid in job.pids(rank)}
            assert len({process.pid for process in family} - known) <= 2  # the template; one forked ahead
            return found[0]

        n = expect_all_in(0, after=-1)
        os.kill(job.pids(1)[0], signal.SIGKILL)
        n = expect_all_in(0, after=n)
        (folder / f"stop.{n}").touch()
        n = expect_all_in(0, after=n)
        assert "ftrun: 2:0: held the GIL or was stopped for hard_timeout=6 s; ending process" in job.said
        (folder / "done.0").touch()
        expect_all_in(1, after=n)
        (folder / "done.1").touch()
        assert job.end() == 0, job.said
        assert [len(job.pids(rank)) for rank in range(3)] == [1, 2, 2]
        assert {record["job"] for record in job.events("fault")} == {job.events("rank_started")[0]["job"]}


BELOW_A_SHELL = """
    import os, psutil
    from ft_wrapper import Wrapper
    from ft_wrapper.monitor.line import line_to_agent
    from ft_wrapper.monitor.shared_memory import RankMemory
    from ft_wrapper.store import announced_plan

    @Wrapper
    def train():
        return len(psutil.Process().children())

    beside = [train()]
    with RankMemory() as memory:
        memory.lock_life()
        plan = announced_plan(os.environ["FT_WRAPPER_STORE"], 20.0)
        line = line_to_agent(Wrapper().monitor_settings(), plan, memory, lambda: None)
        beside.append(train())
        line.close(20.0)
    beside.append(train())
    print("beside:", *beside, flush=True)
"""


def test_a_shell_between_and_a_rank_that_is_refused(tmp_path: Path) -> None:
    """A process of its own is forked where there is a monitor already, and only there."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(BELOW_A_SHELL))
    command = f"{sys.executable} {script}; exit $?"
    with FtRun(tmp_path / "job", "--nproc-per-node", "1", "--no-python", "bash", "-c", command) as job:
        assert job.end() == 0, job.said
        assert "beside: 0 1 0" in job.said
