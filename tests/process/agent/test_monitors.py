"""The monitors inside the agent: who gets one, and what they notice."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver as forkservers
from multiprocessing import resource_tracker as trackers
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_job import FtRun, await_that, write_script
from monitored_rank import SETTINGS, TIMEOUT, Rank

from ft_wrapper.exception import StoreError
from ft_wrapper.monitor import service as module
from ft_wrapper.monitor import watch
from ft_wrapper.monitor.line import ask_agent
from ft_wrapper.monitor.messages import VERSION, HelloReply, receive, send
from ft_wrapper.monitor.service import MonitorService
from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.deaths import report_deaths
from ft_wrapper.protocol.keys import BEFORE_FIRST
from ft_wrapper.protocol.records import Member, MemberRecord, View
from ft_wrapper.store import TCPStore, TCPStoreServer
from ft_wrapper.store.plan import announced_plan
from ft_wrapper.store.secret import AGENT_ENV


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    """Ranks are forked from a process that has torch, and nothing of this one."""
    server: Any = vars(forkservers)["_forkserver"]  # its _stop is for tests
    tracker: Any = vars(trackers)["_resource_tracker"]
    tracked = tracker._fd is not None
    server._stop()
    multiprocessing.set_forkserver_preload(["ft_wrapper.monitor.service"])
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
def monitors() -> Iterator[MonitorService]:
    with contextlib.closing(MonitorService("job")) as monitors:
        yield monitors


Start = Callable[[], Rank]


@pytest.fixture
def start(monitors: MonitorService, store: TCPStore) -> Iterator[Start]:
    """Starts a process that is a rank's in the monitors' eyes."""
    with contextlib.ExitStack() as ranks:

        def start() -> Rank:
            rank = Rank(monitors.name, f"127.0.0.1:{store.port}")
            ranks.callback(rank.close)
            monitors.add(rank.pid)
            return rank

        yield start


def join(rank: Rank, store: TCPStore, slot: int) -> Member:
    """Has a rank begin a call and say who it is, in a job that no one else is in."""
    member = Agreement(store).joining.register(slot)
    assert rank.tell("begin")
    rank.tell("join", member.slot, member.incarnation)
    return member


def await_death(store: TCPStore, member: Member) -> None:
    await_that(lambda: member in Agreement(store).ends.deaths_of(BEFORE_FIRST))


def threads() -> int:
    return threading.active_count()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("ft_wrapper_rank")


def await_level(measure: Callable[[], int], level: int) -> None:
    """Waits until no more are left than there were."""
    await_that(lambda: measure() <= level)


def test_death_of_a_rank_that_has_just_asked_for_a_store_is_told(
    start: Start, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start()
    member = join(rank, store, 0)
    open_server = watch.serve

    def serve(*args: Any) -> Any:
        rank.kill()
        rank.process.join(TIMEOUT)
        return open_server(*args)

    monkeypatch.setattr(watch, "serve", serve)
    with contextlib.suppress(EOFError):  # it may die before it confirms this
        rank.tell("say", b'Serve {"host": "127.0.0.1"}\n')
    await_death(store, member)


def test_deaths_are_told_and_nothing_piles_up(
    monitors: MonitorService, start: Start, store: TCPStore, request: pytest.FixtureRequest
) -> None:
    """Every other rank dies in its call; the others leave in order, and have a second call."""
    gc.disable()  # nor does memory that ranks share wait for a collection
    request.addfinalizer(gc.enable)
    dead = set()
    idle = threads()
    for slot in range(8):
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
            level, mapped = descriptors(), mappings()
    await_level(threads, idle)
    await_level(descriptors, level)
    await_level(mappings, mapped)
    assert Agreement(store).ends.deaths_of(BEFORE_FIRST) == dead


def test_ranks_are_handed_over_as_long_as_their_processes_run(
    monitors: MonitorService, start: Start, store: TCPStore
) -> None:
    def in_call() -> int:
        return sum(is_in_call for _, is_in_call in monitors.ranks())

    rank = start()
    assert monitors.ranks() == [(None, False)]
    join(rank, store, 0)
    ((first, is_in_call),) = monitors.ranks()
    assert first is not None and is_in_call and first.iteration == -1
    assert rank.tell("between")
    ((between, is_in_call),) = monitors.ranks()
    assert between is first and not is_in_call
    join(rank, store, 0)
    assert rank.tell("end the earlier")
    ((second, is_in_call),) = monitors.ranks()
    assert second not in (None, first) and is_in_call
    assert start().tell("begin")
    assert in_call() == 2
    rank.tell("end")
    await_level(in_call, 1)
    (late, _), _ = monitors.ranks()
    assert late is second and late.iteration == -1, "it may still be read"
    left = monitors.remove(rank.pid)
    assert left is second and not left.leave_requested and not left.is_life_held
    assert len(monitors.ranks()) == 1


def test_one_that_has_died_was_to_leave(monitors: MonitorService, start: Start, store: TCPStore) -> None:
    idle = threads()
    rank = start()
    member = join(rank, store, 0)
    assert not monitors.ask_to_leave(rank.pid), "it has no step to leave at"
    ((memory, _),) = monitors.ranks()
    assert memory is not None and not memory.end_requested
    for pid in (rank.pid, -1):  # not every process has a memory
        monitors.about_to_send(signal.SIGTERM, pid)
    assert memory.end_requested
    rank.kill()
    await_death(store, member)
    await_level(threads, idle)
    memory = monitors.remove(rank.pid)
    assert memory is not None and memory.leave_requested
    assert memory.is_life_held, "it ended in its call, whatever its exit code is"
    assert monitors.remove(rank.pid) is None and not monitors.ask_to_leave(rank.pid), "it is not known"


def test_hello_is_answered_with_who_is_replaced(monitors: MonitorService, start: Start) -> None:
    """Also to a rank that gets no monitor; one that could not join is left out for good."""
    rank = start()
    monitors.add(rank.pid, replaced=True)
    assert rank.tell("ask", True, False) == (None, True)
    assert rank.tell("ask", False, False) == (None, False)
    assert rank.tell("begin")
    assert not rank.tell("replaced")  # for want of rejoin
    assert rank.tell("ask", True, True) == (None, True)  # it has a monitor already
    assert start().tell("ask", True, False) == (None, False)
    rank.tell("end")


def test_an_agent_that_answers_and_hangs_up_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.closing(RankMemory()) as memory:
        listener.bind("\0ft_wrapper-test-" + os.urandom(8).hex())
        listener.listen()
        monkeypatch.setenv(AGENT_ENV, listener.getsockname()[1:].decode())

        def answer() -> None:
            with listener.accept()[0] as line:
                for fd in socket.recv_fds(line, 1, 2)[1]:
                    os.close(fd)
                assert receive(line)["watch"] is False
                send(line, vars(HelloReply(replaced=True, refused="there is one already")))

        agent = threading.Thread(target=answer)
        agent.start()
        plan = announced_plan("127.0.0.1:1", 20.0)
        assert ask_agent(SETTINGS, plan, memory, listener, print, watch=False) == (None, True)
        agent.join()


# ---- one heart for all


def join_with_heart(rank: Rank, store: TCPStore, slot: int) -> tuple[Member, str]:
    """Has a rank begin a call and say who it is; the name of its heart."""
    assert rank.tell("begin")
    heart: str = rank.tell("heart")
    member = Agreement(store).joining.register(slot, MemberRecord(heart=heart))
    rank.tell("join", member.slot, member.incarnation)
    return member, heart


def test_the_ranks_of_an_agent_share_a_heart_that_beats_as_long_as_one_lives(
    monitors: MonitorService, start: Start, store: TCPStore
) -> None:
    idle = threads()
    ranks = [start(), start(), start()]
    members, hearts = zip(
        *(join_with_heart(rank, store, slot) for slot, rank in enumerate(ranks)), strict=True
    )
    assert len(set(hearts)) == 1
    await_beat(store, members[0])
    assert [thread.name for thread in threading.enumerate()].count("ft_wrapper: heartbeat") == 1
    beating = [key for key in store.list_keys() if "/heartbeat/" in key]
    # torch 2.6 cannot list keys.
    assert beating == [keys.heartbeat(hearts[0])] or not hasattr(store.torch_store, "list_keys")
    ranks[0].kill()
    await_death(store, members[0])
    ranks[1].tell("end")
    await_beat(store, members[2])
    ranks[2].tell("end")
    await_level(threads, idle)
    with contextlib.closing(MonitorService("job")) as others:
        rank = Rank(others.name, f"127.0.0.1:{store.port}")
        with contextlib.closing(rank):
            others.add(rank.pid)
            assert join_with_heart(rank, store, 0)[1] != hearts[0]
            rank.tell("end")


@pytest.mark.parametrize("between", [False, True])
def test_a_death_is_told_again_as_long_as_the_hearts_beat_would_hide_it(
    start: Start, store: TCPStore, between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Member] = []

    def report(agreement: Agreement, view: View | None, dead: dict[Member, Any], **more: Any) -> None:
        tries.extend(dead)
        if len(tries) % 3:
            raise StoreError("out of reach")
        report_deaths(agreement, view, dead, **more)

    monkeypatch.setattr(watch, "report_deaths", report)
    idle = threads()
    dies, lives = start(), start()
    member, _ = join_with_heart(dies, store, 0)
    other, _ = join_with_heart(lives, store, 1)
    if between:
        assert dies.tell("between")
    dies.kill()
    await_death(store, member)
    assert tries == [member] * 3
    assert not Agreement(store).ends.faults_of(BEFORE_FIRST) or not between
    lives.kill()  # its heart is silent now, and it is tried once
    await_level(threads, idle)
    assert tries == [*[member] * 3, other]


# ---- between two calls


def await_beat(store: TCPStore, member: Member) -> None:
    """Waits until a member that has been heard is heard again."""
    before = Agreement(store).heartbeats.get_heartbeat(member)
    await_that(lambda: Agreement(store).heartbeats.get_heartbeat(member) != before)


def in_a_call(rank: Rank, store: TCPStore) -> tuple[View, Member]:
    """Has a rank begin a call, with another member that no one has a process for."""
    assert rank.tell("begin")
    heart = rank.tell("heart")
    members = [Agreement(store).joining.register(slot, MemberRecord(heart=heart)) for slot in (0, 1)]
    for member in members:
        Agreement(store).joining.join_first(member, [0, 1])
    current = Agreement(store).iterations.read_current()
    assert current is not None
    member = members[0]
    rank.tell("join", member.slot, member.incarnation)
    rank.tell("enter", current, 0)
    return current, member


def test_a_rank_between_two_calls_is_heard_and_its_death_noticed(
    start: Start, store: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no thread left, and whatever its memory says is no one's affair."""
    rank = start()
    view, member = in_a_call(rank, store)
    Agreement(store).ends.end_iteration(view.n, "done")
    assert rank.tell("between")
    for _ in range(3):
        await_beat(store, member)
    assert rank.tell("threads") == 0
    rank.kill()
    ends = Agreement(store).ends
    await_that(lambda: member in ends.deaths_of(view.n) and member in ends.goodbyes())
    assert Agreement(store).ends.outcome_of(view.n) == "done"
    assert Agreement(store).ends.faults_of(view.n) == []
    assert not caplog.records


def test_the_next_calls_monitor_takes_over(monitors: MonitorService, start: Start, store: TCPStore) -> None:
    """The earlier one goes on until the other one has joined."""
    rank = start()
    level = threads()
    view, member = in_a_call(rank, store)
    Agreement(store).ends.end_iteration(view.n, "done")
    for _ in range(3):
        assert rank.tell("between")
        assert rank.tell("begin")
        store.set(keys.member(str(member)), json.dumps({"heart": rank.tell("heart")}))
        rank.tell("join", member.slot, member.incarnation)
        assert not rank.tell("begin")
        rank.tell("end the earlier")
        await_beat(store, member)
    assert not Agreement(store).ends.deaths_of(view.n)
    rank.tell("end")
    await_level(threads, level)
    monitors.remove(rank.pid)


def test_a_job_that_has_ended_is_told_of_nothing(
    monitors: MonitorService, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the last call: the store goes first, the process when it likes."""
    idle = threads()
    server = TCPStoreServer()
    store = TCPStore("127.0.0.1", server.port)
    with contextlib.closing(Rank(monitors.name, f"127.0.0.1:{server.port}")) as rank:
        monitors.add(rank.pid)
        view, member = in_a_call(rank, store)
        Agreement(store).ends.end_iteration(view.n, "done")
        assert rank.tell("between")
        await_beat(store, member)
        store.close()
        server.close()
        rank.exit()
    await_level(threads, idle)
    # The store itself may say that it has lost its server; who watches says nothing.
    assert not [one.name for one in caplog.records if not one.name.startswith("ft_wrapper.store.")]


def test_who_is_no_rank_is_refused(
    monitors: MonitorService, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(TIMEOUT)
            line.connect(f"\0{monitors.name}")
            # The service refuses another user and hangs up without reading this byte.
            with contextlib.suppress(BrokenPipeError):
                line.sendall(b"!")
            return HelloReply(**receive(line)).refused

    # This process is not below itself.
    assert refused() == f"process {os.getpid()} is not a rank's"
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
    monitors: MonitorService, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KNOWN_WITHIN", TIMEOUT)
    with contextlib.closing(Rank(monitors.name, f"127.0.0.1:{store.port}")) as rank:
        idle = threads()
        answer: list[bool] = []
        teller = threading.Thread(target=lambda: answer.append(rank.tell("begin")))
        teller.start()
        await_that(lambda: threads() >= idle + 2)  # the teller, and the one who attends
        monitors.add(rank.pid)
        teller.join(TIMEOUT)
        assert answer == [True]


def hello(**changes: object) -> bytes:
    settings, store = dataclasses.asdict(SETTINGS), {"address": "a:1", "timeout": 1.0}
    whole = {"version": VERSION, "settings": settings, "store": store, "watch": True}
    return b"!" + json.dumps({**whole, **changes}).encode() + b"\n"


def test_what_one_rank_says_harms_no_other(
    monitors: MonitorService, start: Start, store: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    watched, odd = start(), start()
    member = join(watched, store, 0)
    for words, with_memory in (
        (b"!}{ \xff\n", True),
        (b"![]\n", True),
        (b"!" + b"x" * (1 << 17) + b"\n", True),
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
    assert f"the monitor of process {odd.pid} failed, so the rank leaves the job" in caplog.text
    watched.kill()
    await_death(store, member)
    assert Agreement(store).ends.deaths_of(BEFORE_FIRST) == {member}
    odd.tell("end")
    caplog.clear()
    monitors.close()
    assert not caplog.records


def test_the_end_waits_for_nobody_for_ever(
    monitors: MonitorService, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that lives yet, and lets go of nothing, is left without its monitor, and sees that."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.1)
    before = threads()
    rank = start()
    assert rank.tell("begin")
    monitors.close()
    assert "monitors that ranks still hold after 0.1 s: 1, left behind" in caplog.text
    assert rank.tell("await loss")
    assert not rank.tell("begin")
    rank.tell("end")
    await_level(threads, before - 1)


# ---- under ftrun

JOB = """
    import os, signal, time
    from pathlib import Path
    from ft_wrapper import CallWrapper, Limits, Wrapper

    often = dict.fromkeys(
        ["heartbeat_interval", "monitor_process_interval", "progress_watchdog_interval"], 0.2
    )

    @Wrapper(rejoin=True, soft_timeout=5, hard_timeout=6, termination_grace_time=0.2, **often,
             limits=Limits(join_window=0.1))
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
    script, folder = write_script(tmp_path, JOB), tmp_path / "job"
    with FtRun(folder, "--nproc-per-node", "3", script) as job:

        def expect_all_in(call: int, after: int) -> int:
            """In an iteration of the call, which is returned; with no one but the ranks at work."""
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
        processes = [psutil.Process(job.process.pid), *job.family()]
        sockets = [one for process in processes for one in process.net_connections("inet")]
        where = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
        assert where == {"127.0.0.1"}, "a job on one node is reached from outside"
        os.kill(job.pids(1)[0], signal.SIGKILL)
        n = expect_all_in(0, after=n)
        (folder / f"stop.{n}").touch()
        n = expect_all_in(0, after=n)
        assert ") was stopped by a signal for hard_timeout=6 s: its process is ended" in job.said
        (folder / "done.0").touch()
        expect_all_in(1, after=n)
        (folder / "done.1").touch()
        assert job.end() == 0, job.said
        assert [len(job.pids(rank)) for rank in range(3)] == [1, 2, 2]
        assert {record["job"] for record in job.events("fault")} == {job.events("rank_started")[0]["job"]}


PAUSED = """
    import os, time
    from pathlib import Path
    from ft_wrapper import CallWrapper, Wrapper

    often = dict.fromkeys(
        ["heartbeat_interval", "monitor_process_interval", "progress_watchdog_interval"], 0.2
    )

    @Wrapper(rejoin=True, soft_timeout=2.5, hard_timeout=3, heartbeat_timeout=3, **often)
    def train(call_wrapper: CallWrapper = None):
        Path(f"in.{call_wrapper.iteration}.{os.environ['RANK']}").touch()
        while not Path("thawed").exists():
            time.sleep(0.01)
        for _ in range(50):  # so that it is looked at
            time.sleep(0.02)

    train()
"""


@pytest.mark.nightly("tests/unit/monitor/test_pauses.py has what counts as silence after a pause")
def test_a_job_that_was_paused_as_a_whole_goes_on_where_it_was(tmp_path: Path) -> None:
    """As by ``docker pause``, for longer than all timeouts."""
    script, folder = write_script(tmp_path, PAUSED), tmp_path / "job"
    with FtRun(folder, "--nproc-per-node", "2", script) as job:
        await_that(lambda: len(list(folder.glob("in.*"))) == 2, job)
        everybody = [job.process.pid, *(process.pid for process in job.family())]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)  # the pause
        (folder / "thawed").touch()
        for pid in everybody:  # the agent first, which ends others
            os.kill(pid, signal.SIGCONT)
        assert job.end() == 0, job.said
        assert sorted(path.name for path in folder.glob("in.*")) == ["in.0.0", "in.0.1"], job.said
        assert [len(job.pids(rank)) for rank in range(2)] == [1, 1]


BELOW_A_SHELL = """
    import psutil
    from ft_wrapper import Wrapper

    @Wrapper
    def train():
        print("beside:", len(psutil.Process().children()), flush=True)

    train()
"""


@pytest.mark.nightly("the other tests of monitors run always")
def test_a_rank_below_a_shell_needs_no_process_either(tmp_path: Path) -> None:
    script = write_script(tmp_path, BELOW_A_SHELL)
    command = f"{sys.executable} {script}; exit $?"
    with FtRun(tmp_path / "job", "--nproc-per-node", "1", "--no-python", "bash", "-c", command) as job:
        assert job.end() == 0, job.said
        assert "beside: 0" in job.said
