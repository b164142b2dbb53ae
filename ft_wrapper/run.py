"""``ftrun``: runs a job on one node.

It starts the ranks and hosts the store that they agree on, outside of them, so that any rank may die. A dead
rank of a wrapped job is replaced alone, and joins the others, which go on in their processes. A script that
uses no wrapper is ended, or started anew, as a whole. Options have torchrun's names and meanings.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.run import determine_local_world_size

from .agent.environment import Job
from .agent.failure import report
from .agent.orphans import adopted
from .agent.policy import Policy, RestartPolicy
from .agent.ranks import Ranks
from .agent.signals import queued
from .agent.standby import Program
from .exception import StoreError

# Not __name__, which is "__main__" under `python -m ft_wrapper.run`.
log = logging.getLogger("ft_wrapper.run")

DEFAULT_SHUTDOWN_TIMEOUT = 5.0
DEFAULT_RANK_RESTARTS = 10


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for, checked.

    Args:
        nproc_per_node: number of ranks.
        program: what each rank runs.
        role: name of the ranks in log lines and in ``ROLE_NAME``.
        log_dir: where log files go; a temporary directory when None.
        redirects: which streams go to files instead of the console.
        tee: which streams go to files and to the console.
        local_ranks_filter: the ranks that may write to the console; all when None.
        signals: what is forwarded to the ranks and then ends the job.
        shutdown_timeout: seconds between a forwarded signal and SIGKILL.
        policy: what is done about a rank that fails.
        max_restarts: how often all ranks may be started anew.
        max_rank_restarts: how often each rank may be started again alone.
        standby: whether ranks are forked from a process that has torch imported.
    """

    nproc_per_node: int
    program: Program
    role: str
    log_dir: str | None
    redirects: Std | dict[int, Std]
    tee: Std | dict[int, Std]
    local_ranks_filter: set[int] | None
    signals: tuple[signal.Signals, ...]
    shutdown_timeout: float
    policy: Policy
    max_restarts: int
    max_rank_restarts: int
    standby: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with one line, and without the usage text that would bury it."""
        self.exit(2, f"ftrun: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="ftrun",
        description="Starts the ranks of a job on this machine and hosts the store that they agree on. "
        "A rank of a wrapped job that dies is started again alone.",
        epilog="Options mean the same as torchrun's and can be set by the same PET_* environment variables.",
        allow_abbrev=False,
    )
    parser.add_argument(
        *_spellings("--nproc-per-node"),
        action=env,
        default="1",
        metavar="N",
        help="number of ranks: a number, cpu, gpu or auto (default: 1)",
    )
    parser.add_argument(
        "--role", action=env, default="default", help="name of the ranks in log lines (default: default)"
    )
    parser.add_argument(
        "-m", "--module", action=check_env, help="script is a module's name, as for python -m"
    )
    parser.add_argument(
        *_spellings("--no-python"), action=check_env, help="script is a program: execute it without python"
    )
    parser.add_argument(
        *_spellings("--log-dir"),
        action=env,
        default=None,
        help="directory for log files; each run makes one of its own in it (default: a temporary one)",
    )
    parser.add_argument(
        "-r",
        "--redirects",
        action=env,
        default="0",
        help="streams that go to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both, "
        "for all ranks, or by local rank: 0:3,1:2 (default: 0)",
    )
    parser.add_argument(
        "-t",
        "--tee",
        action=env,
        default="0",
        help="streams that go to log files and to the console; as --redirects",
    )
    parser.add_argument(
        *_spellings("--local-ranks-filter"),
        action=env,
        default="",
        metavar="RANKS",
        help="only these local ranks write to the console: 0,1,2 (default: all)",
    )
    parser.add_argument(
        *_spellings("--signals-to-handle"),
        action=env,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="SIGNALS",
        help="signals that are forwarded to the ranks and end the job (default: %(default)s)",
    )
    parser.add_argument(
        *_spellings("--shutdown-timeout"),
        action=env,
        default=os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(DEFAULT_SHUTDOWN_TIMEOUT)),
        metavar="SECONDS",
        help="from a forwarded signal to SIGKILL (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 5)",
    )
    parser.add_argument(
        *_spellings("--restart-policy"),
        action=env,
        default=Policy.AUTO.value,
        metavar="POLICY",
        help="when a rank fails: rank: it is started again alone; group: all are ended and started anew; "
        "auto: group, and rank once a wrapped job has formed (default: auto)",
    )
    parser.add_argument(
        *_spellings("--max-restarts"),
        action=env,
        default=None,
        metavar="N",
        help="how often all ranks may be started anew (default: 0)",
    )
    parser.add_argument(
        *_spellings("--max-rank-restarts"),
        action=env,
        default=None,
        metavar="N",
        help=f"how often each rank may be started again alone (default: {DEFAULT_RANK_RESTARTS})",
    )
    parser.add_argument(
        *_spellings("--no-standby"),
        action=check_env,
        help="start each rank by itself, instead of forking it from a process that has imported torch "
        "(always so with --no-python and PYTHON_EXEC)",
    )
    parser.add_argument("script", help="what each rank runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _spellings(option: str) -> tuple[str, str]:
    return option, "--" + option[2:].replace("-", "_")


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Reads and checks the command line.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Raises:
        SystemExit: an argument is wrong (2; one line on stderr names it and the way out), or help was
            asked for (0).
    """
    parser = _parser()
    args = parser.parse_args(argv)
    nproc = _nproc(parser, args.nproc_per_node)
    log_dir: str | None = args.log_dir or None
    if log_dir and log_dir != os.devnull and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        parser.error(f"--log-dir {log_dir}: is a file; name a directory")
    policy = _policy(parser, args)
    return Options(
        nproc_per_node=nproc,
        program=_program(parser, args),
        role=args.role,
        log_dir=log_dir,
        redirects=_streams(parser, "--redirects", args.redirects, nproc),
        tee=_streams(parser, "--tee", args.tee, nproc),
        local_ranks_filter=_ranks(parser, "--local-ranks-filter", args.local_ranks_filter, nproc),
        signals=_signals(parser, args.signals_to_handle),
        shutdown_timeout=_seconds(parser, "--shutdown-timeout", args.shutdown_timeout),
        policy=policy,
        max_restarts=_count(parser, "--max-restarts", args.max_restarts, 0),
        max_rank_restarts=_count(
            parser, "--max-rank-restarts", args.max_rank_restarts, DEFAULT_RANK_RESTARTS
        ),
        standby=not args.no_standby,
    )


def _nproc(parser: _Parser, value: str) -> int:
    try:
        nproc: int = determine_local_world_size(value)
    except ValueError as error:
        parser.error(f"--nproc-per-node {value}: use a number of at least 1, cpu, gpu or auto ({error})")
    if nproc < 1:
        parser.error(f"--nproc-per-node {value}: at least one rank is needed")
    return nproc


def _program(parser: _Parser, args: argparse.Namespace) -> Program:
    script: str = args.script
    arguments = tuple(args.script_args)
    if args.no_python and args.module:
        parser.error(
            "--no-python and --module contradict each other: a module needs python; drop one of them"
        )
    if args.no_python:
        program = shutil.which(script)
        if program is None:
            parser.error(
                f"script {script}: no such program, or not executable (--no-python runs it without python)"
            )
        return Program((program, *arguments))
    python = os.environ.get("PYTHON_EXEC")
    if args.module:
        # Another Python has other modules, and says itself what it misses.
        if python is None and not _module_exists(script):
            parser.error(
                f"module {script}: not found, or a package without __main__; install it or set PYTHONPATH"
            )
    elif not os.path.exists(script):
        parser.error(f"script {script}: no such file in {os.getcwd()}; for a module's name give -m")
    flags = ("-u", "-m") if args.module else ("-u",)
    command = (python or sys.executable, *flags, script, *arguments)
    # Another Python may have another torch, or none; and compiled files are left to Python itself.
    if python is not None or script.endswith(".pyc"):
        return Program(command)
    return Program(command, script, arguments, args.module)


def _policy(parser: _Parser, args: argparse.Namespace) -> Policy:
    try:
        policy = Policy(args.restart_policy)
    except ValueError:
        parser.error(f"--restart-policy {args.restart_policy}: use auto, rank or group")
    for other, option, value in (
        (Policy.RANK, "--max-restarts", args.max_restarts),
        (Policy.GROUP, "--max-rank-restarts", args.max_rank_restarts),
    ):
        if policy is other and value is not None:
            parser.error(
                f"{option} {value} and --restart-policy {policy.value} contradict each other: "
                f"{option} limits what this policy never does; drop one of them"
            )
    return policy


def _count(parser: _Parser, option: str, value: str | None, default: int) -> int:
    if value is None:
        return default
    if not re.fullmatch(r"\d+", value):
        parser.error(f"{option} {value}: use a number of at least 0")
    return int(value)


def _module_exists(name: str) -> bool:
    """Whether ``python -m name`` would find it, without importing anything: its packages may do a lot."""
    path = sys.path
    sys.path = [os.getcwd(), *path]
    try:
        parts = name.split(".")
        spec = importlib.util.find_spec(parts[0])
        for end in range(2, len(parts) + 1):
            if spec is None or spec.submodule_search_locations is None:
                return False
            full_name = ".".join(parts[:end])
            spec = importlib.machinery.PathFinder.find_spec(full_name, list(spec.submodule_search_locations))
        if spec is None or spec.submodule_search_locations is None:
            return spec is not None
        main = f"{name}.__main__"
        return (
            importlib.machinery.PathFinder.find_spec(main, list(spec.submodule_search_locations)) is not None
        )
    except (KeyError, ImportError):
        # The path of a namespace package inside another one is not known before the outer one's import.
        return True
    except ValueError:
        return False
    finally:
        sys.path = path


def _streams(parser: _Parser, option: str, value: str, nproc: int) -> Std | dict[int, Std]:
    try:
        streams: Std | dict[int, Std] = Std.from_str(value)
    except ValueError:
        parser.error(
            f"{option} {value}: use 0, 1, 2 or 3, or local ranks with one of them each, as in 0:3,1:2"
        )
    if isinstance(streams, dict):
        _check_ranks(parser, option, value, streams, nproc)
    return streams


def _ranks(parser: _Parser, option: str, value: str, nproc: int) -> set[int] | None:
    if not value:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", value):
        parser.error(f"{option} {value}: use local ranks with commas between them, as in 0,1,2")
    ranks = {int(rank) for rank in value.split(",")}
    _check_ranks(parser, option, value, ranks, nproc)
    return ranks


def _check_ranks(parser: _Parser, option: str, value: str, ranks: Iterable[int], nproc: int) -> None:
    for rank in ranks:
        if rank >= nproc:
            parser.error(f"{option} {value}: there is no local rank {rank} with --nproc-per-node {nproc}")


def _signals(parser: _Parser, value: str) -> tuple[signal.Signals, ...]:
    signals = []
    for name in value.split(","):
        try:
            signum = signal.Signals[name.strip()]
        except KeyError:
            parser.error(
                f"--signals-to-handle {value}: no signal is named {name.strip()!r}; use e.g. SIGTERM,SIGUSR1"
            )
        if signum in (signal.SIGKILL, signal.SIGSTOP):
            parser.error(f"--signals-to-handle {value}: {name.strip()} cannot be handled by any program")
        if signum == signal.SIGCHLD:
            parser.error(f"--signals-to-handle {value}: SIGCHLD is what ftrun is told of its ranks by")
        signals.append(signum)
    return tuple(signals)


def _seconds(parser: _Parser, option: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        parser.error(f"{option} {value}: is not a number of seconds")
    if not 0 <= seconds < float("inf"):
        parser.error(f"{option} {value}: must be at least 0 and finite")
    return seconds


def run(options: Options) -> int:
    """Runs a job to its end; to be called in the main thread.

    Args:
        options: the job.

    Returns:
        The exit code: 0; 1 if a rank failed that the job did not finish without; 2 if it could not be
        started; 128 + the signal that ended the job.
    """
    job = Job(options.nproc_per_node, options.role, str(uuid.uuid4()), options.max_restarts)
    if job.shares_processor():
        log.info("OMP_NUM_THREADS=1 for each rank, so that they share the processor; set it to tune")
    with ExitStack() as cleanup:
        try:
            logs_specs = DefaultLogsSpecs(
                cleanup.enter_context(_log_dir(options)),
                options.redirects,
                options.tee,
                options.local_ranks_filter,
            )
            orphans = cleanup.enter_context(adopted())
            signals = cleanup.enter_context(queued((*options.signals, signal.SIGCHLD)))
            ranks = cleanup.enter_context(
                Ranks(
                    options.program,
                    job,
                    RestartPolicy(options.policy, options.max_restarts, options.max_rank_restarts),
                    logs_specs,
                    shutdown_timeout=options.shutdown_timeout,
                    standby=options.standby,
                    orphans=orphans,
                )
            )
            ranks.start()
        except (OSError, StoreError) as error:
            print(f"ftrun: error: cannot start {options.program.command[0]}: {error}", file=sys.stderr)
            return 2
        end = ranks.wait(signals)
    for failure in end.forgiven:
        log.info(
            "rank %s (pid %d): %s; the job finished all the same", failure.name, failure.pid, failure.how()
        )
    if end.failures:
        print(f"ftrun: {report(end.failures, options.nproc_per_node)}", file=sys.stderr)
    if end.signum is not None:
        return 128 + end.signum
    return 1 if end.failures else 0


@contextmanager
def _log_dir(options: Options) -> Iterator[str]:
    """The directory for log files; a temporary one is removed if nothing was written there."""
    if options.log_dir is not None:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ftrun``.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Returns:
        The exit code, see `run`.
    """
    options = parse_args(argv)
    logging.basicConfig(format="ftrun: %(message)s")
    logging.getLogger("ft_wrapper").setLevel(os.environ.get("LOGLEVEL", "INFO"))
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
