"""A job that ``ftrun`` starts, from its arguments to its exit code."""

import dataclasses
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std

from .. import events
from .._files import replace_broken_streams
from .._text import without_secrets
from ..agent import outputs
from ..agent.agent import Agent
from ..agent.nodes import CannotStart, Nodes, exit_code_of
from ..agent.options import Options
from ..agent.options import parse_args as parse_args
from ..agent.rounds import End, JobResult
from ..log_lines import JSON, choose_format, make_formatter, note_node
from ..store import secret
from .check import print_findings
from .local import served
from .meeting import local_job, meet

# The name of the public module.
log = logging.getLogger("ft_wrapper.run")


def run(options: Options) -> int:
    """Runs a job to its end; to be called in the main thread.

    Args:
        options: the job.

    Returns:
        The exit code, which says what to do: see `JobResult`, and docs/launching.md.
    """
    with ExitStack() as cleanup:
        cleanup.callback(secret.use, None)
        secret.use(options.secret)
        try:
            log_dir = cleanup.enter_context(_log_folder(options))
            cleanup.enter_context(options.environment())
            events.check_events_file()
            end = Agent(options.launch(log_dir)).run(lambda: _meet(options, cleanup))
            replace_broken_streams()
        except (OSError, CannotStart) as error:
            words = " ".join(str(error).split())
            if isinstance(error.__cause__ or error, socket.gaierror):
                # It says neither which name nor what to do.
                words += f"; see whether the endpoint and this host's own name, {socket.gethostname()}, can "
                words += "be looked up here (/etc/hosts)"
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
        _write_whole(options.result_file, result.to_text())
    return result.exit_code


def _write_whole(path: str, text: str) -> None:
    """Writes the result file: it is there as a whole, or not at all."""
    part = f"{path}.{os.urandom(8).hex()}"  # a name that no other user knows, who could put a link there
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(part, path)
    except OSError as error:
        log.error("--result-file %s cannot be written: %s", path, error)
        with suppress(OSError):
            os.unlink(part)


def _meet(options: Options, cleanup: ExitStack) -> Nodes:
    nodes = meet(options)
    cleanup.enter_context(served(lambda: local_job(options, nodes)))
    return nodes


# Before and after ------------------------------------------------------------------------------------------


@contextmanager
def _log_folder(options: Options) -> Iterator[str]:
    """Makes the folder where it is not there; only its owner gets in then, whatever the umask.

    Args:
        options: the job. Without ``log_dir`` it is a temporary folder, removed if nothing was written there.

    Returns:
        A context: its path.

    Raises:
        OSError: it cannot be made.
    """
    if options.log_dir is not None:
        if options.log_dir != os.devnull:
            _make_private(Path(options.log_dir))
        yield options.log_dir
        return
    path = tempfile.mkdtemp(prefix="ftrun_")
    try:
        if options.redirects != Std.NONE or options.tee != Std.NONE:
            log.info("log files are in %s", path)
        yield path
    finally:
        if not any(files for _, _, files in os.walk(path)):
            shutil.rmtree(path, ignore_errors=True)


def _make_private(folder: Path) -> None:
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(0o700, exist_ok=True)  # another node may be quicker
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        words = "--log-dir %s: any user may replace the job's logs there; chmod o-w it, or name another"
        log.warning(words, folder)


def _report(options: Options, end: End) -> JobResult:
    """Says how it ended."""
    for failure in end.forgiven:
        words = "rank %d (pid %d): %s; the job finished all the same"
        log.info(words, failure.rank, failure.pid, failure.how)
    if end.failures:
        log.error("%s", outputs.report(end.failures, options.nproc_per_node, end.node))
        outputs.write_own_error_file(end.failures[0])
    result = end.result()
    if result.exit_code:
        whose = f"{result.culprit}: " if result.culprit else ""
        log.error("exit code %d (%s): %s%s", result.exit_code, result.verdict, whose, result.why)
    return result


def _set_up_logging(options: Options, level: str) -> None:
    choose_format(options.log_format)
    console = logging.StreamHandler()
    console.setFormatter(make_formatter("ftrun"))
    logging.basicConfig(handlers=[console])
    logging.getLogger("ft_wrapper").setLevel(level)
    if options.rendezvous is None:
        note_node(0)


def start_job(argv: Sequence[str], level: str) -> int:
    """Starts the job that a command line asks for, or with ``--check`` looks what may go wrong with it.

    Args:
        argv: the arguments.
        level: of the lines of ``ftrun``.

    Returns:
        The exit code.
    """
    options = parse_args(argv)
    _set_up_logging(options, level)
    for warning in options.warnings:
        log.warning("%s", warning)
    return print_findings(options) if options.check else run(options)
