"""``ftrun``: runs a job on one node.

It starts the ranks and hosts the store that they agree on, outside of them, so that any rank may die. A dead
rank is not replaced and takes nobody along: the others go on to their own end, a wrapped job without it.
Options have torchrun's names and meanings.
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

from torch.distributed import DistError
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.run import determine_local_world_size

from .agent.failure import Failure, report
from .agent.ranks import Ranks
from .agent.signals import queued
from .exception import StoreError
from .store import TCPStore, TCPStoreServer

# Not __name__, which is "__main__" under `python -m ft_wrapper.run`.
log = logging.getLogger("ft_wrapper.run")

HOST = "127.0.0.1"
STORE_ENV = "FT_WRAPPER_STORE"
DEFAULT_SHUTDOWN_TIMEOUT = 5.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for, checked.

    Args:
        nproc_per_node: number of ranks.
        command: program and arguments that each rank executes.
        role: name of the ranks in log lines and in ``ROLE_NAME``.
        log_dir: where log files go; a temporary directory when None.
        redirects: which streams go to files instead of the console.
        tee: which streams go to files and to the console.
        local_ranks_filter: the ranks that may write to the console; all when None.
        signals: what is forwarded to the ranks and then ends the job.
        shutdown_timeout: seconds between a forwarded signal and SIGKILL.
    """

    nproc_per_node: int
    command: tuple[str, ...]
    role: str
    log_dir: str | None
    redirects: Std | dict[int, Std]
    tee: Std | dict[int, Std]
    local_ranks_filter: set[int] | None
    signals: tuple[signal.Signals, ...]
    shutdown_timeout: float


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with one line, and without the usage text that would bury it."""
        self.exit(2, f"ftrun: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="ftrun",
        description="Starts the ranks of a job on this machine and hosts the store that they agree on. "
        "A rank that dies takes nobody along.",
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
    return Options(
        nproc_per_node=nproc,
        command=_command(parser, args),
        role=args.role,
        log_dir=log_dir,
        redirects=_streams(parser, "--redirects", args.redirects, nproc),
        tee=_streams(parser, "--tee", args.tee, nproc),
        local_ranks_filter=_ranks(parser, "--local-ranks-filter", args.local_ranks_filter, nproc),
        signals=_signals(parser, args.signals_to_handle),
        shutdown_timeout=_seconds(parser, "--shutdown-timeout", args.shutdown_timeout),
    )


def _nproc(parser: _Parser, value: str) -> int:
    try:
        nproc: int = determine_local_world_size(value)
    except ValueError as error:
        parser.error(f"--nproc-per-node {value}: use a number of at least 1, cpu, gpu or auto ({error})")
    if nproc < 1:
        parser.error(f"--nproc-per-node {value}: at least one rank is needed")
    return nproc


def _command(parser: _Parser, args: argparse.Namespace) -> tuple[str, ...]:
    script: str = args.script
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
        return (program, *args.script_args)
    python = os.environ.get("PYTHON_EXEC")
    if args.module:
        # Another Python has other modules, and says itself what it misses.
        if python is None and not _module_exists(script):
            parser.error(
                f"module {script}: not found, or a package without __main__; install it or set PYTHONPATH"
            )
        return (python or sys.executable, "-u", "-m", script, *args.script_args)
    if not os.path.exists(script):
        parser.error(f"script {script}: no such file in {os.getcwd()}; for a module's name give -m")
    return (python or sys.executable, "-u", script, *args.script_args)


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


def rank_environment(options: Options, rank: int, store_address: str, run_id: str) -> dict[str, str]:
    """What a rank finds in its environment, beside what this process has in its own.

    Args:
        options: the job.
        rank: the rank.
        store_address: ``host:port`` of the store.
        run_id: the same for all ranks of a run, another one for each run.
    """
    host, _, port = store_address.rpartition(":")
    size = str(options.nproc_per_node)
    variables = {
        STORE_ENV: store_address,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        # The store is there already: no rank shall try to host it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": options.role,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if options.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def run(options: Options) -> int:
    """Runs a job to its end; to be called in the main thread.

    Args:
        options: the job.

    Returns:
        The exit code: 0; 1 if a rank failed that the job did not finish without; 2 if it could not be
        started; 128 + the signal that ended the job.
    """
    if options.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        log.info("OMP_NUM_THREADS=1 for each rank, so that they share the processor; set it to tune")
    with ExitStack() as cleanup:
        try:
            logs_specs = DefaultLogsSpecs(
                cleanup.enter_context(_log_dir(options)),
                options.redirects,
                options.tee,
                options.local_ranks_filter,
            )
            server = TCPStoreServer()
            cleanup.callback(server.close)
            signals = cleanup.enter_context(queued(options.signals))
            ranks = cleanup.enter_context(Ranks(options.shutdown_timeout))
            address = f"{HOST}:{server.port}"
            run_id = str(uuid.uuid4())
            environments = {
                rank: rank_environment(options, rank, address, run_id)
                for rank in range(options.nproc_per_node)
            }
            ranks.start(options.command, environments, logs_specs, options.role)
        except (OSError, StoreError) as error:
            print(f"ftrun: error: cannot start {options.command[0]}: {error}", file=sys.stderr)
            return 2
        end = ranks.wait(signals)
        forgiven = _forgiven(server.port, end.failures)
    failures = []
    for failure in end.failures:
        if failure.rank in forgiven:
            log.info("rank %d: %s; the job finished without it", failure.rank, failure.how())
        else:
            failures.append(failure)
    if failures:
        print(f"ftrun: {report(failures, options.nproc_per_node)}", file=sys.stderr)
    if end.signum is not None:
        return 128 + end.signum
    return 1 if failures else 0


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


def _forgiven(port: int, failures: Sequence[Failure]) -> frozenset[int]:
    """The failed ranks that do not matter, because the wrapped job has finished without them."""
    if not failures:
        return frozenset()
    try:
        store = TCPStore(HOST, port)
        try:
            outcome = store.outcome()
        finally:
            store.close()
    except (StoreError, DistError) as error:
        log.warning("whether the job finished without them is not known: %s", error)
        return frozenset()
    if not outcome.completed:
        return frozenset()
    return frozenset(failure.rank for failure in failures) - outcome.slots


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
