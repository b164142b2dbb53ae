"""`ftrun status --watch`: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from rich.console import Console
from torch.distributed import TCPStore

from ft_wrapper.cli import status
from ft_wrapper.cli.live_status import draw, show
from ft_wrapper.cli.status import COMPLETED, KEPT_OUT, NOT_FORMED, RUNNING, NodeStatus, RankStatus, Status

JOB = Status(
    state=RUNNING,
    call=0,
    iteration=3,
    world_size=3,
    active_world_size=2,
    ranks=(
        RankStatus(0, 0, 0, "gpu7", 41, False),
        RankStatus(1, 2, None, "[bold]\x1b[31m", None, False),
        RankStatus(2, 0, 1, "gpu8", 43, True),
    ),
    last_faults="rank 1 (slot 1 on gpu7 pid 42) raised [red]KeyError[/red]",
)


def drawn(found: Status, height: int = 50) -> list[str]:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(draw(found, height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def many(ranks: int, on_each: int) -> Status:
    found = [RankStatus(slot, 0, slot, f"gpu{slot // on_each}", slot, False) for slot in range(ranks)]
    found[-1] = dataclasses.replace(found[-1], has_died=True)
    found[0] = dataclasses.replace(found[0], active_rank=None)
    return dataclasses.replace(JOB, ranks=tuple(found), world_size=ranks)


def test_a_row_for_each_rank() -> None:
    head, titles, *rows, fault = drawn(JOB)
    assert head == "running: iteration 3 of call 0, 2 of 3 ranks active"
    assert titles.split() == ["slot", "is", "incarnation", "host", "pid"]
    assert [row.split() for row in rows] == [
        ["0", "rank", "0", "0", "gpu7", "41"],
        ["1", "spare", "2", "[bold]\ufffd[31m", "-"],
        ["2", "died", "0", "gpu8", "43"],
    ]
    assert fault == "last fault: rank 1 (slot 1 on gpu7 pid 42) raised [red]KeyError[/red]"


def test_more_ranks_than_lines_are_told_by_host_the_dead_first() -> None:
    titles, *rows = drawn(many(64, 4), height=30)[1:-1]
    assert titles.split() == ["host", "ranks", "active", "spare", "died"]
    assert [row.split() for row in rows[:2]] == [["gpu15", "4", "3", "0", "1"], ["gpu0", "4", "3", "1", "0"]]
    assert len(rows) == 16


def test_more_hosts_than_lines_are_counted() -> None:
    lines = drawn(many(4096, 8), height=30)
    assert len(lines) < 30 and lines[2].startswith("gpu511 ")
    assert lines[-2].strip() == "and 490 more hosts"


def test_nodes_that_are_not_in_the_job_come_first() -> None:
    seats = [NodeStatus(f"n{n}", "seat", n, (2 * n, 2 * n + 1), 0, f"10.0.0.{n}") for n in range(100)]
    out = NodeStatus("y", "kept out", None, None, 0, "", "GPU 3 has [uncorrected] errors", 1_790_000_000.0)
    lost = NodeStatus("x", "lost", 7, None, None, "")
    nodes = (*seats, NodeStatus("w", "waiting", None, None, 0, ""), lost, out)
    lines = drawn(dataclasses.replace(JOB, nodes=nodes), height=30)
    begin = next(number for number, line in enumerate(lines) if line.startswith("node"))
    assert [line.split() for line in lines[begin + 1 : begin + 4]] == [
        ["x", "lost", "7", "-", "-"],
        ["y", "kept", "out", "-", "-", "-"],
        ["w", "waiting", "-", "-", "-"],
    ]
    *_, rest, why, fault = lines
    assert rest.strip() == "and 93 more nodes" and fault.startswith("last fault") and len(lines) < 30
    assert why.startswith("node y is kept out since 2026-")
    assert why.endswith(": GPU 3 has [uncorrected] errors")


def test_nodes_that_are_kept_out_say_why() -> None:
    bad = [NodeStatus(f"b{n}", KEPT_OUT, None, None, 0, "", f"no disk\x1b {n}", 0.0) for n in range(9)]
    seats = [NodeStatus(f"n{n}", "seat", n, (n, n), 0, "") for n in range(100)]
    lines = drawn(dataclasses.replace(JOB, nodes=(*seats, *bad)), height=30)
    begin = next(number for number, line in enumerate(lines) if line.startswith("node"))
    assert lines[begin + 1].split() == ["b0", "kept", "out", "-", "-", "-"]
    reasons = [line for line in lines if line.startswith("node b")]
    assert [line.rpartition(": ")[2] for line in reasons] == [f"no disk\ufffd {n}" for n in range(3)]
    assert len(lines) < 30


def test_a_job_that_has_not_formed() -> None:
    found = Status(NOT_FORMED, None, None, 0, None, (), None)
    assert drawn(found) == ["not formed: no wrapped function has been entered by all ranks yet"]


def test_it_is_drawn_in_the_same_place_and_only_when_there_is_something_new() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, height=40, force_terminal=True, color_system=None)
    told = []

    def statuses() -> Iterator[Status]:
        for iteration in (3, 4):
            yield dataclasses.replace(JOB, iteration=iteration)
            told.append(file.getvalue())

    show(statuses(), console)
    first, second = told
    assert "iteration 3 of call 0" in first and "iteration 4" not in first
    rest = second.removeprefix(first)
    assert rest.count("\x1b[1A") == 6 - 1, "the lines of the table before are gone over"
    assert "iteration 4 of call 0" in rest
    assert file.getvalue().rstrip("\n").endswith("\x1b[?25h"), "the cursor is there again"


# The command -----------------------------------------------------------------------------------------------


@pytest.fixture
def two_statuses(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    found = [JOB, dataclasses.replace(JOB, state=COMPLETED)]
    monkeypatch.setattr(status, "_follow", lambda *_: iter(found))
    return found


@pytest.mark.parametrize("why", ["no terminal", "no rich", "json"])
def test_without_a_terminal_or_rich_and_for_programs_it_prints_lines(
    why: str, two_statuses: list[Status], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: why != "no terminal")
    if why == "no rich":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert status.main(["127.0.0.1:29400", "--watch", *(["--json"] if why == "json" else [])]) == 0
    out = capsys.readouterr().out
    if why == "json":
        assert [json.loads(line)["state"] for line in out.splitlines()] == [RUNNING, COMPLETED]
    else:
        assert out == "".join(f"{found.to_text()}\n" for found in two_statuses)


NOISY = """
import os
from rich.console import Console
from ft_wrapper.cli.live_status import show
def statuses():
    os.write(2, b"noise")
    yield from ()
show(statuses(), Console())
os.write(2, b"error")
"""


def test_what_torchs_own_code_says_meanwhile_is_not_in_the_table() -> None:
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", NOISY], stdin=theirs, stdout=theirs, stderr=theirs, timeout=100, check=True
        )
        os.close(theirs)
        out = read_to_end(ours)
    finally:
        os.close(ours)
    assert b"error" in out and b"noise" not in out


def read_to_end(terminal: int) -> bytes:
    out = b""
    while True:
        try:
            out += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            return out


def test_ctrl_c_ends_it_at_once_and_leaves_the_terminal_in_order() -> None:
    """It waits for news of the job, for up to ten minutes."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ft_wrapper.run", "status", f"127.0.0.1:{server.port}"]
    try:
        process = subprocess.Popen(
            [*command, "--watch", "--interval", "600"], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
        )
        os.close(theirs)
        try:
            out = b""
            while b"not formed" not in out:
                out += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
            assert (process.returncode, b"Traceback" in error) == (130, False)
        finally:
            process.kill()
            process.communicate()
        out += read_to_end(ours)
        assert out.count(b"\x1b[?25l") == out.count(b"\x1b[?25h") == 1, (
            "the cursor is hidden, and shown again"
        )
    finally:
        os.close(ours)
