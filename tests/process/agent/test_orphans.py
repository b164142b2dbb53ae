"""What a subreaper adopts is waited for, and what somebody else waits for is left alone."""

from __future__ import annotations

import os
import select
import subprocess
import textwrap
from unittest.mock import Mock

import pytest
from support.warm_ftrun import run_python

from ft_wrapper.agent.agent import Loop
from ft_wrapper.agent.process import adopted

TIMEOUT = 120.0


def await_end(pid: int) -> None:
    """Waits until a process has ended, without waiting for it as its parent does."""
    pidfd = os.pidfd_open(pid)
    try:
        assert select.select([pidfd], [], [], TIMEOUT)[0]
    finally:
        os.close(pidfd)


def start_orphan() -> int:
    """Starts a process that ends when its parent is gone, and not before: that would wait for it."""
    script = "exec 3<&0; cat <&3 >/dev/null & echo $!"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        parent.wait(TIMEOUT)
    return orphan


def test_orphans_are_reaped_and_other_children_are_not() -> None:
    others = subprocess.Popen(["true"])
    with adopted() as reap:
        await_end(others.pid)
        reap(())
        assert others.wait() == 0  # its exit code was still there to be had
        orphan = start_orphan()
        await_end(orphan)
        own = subprocess.Popen(["false"])
        await_end(own.pid)
        reap([own.pid])
        assert own.wait() == 1
        reap([own.pid])
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan, os.WNOHANG)
        reap([])  # without children


def test_a_child_that_is_not_waited_for_hides_no_orphan() -> None:
    """Such as one that a shell left to what it became: ``reporter & exec ftrun``."""
    others = subprocess.Popen(["true"])
    await_end(others.pid)
    with adopted() as reap:
        orphan = start_orphan()
        await_end(orphan)
        reap(())
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan, os.WNOHANG)
        assert others.wait() == 0


def test_orphans_are_reaped_once_it_is_known_which_children_are_none() -> None:
    loop = Mock(_running={})
    loop._standby.pids.side_effect = [None, [4711]]
    assert not Loop._reap_orphans(loop)
    loop._reap.assert_not_called()
    assert Loop._reap_orphans(loop)
    loop._reap.assert_called_once_with([4711])


# As the template does, for a rank; but both the process between and the agent have ended when it looks.
LATE = """
    import os, select
    from ft_wrapper.agent.process import await_adoption
    from ft_wrapper.agent.signals import die_with

    agent = os.getpid()
    if os.fork() == 0:
        between = os.getpid()
        both = [os.pidfd_open(agent), os.pidfd_open(between)]
        if os.fork() == 0:
            for pidfd in both:
                select.select([pidfd], [], [])
            await_adoption(between)
            die_with(agent)
    os._exit(0)
"""


def test_a_rank_that_was_forked_as_the_agent_ended_does_not_stay() -> None:
    """Else it would keep stdout open, and its reader waiting."""
    assert run_python(["-c", textwrap.dedent(LATE)], timeout=TIMEOUT).returncode == 0
