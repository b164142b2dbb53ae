"""The check of a node: the tries and their limits, the command, the options."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_job import TIMEOUT
from support.ended import has_ended
from torch.distributed.elastic.rendezvous import RendezvousError

from ft_wrapper.agent.ft_nodes import OneNode
from ft_wrapper.agent.node_check import LONGEST_WAIT, NodeCheck, await_pass
from ft_wrapper.agent.options import Options, parse_args
from ft_wrapper.agent.process import Job, start
from ft_wrapper.agent.signals import Signalled, queued
from ft_wrapper.events import load

MEET = ("--nnodes", "2", "--rdzv-endpoint", "head:29400")


# The tries -------------------------------------------------------------------------------------------------


def tries(*answers: str, retries: int | None = None) -> tuple[bool, list[str], list[float]]:
    """Whether it passed at once, why it was kept out, and for how long it waited after each try."""
    left = iter(answers)

    class Answers(NodeCheck):
        def failure(self) -> str:
            return next(left)

    reasons: list[str] = []
    waits: list[float] = []
    passed = await_pass(Answers("", retries=retries), "node 7", reasons.append, waits.append)
    assert next(left, None) is None
    return passed, reasons, waits


def test_a_node_that_passes_is_not_kept_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ft_wrapper")
    assert tries("") == (True, [], [])
    assert caplog.messages == []


def test_it_waits_longer_each_time_and_says_so_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ft_wrapper")
    monkeypatch.setenv("FT_WRAPPER_EVENTS", str(tmp_path / "events.jsonl"))
    passed, reasons, waits = tries(*["no disk"] * 100, "")
    assert not passed
    assert reasons == ["no disk"] * 100
    assert waits[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_WAIT, LONGEST_WAIT]
    assert set(waits[8:]) == {LONGEST_WAIT}
    out, come = caplog.messages
    assert out == "node 7 is kept out of the job until it passes its check: no disk"
    assert come.startswith("node 7 has passed its check after ")
    (kept_out,) = load(str(tmp_path / "events.jsonl"))
    assert (kept_out["event"], kept_out["line"]) == ("kept_out", "node 7 was kept out: no disk")


def test_another_reason_is_said_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ft_wrapper")
    tries("no disk", "no disk", "no link", "no link", "no disk", "")
    out = "node 7 is kept out of the job until it passes its check: "
    assert caplog.messages == [f"{out}no disk", f"{out}no link", f"{out}no disk"]


def test_tries_are_limited() -> None:
    with pytest.raises(RendezvousError, match=r"^node 7 has failed its check 3 times, the last time: c$"):
        tries("a", "b", "c", retries=2)
    with pytest.raises(RendezvousError, match=r"^node 7 has failed its check: a$"):
        tries("a", retries=0)


def test_a_node_that_is_alone_does_not_begin() -> None:
    node = OneNode(Job(1, "default", "", 0), check=NodeCheck("echo no disk; exit 1", retries=0))
    with pytest.raises(RendezvousError, match="this node has failed its check: --node-check: no disk"):
        node.next_round()
    node.close()


# The command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("true", ""),
        ("exit 3", "--node-check: exit status 3"),
        (
            "echo first; echo 'the fan stands still'; echo; exit 1",
            "--node-check: the fan stands still (exit status 1)",
        ),
        ("echo out; echo err >&2; exit 1", "--node-check: err (exit status 1)"),
        (r"printf 'red \033[31mline\n'; exit 1", "--node-check: red [31mline (exit status 1)"),
        ("kill -9 $$", "--node-check: killed by SIGKILL"),
        ("no-such-program-7", "--node-check: /bin/sh: "),
        ("yes | head -n 100000; echo last; exit 1", "--node-check: last (exit status 1)"),
        ("read line || echo no input; exit 1", "--node-check: no input (exit status 1)"),
    ],
)
def test_what_a_command_says(command: str, why: str) -> None:
    said = NodeCheck(command, TIMEOUT).failure()
    assert said == why or (why.endswith("/bin/sh: ") and "no-such-program-7" in said)


def test_a_disk_without_room_does_not_hide_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    assert NodeCheck("echo full; exit 1").failure() == "--node-check: full (exit status 1)"


def test_a_command_that_has_become_another_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sh -c "sudo look"`` becomes sudo, which no other user may kill."""

    def refuse(group: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", refuse)
    assert NodeCheck("true").failure() == ""


def test_a_long_line_is_cut() -> None:
    said = NodeCheck("yes x | tr -d '\\n' | head -c 3000; exit 1", TIMEOUT).failure()
    assert len(said) < 400 and "xxx… (exit status 1)" in said


def children(folder: Path) -> list[psutil.Process]:
    """The processes whose numbers are in the folder's files; one may be empty, of a shell that was killed."""
    found = []
    for number in filter(None, (path.read_text() for path in folder.glob("pid.*"))):
        try:
            found.append(psutil.Process(int(number)))
        except psutil.NoSuchProcess:
            continue
    return [process for process in found if not has_ended(process)]


# It has a child, and is deaf to what asks it to end.
HANGS = (
    "trap '' TERM INT; sleep 1000 & echo $! > {0}/pid.child; echo $$ > {0}/pid.shell; "
    "echo busy; touch {0}/on; wait"
)


def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    said = NodeCheck(HANGS.format(tmp_path), 1.0).failure()
    assert said == "--node-check: busy (it has not ended within 1 s)"
    assert len(list(tmp_path.glob("pid.*"))) == 2
    _, left = psutil.wait_procs(children(tmp_path), TIMEOUT)
    assert [process for process in left if not has_ended(process)] == []


def test_what_a_command_leaves_is_killed_though_it_prints_for_ever(tmp_path: Path) -> None:
    said = NodeCheck(f"yes & echo $! > {tmp_path}/pid.child; exit 5", TIMEOUT).failure()
    assert "exit status 5" in said
    _, left = psutil.wait_procs(children(tmp_path), TIMEOUT)
    assert [process for process in left if not has_ended(process)] == []


@pytest.fixture
def killer(tmp_path: Path) -> Iterator[None]:
    """Sends this process a signal once the command is on."""
    stop = threading.Event()

    def send() -> None:
        while not stop.wait(0.02):
            if (tmp_path / "on").exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=send)
    thread.start()
    yield
    stop.set()
    thread.join()
    for running in threading.enumerate():
        if running.name.endswith("the node's check"):
            running.join(TIMEOUT)  # it waits for the command's process


@pytest.mark.usefixtures("killer")
def test_a_signal_ends_the_command(tmp_path: Path) -> None:
    with queued((signal.SIGINT, signal.SIGCHLD)) as signals, pytest.raises(Signalled), signals.raised():
        NodeCheck(HANGS.format(tmp_path), TIMEOUT).failure()
    _, left = psutil.wait_procs(children(tmp_path), TIMEOUT)
    assert [process for process in left if not has_ended(process)] == []


@pytest.mark.usefixtures("killer")
def test_a_signal_ends_a_command_that_is_just_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_raised = threading.Event()

    def start_slowly(*arguments: Any) -> Any:
        process = start(*arguments)
        assert has_raised.wait(TIMEOUT)
        return process

    monkeypatch.setattr("ft_wrapper.agent.node_check.start", start_slowly)
    with queued((signal.SIGINT, signal.SIGCHLD)) as signals, pytest.raises(Signalled), signals.raised():
        NodeCheck(HANGS.format(tmp_path), 10 * TIMEOUT).failure()
    has_raised.set()
    _, left = psutil.wait_procs(children(tmp_path), TIMEOUT)
    assert [process for process in left if not has_ended(process)] == []


# The options -----------------------------------------------------------------------------------------------


def parsed(*arguments: str) -> Options:
    return parse_args([*arguments, "--no-python", "true"])


def test_nothing_is_checked_by_default() -> None:
    for arguments in ((), MEET, (*MEET, "--rdzv-backend", "c10d")):
        assert parsed(*arguments).node_check is None


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("--node-check", "true").node_check == NodeCheck("true", 120.0, 0)
    assert parsed(*MEET, "--node-check", "true").node_check == NodeCheck("true", 120.0, None)
    asked = ("--node-check", "a b", "--node-check-timeout", "7", "--node-check-retries", "3")
    for where in ((), MEET):
        assert parsed(*where, *asked).node_check == NodeCheck("a b", 7.0, 3)
    monkeypatch.setenv("PET_NODE_CHECK", "c")
    assert parsed(*MEET).node_check == NodeCheck("c")
    monkeypatch.setenv("PET_NODE_CHECK", "")
    assert parsed(*MEET).node_check is None
