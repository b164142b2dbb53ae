"""Agents of the tests that run in this process, and the functions that their workers call."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed.elastic.metrics as metrics
import torch.distributed.elastic.timer as timer
from torch.distributed import HashStore
from torch.distributed.elastic.metrics.api import MetricData, MetricHandler, NullMetricHandler
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ft_wrapper.agent.elastic import LocalElasticAgent, WorkerSpec

ROLE = "trainer"


def who(*arguments: Any) -> tuple[Any, ...]:
    return (*arguments, os.getpid(), os.environ["RANK"])


def fails(rank: str) -> str:
    if os.environ["RANK"] == rank:
        raise ValueError(f"rank {rank} does not want to")
    return "done"


def overruns() -> str:
    """The first process of each rank takes too long over something."""
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.2 if os.environ["FT_WRAPPER_INCARNATION"] == "0" else 1000):
        if os.environ["FT_WRAPPER_INCARNATION"] == "0":
            time.sleep(1000)
    return "in time"


class Alone(RendezvousHandler):
    """A rendezvous of one node, at which others may wait."""

    def __init__(self) -> None:
        self.rounds = 0
        self.waiting = 0
        self.was_shut_down = False

    def get_backend(self) -> str:
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        self.rounds += 1
        self.waiting = 0
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 1))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        self.was_shut_down = True
        return True


def c10d() -> RendezvousHandler:
    """Torch's own rendezvous, at a free port of this machine."""
    return get_rendezvous_handler(
        RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, local_addr="127.0.0.1", is_host=True)
    )


def agent(
    folder: Path,
    entrypoint: str | Callable[..., Any],
    *args: Any,
    nproc: int = 2,
    max_restarts: int = 0,
    handler: RendezvousHandler | None = None,
    **options: Any,
) -> LocalElasticAgent:
    """An agent of which everything is in a folder."""
    spec = WorkerSpec(
        ROLE,
        nproc,
        Alone() if handler is None else handler,
        entrypoint=entrypoint,
        args=args,
        max_restarts=max_restarts,
        monitor_interval=0.01,
        master_addr="127.0.0.1",
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(str(folder / "logs")), **options)


class Metrics(MetricHandler):
    """What was told to torch's metrics."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.remaining: list[int] = []
        self.end: dict[str, int] = {}
        self.on_state: Callable[[str], None] = lambda state: None

    def emit(self, metric_data: MetricData) -> None:
        _, role, name = metric_data.name.split(".")
        assert role == ROLE
        if name == "remaining_restarts":
            self.remaining.append(metric_data.value)
        elif name == "flakiness" or name.startswith("run_"):
            self.end[name] = metric_data.value
        else:
            self.states.append(name)
            self.on_state(name)


@contextlib.contextmanager
def collected() -> Iterator[Metrics]:
    """Collects what is told to torch's metrics."""
    handler = Metrics()
    metrics.configure(handler)
    try:
        yield handler
    finally:
        metrics.configure(NullMetricHandler())
