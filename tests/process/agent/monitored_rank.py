"""A process that talks to an agent's monitor as a rank does, and does what a test tells it."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from ft_wrapper.monitor.line import MonitorLine, ask_agent
from ft_wrapper.monitor.messages import HelloReply, receive
from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.protocol.records import Member
from ft_wrapper.settings import AllLimits
from ft_wrapper.store.plan import announced_plan
from ft_wrapper.store.secret import AGENT_ENV

TIMEOUT = 120.0
SETTINGS = AllLimits(
    soft_timeout=100.0,
    hard_timeout=100.0,
    termination_grace_time=0.3,
    monitor_process_interval=10.0,
    progress_watchdog_interval=1.0,
    heartbeat_interval=0.1,
    heartbeat_timeout=100.0,
    barrier_timeout=20.0,
)


def obey(orders: Connection, agent: str, store: str) -> None:
    """What runs in the process: carries out orders, and answers them, until it is killed."""
    os.environ[AGENT_ENV] = agent
    plan = announced_plan(store, 20.0)
    lost = threading.Event()
    calls: list[tuple[RankMemory, MonitorLine]] = []
    _questions, asker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # unanswered
    while True:
        order, *arguments = orders.recv()
        answer: Any = True
        if order == "begin":
            memory = RankMemory()
            memory.lock_life()
            line, _ = ask_agent(SETTINGS, plan, memory, asker, lost.set)
            answer = line is not None
            if line is not None:
                calls.append((memory, line))
            else:
                memory.close()
        elif order == "join":
            calls[-1][1].join(Member(*arguments))
        elif order == "enter":
            calls[-1][0].rank = arguments[1]
            calls[-1][1].enter(arguments[0], None)
        elif order == "between":
            memory, line = calls[-1]
            answer = line.between()
            memory.gil_stamp = time.monotonic() - 2 * SETTINGS.hard_timeout  # as a stamp that no one renews
            memory.close()
        elif order == "heart":
            answer = calls[-1][1].heart
        elif order == "replaced":
            answer = calls[-1][1].replaced
        elif order == "ask":
            with contextlib.closing(RankMemory()) as memory:
                limits = dataclasses.replace(SETTINGS, rejoin=arguments[0])
                answer = ask_agent(limits, plan, memory, asker, lost.set, watch=arguments[1])
        elif order == "threads":
            answer = threading.active_count() - 1
        elif order == "end the earlier":
            calls.pop(-2)[1].close(TIMEOUT)
        elif order == "serve":
            answer = calls[-1][1].serve("127.0.0.1")
        elif order == "end":
            memory, line = calls.pop()
            line.close(TIMEOUT)
            memory.close()
        elif order == "exit":
            return
        elif order == "await loss":
            answer = lost.wait(TIMEOUT)
        elif order == "say":
            calls[-1][1].line.sendall(*arguments)
        elif order == "say hello":
            answer = say_hello(agent, *arguments)
        orders.send(answer)


_kept: list[socket.socket] = []


def say_hello(agent: str, hello: bytes, with_memory: bool) -> str | None:
    """Connects and says something; returns why it was refused, or None for a line that waits for more."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(f"\0{agent}")
    with contextlib.closing(RankMemory()) as memory, contextlib.suppress(BrokenPipeError):
        socket.send_fds(line, [hello], [memory.fd, line.fileno()] if with_memory else [])
    if not hello.endswith(b"\n"):
        _kept.append(line)
        return None
    with line:
        line.settimeout(TIMEOUT)
        return HelloReply(**receive(line)).refused


class Rank:
    """The test's handle on it.

    Args:
        agent: the monitors' name.
        store: ``host:port``.
    """

    def __init__(self, agent: str, store: str) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("forkserver").Process(
            target=obey, args=(theirs, agent, store), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def tell(self, order: str, *arguments: object) -> Any:
        """Gives an order, and returns the answer."""
        self._orders.send((order, *arguments))
        assert self._orders.poll(TIMEOUT), f"no answer to {order}"
        return self._orders.recv()

    def kill(self) -> None:
        """Ends it, as a fault does."""
        self.process.kill()
        self.process.join(TIMEOUT)

    def exit(self) -> None:
        """Has it end of its own accord."""
        self._orders.send(("exit",))
        self.process.join(TIMEOUT)
        assert self.process.exitcode == 0

    def close(self) -> None:
        """Ends it; again is harmless."""
        if not self._orders.closed:
            self.kill()
            self.process.close()
            self._orders.close()
