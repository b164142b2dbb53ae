"""What the end of a job means: which failures count, the exit codes of all agents, and the result file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from agent_job import FtRun, await_that, send
from support.nightly import at_night
from test_nodes import WRAPPED, Cluster
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)

from ft_wrapper.agent.agent import Loop, run_rounds
from ft_wrapper.agent.nodes import BadNode, CannotStart, Nodes, exit_code_of
from ft_wrapper.agent.outputs import describe_exit
from ft_wrapper.agent.rounds import End, Failure, JobResult, Round, alone, result_of_failures, worst
from ft_wrapper.agent.signals import SIGNALS, queued
from ft_wrapper.exception import StoreUnavailable, TimeoutError
from ft_wrapper.rendezvous.record import RendezvousRecord
from ft_wrapper.run import main

# When: in the last call, before it has ended; between two calls; after the last one.
FAILS = """
    import os, signal, sys
    from ft_wrapper import CallWrapper, Limits, Wrapper

    folder, how, who, when, calls, joins = sys.argv[1:]
    rank, is_first = os.environ["RANK"], os.environ["FT_WRAPPER_INCARNATION"] == "0"
    last = str(int(os.environ["WORLD_SIZE"]) - 1)
    settings = {"active_world_size": 1} if who == "spare" else {}

    def fail(moment):
        if moment != when or not is_first or (who != "all" and rank != last):
            return
        if how == "raise":
            raise RuntimeError("the export failed")
        if how == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)

    @Wrapper(rejoin=joins == "joins", **settings, limits=Limits(on_join="now", rejoin_wait=60))
    def train(number, call_wrapper: CallWrapper = None):
        if number == calls:
            fail("in")

    for number in range(1, int(calls) + 1):
        train(str(number))
        if number < int(calls):
            fail("between")
    fail("after")
"""


@pytest.mark.parametrize(
    # How, who, when, number of wrapped calls, whether replacements join, and number of nodes.
    "case",
    [
        "raise one after 1 joins 2",
        "os._exit one between 2 joins 1",
        *at_night(
            "others like it run always",
            ["SIGSEGV all after 2 alone 1", "os._exit spare after 1 alone 1", "os._exit one in 2 joins 1"],
        ),
    ],
)
def test_a_failure_counts_from_the_end_of_the_last_call_on(tmp_path: Path, case: str) -> None:
    *arguments, nodes = case.split()
    when = arguments[2]
    with Cluster(tmp_path, FAILS, nnodes=nodes, nproc=2) as cluster:
        cluster.arguments += arguments
        jobs = [cluster.start(str(number)) for number in range(int(nodes))]
        codes = [job.end() for job in jobs]
    said = "\n---\n".join(job.said for job in jobs)
    if when == "after":
        # The ranks of the first node may be fine: it waits for the other one, and says what that has said.
        assert codes == [75 if arguments[0] == "SIGSEGV" else 1] * len(jobs), said
        assert "the job finished all the same" not in said
    else:
        assert codes == [0] * len(jobs), said
        assert said.count("the job finished all the same") == 1


# The table of docs/launching.md --------------------------------------------------------------------------

TAKEN = socket.socket()
"""Holds a port without listening, so connections to it are refused."""
TAKEN.bind(("127.0.0.1", 0))
PORT = TAKEN.getsockname()[1]
DRAINING = ("--drain-timeout", "60", "--drained-exit-code", "9")
NOBODY = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{PORT} --rdzv-conf is_host=false,read_timeout=1"


@pytest.mark.parametrize(
    ("program", "options", "code", "verdict", "whose"),
    [
        ("exit 0", (), 0, "done", ""),
        ("exit 1", (), 1, "program", "exit code 1"),
        ("kill -9 $$", (), 75, "infrastructure", "killed by SIGKILL"),
        ("kill -9 $$", ("--max-restarts", "1"), 1, "program", "killed by SIGKILL"),
        ("exit 0", ("--master-port", str(PORT)), 2, "command line", "cannot be used on this host"),
        ("exit 0", NOBODY.split(), 75, "infrastructure", "is the node"),
        ("exit 0", ("--node-check", "echo a fan; false"), 76, "bad node", "a fan"),
        ("kill -15 $PPID; exec sleep 60", (), 143, "signal", "SIGTERM"),
    ],
)
def test_the_end_of_one_node(
    tmp_path: Path, program: str, options: Sequence[str], code: int, verdict: str, whose: str
) -> None:
    file = tmp_path / "result"
    assert main(["--result-file", str(file), *options, "--no-python", "sh", "-c", program]) == code
    found = json.loads(file.read_text())
    assert (found["exit_code"], found["verdict"]) == (code, verdict)
    assert whose in found["why"]
    assert [*tmp_path.iterdir()] == [file]


ENDS = """
    import os, signal, sys, time
    from ft_wrapper import CallWrapper, Limits, Wrapper

    folder, how = sys.argv[1:]
    rank = os.environ["RANK"]

    quick = {"soft_timeout": 2, "hard_timeout": 3, "heartbeat_timeout": 3, "barrier_timeout": 4}

    @Wrapper(rejoin=True, min_world_size=2, **(quick if how == "too few" else {}),
             limits=Limits(rejoin_wait=0.1))
    def train(call_wrapper: CallWrapper = None):
        if how == "too few" and rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "too few":
            time.sleep(0.02)

    train()
    if how == "crashes in the export" and rank == "1":
        os.kill(os.getpid(), signal.SIGSEGV)
"""
# All ranks of node 1 die whenever they start; the others go on for as long as that takes.
ONE_BAD_NODE = WRAPPED.replace(
    "    train()\n",
    """    if os.environ["GROUP_RANK"] == "1" and os.environ["FT_WRAPPER_INCARNATION"] > "0":
        os.kill(os.getpid(), 9)
    train()
""",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A job, what is done to it, and what it ends with on each node."""

    codes: tuple[int, ...]
    verdict: str
    source: str = ENDS
    how: str = "-"
    options: tuple[str, ...] = ()
    act: Callable[[Cluster, list[FtRun]], object] = lambda cluster, nodes: None
    whose: str = ""
    """Words of the reason."""


def inside(cluster: Cluster, nodes: list[FtRun]) -> None:
    cluster.await_inside(2, *nodes)
    await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)


def end_last(cluster: Cluster, nodes: list[FtRun]) -> None:
    inside(cluster, nodes)
    nodes[-1].process.send_signal(signal.SIGTERM)
    await_that(lambda: nodes[-1].process.poll() is not None)
    (cluster.shared / "finish").touch()


def end_host(cluster: Cluster, nodes: list[FtRun]) -> None:
    inside(cluster, nodes)
    nodes[0].process.send_signal(signal.SIGTERM)


def kill_bad(cluster: Cluster, nodes: list[FtRun]) -> None:
    """Its rank dies, and again with each start; then the others may finish."""
    (rank,) = (rank for rank in cluster.await_inside(2, *nodes) if rank["GROUP_RANK"] == "1")
    send(rank["pid"], signal.SIGKILL)
    await_that(lambda: nodes[1].process.poll() is not None)
    (cluster.shared / "finish").touch()


ROWS = {
    "too few are left": Row(
        (75, 76), "bad node", how="too few", options=("--max-rank-restarts", "0"), whose="its ranks are lost"
    ),
    "crashes in the export": Row(
        (75, 75), "infrastructure", how="crashes in the export", whose="killed by SIGSEGV"
    ),
    "the host is ended": Row(
        *((143, 75), "infrastructure", WRAPPED),
        act=end_host,
        whose="which hosts the rendezvous store, has left: it was ended by SIGTERM",
    ),
    "none of its ranks lives": Row(
        (0, 76), "bad node", ONE_BAD_NODE, options=("--max-rank-restarts", "1"), act=kill_bad
    ),
    "drained": Row((0, 9), "drained", WRAPPED, options=DRAINING, act=end_last),
}


@pytest.mark.parametrize("case", [*[*ROWS][:-1], *at_night("nodes are drained always", ["drained"])])
def test_the_end_of_two_nodes(tmp_path: Path, case: str) -> None:
    row = ROWS[case]
    results = [tmp_path / f"result{number}" for number in range(2)]
    with Cluster(tmp_path, row.source, nnodes="2") as cluster:
        cluster.arguments.append(row.how)
        nodes = [
            cluster.start(str(number), "--result-file", str(path), *row.options)
            for number, path in enumerate(results)
        ]
        row.act(cluster, nodes)
        codes = tuple(node.end() for node in nodes)
    assert codes == row.codes, "\n---\n".join(node.said for node in nodes)
    found = [json.loads(path.read_text()) for path in results]
    assert [result["exit_code"] for result in found] == list(codes)
    assert found[-1]["verdict"] == row.verdict, found
    assert row.whose in found[-1]["why"], found
    if case == "crashes in the export":  # the first node had no failure of its own
        assert found[0] == found[1] and ", node 1)" in found[0]["culprit"]


def died(exitcode: int, rank: int = 0, **more: bool) -> Failure:
    return Failure(rank, 17, exitcode, 0.0, "", "", how=describe_exit(exitcode), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "code", "culprit"),
    [
        pytest.param([died(1)], 1, 0, id="it has raised"),
        pytest.param([died(-9)], 75, 0, id="it was killed"),
        pytest.param([died(-9, came_before=True)], 1, 0, id="killed, as before"),
        pytest.param([died(1, was_stranded=True)], 75, 0, id="it was left alone"),
        pytest.param([died(-9), died(1, 1)], 75, 0, id="killed, then another one has raised"),
        pytest.param([died(1), died(-9, 1)], 1, 0, id="it has raised, then another one was killed"),
        pytest.param([died(-9), died(1, 1, gave_up=True)], 1, 1, id="killed, then another one gave up"),
        pytest.param([died(1, was_stranded=True, gave_up=True)], 1, 0, id="left alone, and gave up"),
    ],
)
def test_what_failures_mean_for_the_job(failures: list[Failure], code: int, culprit: int) -> None:
    result = result_of_failures(failures, "")
    assert (result.exit_code, result.culprit) == (code, f"rank {culprit} (pid 17)")


# Nodes that end before the others --------------------------------------------------------------------------

UNEVEN = """
    import os, sys, time
    from ft_wrapper import CallWrapper, Wrapper

    folder, slow, waits, how = sys.argv[1:]
    rank = os.environ["RANK"]

    def wait_if_slow(where):
        with open(f"{folder}/{where}.{rank}", "a") as entries:
            entries.write("x")
        while rank == slow and not os.path.exists(f"{folder}/finish"):
            time.sleep(0.02)

    @Wrapper(rejoin=True)
    def train(call_wrapper: CallWrapper = None):
        call_wrapper.step(0)
        if waits == "in":
            wait_if_slow("in")

    train()
    wait_if_slow("after")
    if how == "exits" and rank == "1":
        sys.exit(3)
"""
OURSELVES = "the test hosts the store"


@dataclasses.dataclass(frozen=True)
class Going:
    """Two nodes of a job, the second of which ends otherwise than the first, or earlier."""

    slow: str
    """The rank that waits."""
    where: str
    """Where it waits: in the function, or after it."""
    code: int
    """Of the nodes that are there at the end."""
    signum: int
    """What the second node gets."""
    how: str = "-"
    options: tuple[str, ...] = ()
    hosts: str = OURSELVES
    finishes: str = ""
    """The slow rank ends when this is said by its node; it never does if empty."""


BURIED, DRAINED = "no heartbeat from node", "to leave the job"
GOINGS = {
    "ended in the export": Going("1", "after", 75, signal.SIGTERM),
    "lost once it was done": Going("0", "after", 0, signal.SIGKILL, finishes=BURIED),
    "the host is lost": Going("1", "after", 75, signal.SIGKILL, hosts="1"),
    "drained too late, and fails": Going(
        "1", "in", 1, signal.SIGTERM, how="exits", options=DRAINING, finishes=DRAINED
    ),
    "lost in the export": Going("1", "after", 75, signal.SIGKILL),
    "lost once it had failed": Going("0", "after", 1, signal.SIGKILL, how="exits", finishes=BURIED),
    "lost in the function": Going("0", "in", 0, signal.SIGKILL, finishes=BURIED),
}


@pytest.mark.parametrize("case", [*[*GOINGS][:4], *at_night("four ways to go run always", [*GOINGS][4:])])
def test_what_a_node_that_went_had_to_do_is_lost_unless_it_has_said_otherwise(
    tmp_path: Path, case: str
) -> None:
    going = GOINGS[case]
    with Cluster(tmp_path, UNEVEN, nnodes="2") as cluster:
        cluster.arguments += [going.slow, going.where, going.how]
        nodes = {}
        if going.hosts == OURSELVES:
            cluster.host_store()
        else:
            cluster._conf = cluster._conf.replace("read_timeout=20", "read_timeout=3")
        for name in ("0", "1") if going.hosts == OURSELVES else ("1", "0"):
            nodes[name] = cluster.start(name, "--result-file", str(tmp_path / name), *going.options)
        quick = "1" if going.slow == "0" else "0"
        await_that((cluster.shared / f"{going.where}.{going.slow}").exists, *nodes.values())
        if going.where == "after":
            await_that(lambda: "waiting for the other nodes" in nodes[quick].said, *nodes.values())
            cluster.await_word_of(quick)  # it is on its way yet when the line comes
        else:
            await_that(lambda: "a job has formed" in nodes["1"].said, *nodes.values())
        nodes["1"].process.send_signal(going.signum)
        if going.finishes:
            await_that(lambda: going.finishes in nodes[going.slow].said, nodes[going.slow])
            if going.finishes == BURIED and going.where == "in":  # and the death is logged: it has restarted
                entries = cluster.shared / f"in.{going.slow}"
                await_that(lambda: entries.stat().st_size > 1, nodes[going.slow])
            (cluster.shared / "finish").touch()
        there = [name for name in nodes if name == "0" or going.finishes == DRAINED]
        codes = {name: nodes[name].end() for name in there}
    said = "\n---\n".join(node.said for node in nodes.values())
    assert codes == dict.fromkeys(there, going.code), said
    results = [json.loads((tmp_path / name).read_text()) for name in there]
    assert {result["verdict"] for result in results} == {
        {0: "done", 1: "program"}.get(going.code, "infrastructure")
    }


def test_a_spare_node_says_how_the_job_has_ended(tmp_path: Path) -> None:
    with Cluster(tmp_path, UNEVEN, nnodes="1:1") as cluster:
        cluster.arguments += ["0", "after", "-"]
        host = cluster.start("0")
        await_that((cluster.shared / "after.0").exists, host)
        spare = cluster.start("1")
        await_that(lambda: "is a spare" in spare.said, host, spare)
        host.process.send_signal(signal.SIGTERM)
        assert (host.end(), spare.end()) == (143, 75), spare.said


WHY = {
    75: [DistNetworkError, DistStoreError, StoreUnavailable, TimeoutError, RendezvousConnectionError],
    76: [BadNode],
    2: [ValueError, RendezvousError],
}


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize(("code", "kind"), [(code, kind) for code, kinds in WHY.items() for kind in kinds])
def test_why_a_round_does_not_begin(code: int, kind: type[Exception], rounds: int) -> None:
    error = kind("no one came")

    class Others(Nodes):
        def next_round(self) -> Round:
            left = next(joined, None)
            if left is None:
                raise error
            return left

    class Ranks(Loop):
        def __init__(self) -> None:
            pass

        def start(self, where: Round) -> None:
            pass

        def wait(self) -> End:
            return End(again=True)

    joined = iter([alone("host:1", 1)] * rounds)
    others = Others()
    with contextlib.closing(others), queued(SIGNALS) as signals:
        if rounds:
            end = run_rounds(others, Ranks(), signals)
            assert end.result() == JobResult(max(code, 75), f"the next round has not begun: {error}")
        else:
            with pytest.raises(CannotStart, match=str(error)) as raised:
                run_rounds(others, Ranks(), signals)
            assert exit_code_of(raised.value.__cause__) == code


@pytest.mark.parametrize("result", [None, JobResult(0), JobResult(1), JobResult(75, "a node is lost")])
def test_a_node_that_comes_after_the_end_says_whether_to_try_again(result: JobResult | None) -> None:
    class Over(Nodes):
        def next_round(self) -> Round:
            raise RendezvousClosedError("the job is over")

        def closed_with(self) -> JobResult | None:
            return result

    with contextlib.closing(Over()) as nodes, queued(SIGNALS) as signals:
        if result and result.exit_code == 75:
            assert run_rounds(nodes, Mock(), signals).result() == result
        else:
            with pytest.raises(CannotStart, match="the job is over") as raised:
                run_rounds(nodes, Mock(), signals)
            assert exit_code_of(raised.value.__cause__) == 2


def test_the_worst_result_says_what_to_do() -> None:
    draw = random.Random(13)
    for _ in range(200):
        codes = [draw.choice([0, 1, 75, None]) for _ in range(draw.randint(0, 5))]
        result = worst(None if code is None else JobResult(code) for code in codes)
        expected = next((code for code in (1, 75, 0) if code in codes), None)
        assert (None if result is None else result.exit_code) == expected
        if result is not None:
            assert JobResult.from_text(result.to_text()) == result
    assert JobResult.from_text("left") is JobResult.from_text("") is None
    closed = RendezvousRecord(1, 1, result=JobResult(1, "\0" * 100_000).to_text()).to_json()
    assert JobResult.from_text(RendezvousRecord.from_json(closed, "").result)
