"""The command ``ftrun``: from its arguments to its exit code."""

import atexit
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

from ..log_lines import JSON, choose_format, level_of_ftrun, make_formatter, note_node

level_of_ftrun()  # before torch's elastic package fails

from torch.distributed.elastic.multiprocessing import LogsSpecs

from .. import events
from .._files import replace_broken_streams
from .._text import without_secrets
from ..agent import outputs
from ..agent.elastic import CannotStart, Launch, LocalElasticAgent
from ..agent.nodes import End, exit_code_of
from ..agent.options import Options
from ..agent.options import parse_args as parse_args
from ..agent.signals import handle_notices
from ..agent.verdict import JobResult
from ..report import command as report
from ..store import secret
from . import control, log_folder, result_file, status
from .check import print_findings
from .meeting import make_spec, meet

#: What ``ftrun`` does beside starting a script. One of such a name is started as ``./status``.
COMMANDS = {
    "status": status.main,
    "report": report.main,
    "drain": control.main_drain,
    "restart": control.main_restart,
    "stop": control.main_stop,
}

# The name of the public module.
log = logging.getLogger("ft_wrapper.run")


def run(options: Options) -> int:
    """Runs a job to its end; to be called in the main thread.

    Args:
        options: the job.

    Returns:
        The exit code, which says what to do: see `verdict`, and docs/launching.md.
    """
    with ExitStack() as cleanup:
        cleanup.callback(secret.use, None)
        secret.use(options.secret)
        try:
            events.check()
            logs_specs = options.logs_specs(
                log_dir=cleanup.enter_context(log_folder.open_folder(options)),
                redirects=options.redirects,
                tee=options.tee,
                local_ranks_filter=options.local_ranks_filter,
            )
            end = _agent(options, logs_specs).run_to_end()
            replace_broken_streams()
        except (OSError, CannotStart) as error:
            words = " ".join(str(error).split())
            if isinstance(error.__cause__ or error, socket.gaierror):
                # It says neither which name nor what to do.
                words += (
                    f"; see whether the endpoint and this host's own name, {socket.gethostname()}, can be "
                    "looked up here (/etc/hosts)"
                )
            words = without_secrets(f"cannot start {options.script}: {words}")
            if options.log_format == JSON:
                log.error("%s", words)
            else:
                print(f"ftrun: error: {words}", file=sys.stderr)
            outputs.write_own_error_file(error)
            return _conclude(options, JobResult(exit_code_of(error.__cause__), words))
    return _conclude(options, _report(options, end))


def _conclude(options: Options, result: JobResult) -> int:
    """Writes the result file, if one was asked for; returns the exit code."""
    if result.verdict == "drained":
        result = dataclasses.replace(result, exit_code=options.drained_exit_code)
    if options.result_file:
        result_file.write(options.result_file, result.to_text())
    return result.exit_code


def _agent(options: Options, logs_specs: LogsSpecs) -> LocalElasticAgent:
    spec = make_spec(options, max_restarts=options.max_restarts)
    spec.virtual_local_rank = options.virtual_local_rank  # no argument in older torch
    run_id = (options.rendezvous or options).run_id or str(uuid.uuid4())
    active, devices = options.active_world_size, options.devices
    launch = Launch(lambda: meet(options), options.program, run_id, active, devices)
    return LocalElasticAgent(
        spec,
        logs_specs,
        log_line_prefix_template=options.log_line_prefix,
        shutdown_timeout=options.shutdown_timeout,
        restart_policy=options.policy,
        max_rank_restarts=options.max_rank_restarts,
        standby=options.standby,
        signals=options.signals,
        launch=launch,
        drain_timeout=options.drain_timeout,
    )


# Before and after ------------------------------------------------------------------------------------------


def _report(options: Options, end: End) -> JobResult:
    """Says how it ended."""
    for failure in end.forgiven:
        log.info(
            "rank %d (pid %d): %s; the job finished all the same", failure.rank, failure.pid, failure.how()
        )
    if end.failures:
        log.error("%s", outputs.report(end.failures, options.nproc_per_node, end.node))
        outputs.write_own_error_file(end.failures[0])
    result = end.result()
    if result.exit_code:
        whose = f"{result.culprit}: " if result.culprit else ""
        log.error("exit code %d (%s): %s%s", result.exit_code, result.verdict, whose, result.why)
    return result


def _set_up_logging(options: Options) -> None:
    choose_format(options.log_format)
    console = logging.StreamHandler()
    console.setFormatter(make_formatter("ftrun"))
    logging.basicConfig(handlers=[console])
    logging.getLogger("ft_wrapper").setLevel(level_of_ftrun())
    if options.rendezvous is None:
        note_node(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Does what ``ftrun`` does, in this process.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Returns:
        The exit code, see `run`; that of a command; with ``--check`` 1 if something was found, else 0.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in COMMANDS:
        return outputs.until_unread(lambda: COMMANDS[words[0]](words[1:]))
    options = parse_args(words)
    _set_up_logging(options)
    for warning in options.warnings:
        log.warning("%s", warning)
    return print_findings(options) if options.check else run(options)


def command() -> NoReturn:
    """What the command ``ftrun`` is: `main`, and the end of the process with its exit code.

    Before Python 3.14 a thread that returns from torch's code while Python ends aborts the process. Where one
    is still there, waiting for a store say, the process ends without Python's own last steps.
    """
    handle_notices(lambda *_: None)  # also before the agent takes them over, and after
    code = main()
    handle_notices(signal.SIG_IGN)  # as Python takes its own handlers out at its end
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)
    sys.exit(code)
