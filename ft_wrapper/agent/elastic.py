"""The agent as a class, for programs that start workers themselves instead of calling ``ftrun``.

The types are torch's own: `WorkerSpec`, `Worker`, `WorkerGroup`, `WorkerState`, `RunResult`, `ElasticAgent`;
and `SimpleElasticAgent`, which an agent for workers of another kind extends. `LocalElasticAgent` takes the
place of torch's class of that name: it replaces dead workers of a wrapped job one by one. It adapts
`ft_wrapper.agent.agent`, on which ``ftrun`` runs.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE
from torch.distributed.elastic.agent.server.api import ElasticAgent as ElasticAgent
from torch.distributed.elastic.agent.server.api import RunResult as RunResult
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent as SimpleElasticAgent
from torch.distributed.elastic.agent.server.api import Worker as Worker
from torch.distributed.elastic.agent.server.api import WorkerGroup as WorkerGroup
from torch.distributed.elastic.agent.server.api import WorkerSpec as WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException

from . import health
from .agent import Launch, run_agent
from .group import Counts as Counts
from .group import Group
from .nodes import EXIT_BARRIER_TIMEOUT
from .nodes import CannotStart as CannotStart
from .policy import RANK_RESTARTS
from .policy import Policy as Policy
from .process import LOCAL_RANK, Job, Program, python_program
from .rounds import End
from .signals import SHUTDOWN_TIMEOUT, SIGNALS
from .torch_api import call_function, classic_nodes
from .torch_api.types import process_failures, program_of, worker_group

log = logging.getLogger(__name__)


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of one spec as processes on this machine, round after round.

    A worker of a wrapped job that dies is replaced alone, and joins the other workers, which go on in their
    processes; other jobs are restarted as a whole (see ``restart_policy``). Every change of the nodes is a
    new round, in which all workers are restarted, whatever ``spec.rdzv_handler`` is.

    The entry point is

    - a function of a module, called in each worker with ``args``; its return value is in the result. Both are
      sent as ``multiprocessing`` sends them with ``spawn``: in the main script, the code that starts the
      agent belongs under ``if __name__ == "__main__"``;
    - a Python script, by its name that ends in ``.py``, or this Python with ``-u SCRIPT …`` or
      ``-u -m MODULE …`` as ``args``, as torchrun has it;
    - any other program.

    In ``args``, ``${local_rank}`` stands for the worker's local rank.

    The agent polls nothing but the rendezvous handler: every ``spec.monitor_interval`` seconds, for waiting
    nodes. An agent runs once, in the main thread. Its state is that of its workers as a group:

    - INIT: not started yet;
    - HEALTHY: all run, or have finished;
    - UNHEALTHY: one has failed; the rest still run;
    - STOPPED: all are ended to be restarted, or were ended by a signal;
    - SUCCEEDED, FAILED: how it ended;
    - UNKNOWN: `run` has raised an error, and the agent can do no more.

    Args:
        spec: the workers; ``rdzv_handler`` finds the other nodes, and is shut down at the end.
        logs_specs: where their streams and errors go, `DefaultLogsSpecs` for instance.
        start_method: ``spawn``, the only one; in torch's signature.
        exit_barrier_timeout: seconds to wait for the other nodes once this node is done.
        log_line_prefix_template: prefix of each line that is shown from a log file, with ``${role_name}``,
            ``${rank}`` and ``${local_rank}`` substituted; role and rank when None.
        shutdown_timeout: seconds from the signal that ends a worker to SIGKILL.
        health_check_server: as torch's launcher passes it: answers health checks; stopped at the end.
        uninterruptible_state_timeout: in torch's signature, without effect: the wrapper's ``hard_timeout``
            ends a worker that hangs in the kernel.
        restart_policy: whether a worker that fails is replaced alone, or all are restarted; see `Policy`.
        max_rank_restarts: how often each worker may be replaced.
        standby: whether Python workers are forked from a process that has imported torch.
        signals: what is forwarded to the workers, and ends them.
        drain_timeout: seconds that SIGTERM gives workers to reach their next step and leave the job, if the
            other nodes go on without this one; 0: it ends them.

    Raises:
        TypeError: a function that cannot be sent to the workers.
        ValueError: the spec asks for something that this agent cannot do.
    """

    # Torch's class reports, by events and metrics; `run_agent` does all else.
    _start_workers = _stop_workers = _monitor_workers = _shutdown = None  # type: ignore[assignment]

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = EXIT_BARRIER_TIMEOUT,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        restart_policy: Policy = Policy.AUTO,
        max_rank_restarts: int = RANK_RESTARTS,
        standby: bool = True,
        signals: Sequence[signal.Signals] = SIGNALS,
        drain_timeout: float = 0.0,
    ) -> None:
        if start_method != "spawn":
            raise ValueError(f"start_method={start_method!r}: functions are called as by 'spawn'; pass that")
        _refuse(spec)
        # Not torch's own, which makes a worker group.
        self._spec = spec
        self._logs_specs = logs_specs
        self._exit_barrier_timeout = exit_barrier_timeout
        self._total_execution_time = 0
        self._returned: dict[int, Any] = {}  # by global rank
        if uninterruptible_state_timeout:
            words = "uninterruptible_state_timeout=%s has no effect: hard_timeout ends a rank that hangs"
            log.warning(words, uninterruptible_state_timeout)
        self._health_check_server = health_check_server
        self._answer = health.health if health_check_server is None else self._stop_server
        self._call = call_function.pack(spec.entrypoint, spec.args) if callable(spec.entrypoint) else b""
        job = Job(
            spec.local_world_size,
            spec.role,
            str(spec.rdzv_handler.get_run_id()),
            spec.max_restarts,
            virtual_local_rank=getattr(spec, "virtual_local_rank", False),  # not in older torch
            signals=tuple(signals),
        )
        self._group = Group(job.role, job.nproc, job.max_restarts)
        self._launch = Launch(
            job,
            Program(()) if self._call else program_of(str(spec.entrypoint), list(map(str, spec.args))),
            restart_policy,
            max_rank_restarts,
            shutdown_timeout,
            drain_timeout,
            standby,
            log_line_prefix_template,
        )

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Runs the workers to their end.

        Args:
            role: without effect, as an agent has one role, its spec's; in torch's signature.

        Returns:
            The state, SUCCEEDED or FAILED; what functions have returned, by global rank; and the failures, by
            global rank, the first one first. An agent whose job was ended by another node has FAILED without
            failures of its own.

        Raises:
            SignalException: a signal has ended the workers.
            CannotStart: the nodes did not meet, or no worker could be started.
            OSError: something that workers need is not available.
            RuntimeError: the agent has run before.
        """
        if self._group.state is not WorkerState.INIT:
            raise RuntimeError("an agent runs once; make another one, with a new rendezvous handler")
        began = time.monotonic()
        try:
            end = self._run_to_end()
        finally:
            self._total_execution_time = int(time.monotonic() - began)
        if end.signum is not None:
            number = signal.Signals(end.signum)
            raise SignalException(f"process {os.getpid()} got {number.name}", number)
        if end.ended_by:
            log.error("%s", end.ended_by)
        now = self.get_worker_group()
        failures = process_failures(end, now.workers[0].global_rank)
        result = RunResult(now.state, self._returned, failures)
        self._record_metrics(result)
        self._record_worker_events(result)
        return result

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """A snapshot of the workers. May be called from any thread.

        Args:
            role: without effect, as for `run`.
        """
        return worker_group(self._spec, self._group)

    @property
    def remaining_restarts(self) -> int:
        """How many more times all workers may be restarted because one has failed."""
        return self._group.remaining_restarts

    @property
    def counts(self) -> Counts:
        """What has happened since the beginning: failures, replacements, restarts. From any thread."""
        return self._group.counts

    # For torch's launcher, and torch's class -------------------------------------------------------------

    _remaining_restarts = remaining_restarts
    _worker_group = property(get_worker_group)

    def _get_alive_time(self) -> int:
        """When this agent was alive last, in seconds since the epoch."""
        return int(time.time())

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """As torch's, but a worker need not have returned anything."""
        is_victim = result.is_failed() and worker.global_rank not in result.failures
        return "TERMINATED" if is_victim else str(result.state.value)

    # -----------------------------------------------------------------------------------------------------

    def _stop_server(self, *_: object) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.callback(self._health_check_server.stop)
        return stack

    def _run_to_end(self) -> End:
        launch, nodes = self._launch, classic_nodes.ClassicNodes(self._spec, self._exit_barrier_timeout)
        with tempfile.TemporaryDirectory(prefix="ft_wrapper_call_") as folder:
            if self._call:
                call_function.write_call(folder, self._call)
                program = python_program(call_function.__name__, [folder, LOCAL_RANK], is_module=True)
                launch = dataclasses.replace(launch, program=program)
            end = run_agent(launch, self._logs_specs, nodes, self._group, self._answer)
            where = self._group.round
            if where is not None and self._call and self._group.state is WorkerState.SUCCEEDED:
                for rank in self._group.succeeded:
                    with contextlib.suppress(FileNotFoundError):
                        self._returned[where.rank(rank)] = call_function.read_result(folder, rank)
            return end


def _refuse(spec: WorkerSpec) -> None:
    """Raises an error if the spec asks for something that this agent cannot do."""
    for name in ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters"):
        if value := getattr(spec, name, None):
            way_out = "filter the log files" if "filters" in name else "bind the workers in their own code"
            raise ValueError(f"WorkerSpec({name}={value!r}) is not supported: {way_out}")
