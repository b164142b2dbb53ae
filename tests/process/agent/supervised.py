"""A supervisor with an agent that stands for ``ftrun``'s: it imports no torch, and does what it is asked.

    supervised.py --supervise DOES

DOES is ``exit CODE``, ``die SIGNUM``, or ``listen``: print each signal that the agent reads, up to SIGTERM.
DOES ``orphan`` leaves an orphan, which ends, and listens.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from ft_wrapper.agent.signals import NOTICES, SIGNALS, queued
from ft_wrapper.cli.supervise import supervise
from ft_wrapper.rendezvous.node_ids import NODE_ID_ENV


def listen() -> None:
    """Prints the signals that the agent reads."""
    with queued(SIGNALS) as signals:
        print(f"agent {os.getpid()} listens", flush=True)
        while True:
            select.select([signals.fd], [], [])
            for signum in signals.read():
                if signum in (*SIGNALS, *NOTICES):
                    print(f"got {signal.Signals(signum).name}", flush=True)
                if signum == signal.SIGTERM:
                    return


def leave_orphan() -> None:
    """Starts a process that ends after its parent has."""
    if os.fork() == 0:
        parent = os.getpid()
        pidfd = os.pidfd_open(parent)
        if os.fork() == 0:
            select.select([pidfd], [], [])
        os._exit(0)
    os.wait()


if NODE_ID_ENV not in os.environ:
    sys.exit(supervise())
what, *argument = sys.argv[2:]
if what == "exit":
    sys.exit(int(argument[0]))
if what == "die":
    os.kill(os.getpid(), int(argument[0]))
if what == "orphan":
    leave_orphan()
listen()
