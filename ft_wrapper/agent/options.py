"""The command line of ``ftrun``: read, and checked before anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint
from torch.distributed.run import determine_local_world_size

from ..rendezvous.backend import DEFAULT_PORT
from ..rendezvous.settings import NAME, read_parameters
from .policy import Policy
from .standby import Program

DEFAULT_SHUTDOWN_TIMEOUT = 5.0
DEFAULT_RANK_RESTARTS = 10
DEFAULT_EXIT_BARRIER_TIMEOUT = 300.0  # torch's agents' own
DEFAULT_MONITOR_INTERVAL = 0.1  # torchrun's


@dataclasses.dataclass(frozen=True)
class Meeting:
    """How the nodes of a job find each other.

    Args:
        parameters: of the rendezvous; torch's.
        monitor_interval: seconds between two looks whether nodes are waiting, where nobody tells.
        exit_barrier_timeout: seconds for which a node whose ranks are done waits for the others.
    """

    parameters: RendezvousParameters
    monitor_interval: float
    exit_barrier_timeout: float


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
        meeting: how this node finds the others; None if there are none.
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
    meeting: Meeting | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with one line, and without the usage text that would bury it."""
        self.exit(2, f"ftrun: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="ftrun",
        description="Starts the ranks of a job on this machine, which may be one of several, and hosts the "
        "store that they agree on. A rank of a wrapped job that dies is started again alone.",
        epilog="Options mean the same as torchrun's and can be set by the same PET_* environment variables. "
        "'ftrun status' shows how a job stands, 'ftrun report' what its restarts took: see their --help.",
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
        "--nnodes",
        action=env,
        default="1",
        metavar="MIN[:MAX]",
        help="number of machines, each with an ftrun of its own: a number, or the least and the most "
        "(default: 1)",
    )
    parser.add_argument(
        *_spellings("--rdzv-backend"),
        action=env,
        default=NAME,
        metavar="NAME",
        help=f"how the nodes find each other: {NAME}, or one of torch's, c10d for instance (default: {NAME})",
    )
    parser.add_argument(
        *_spellings("--rdzv-endpoint"),
        action=env,
        default="",
        metavar="HOST:PORT",
        help=f"where they do; with {NAME} and c10d the node of that name hosts the store "
        f"(default port: {DEFAULT_PORT})",
    )
    parser.add_argument(
        *_spellings("--rdzv-id"),
        action=env,
        default="none",
        metavar="ID",
        help="the job, the same on all nodes (default: none)",
    )
    parser.add_argument(
        *_spellings("--rdzv-conf"),
        action=env,
        default="",
        metavar="NAME=VALUE,...",
        help="further options of the rendezvous: join_timeout=600,last_call_timeout=30",
    )
    parser.add_argument(
        *_spellings("--local-addr"),
        action=env,
        default=None,
        metavar="ADDRESS",
        help="how the other nodes reach this one (default: found out)",
    )
    parser.add_argument(
        *_spellings("--node-id"),
        action=env,
        default=None,
        metavar="ID",
        help="which node this is; started again with the same id it takes its own place (default: the "
        "number that SLURM or Kubernetes gave it, else a new one)",
    )
    parser.add_argument(
        *_spellings("--monitor-interval"),
        action=env,
        default=str(DEFAULT_MONITOR_INTERVAL),
        metavar="SECONDS",
        help=f"how often to look whether nodes wait; not with {NAME}, which tells (default: %(default)s)",
    )
    parser.add_argument(
        *_spellings("--exit-barrier-timeout"),
        action=env,
        default=str(DEFAULT_EXIT_BARRIER_TIMEOUT),
        metavar="SECONDS",
        help="how long a node whose ranks are done waits for the other nodes (default: %(default)s)",
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
        meeting=_meeting(parser, args, nproc),
    )


def _meeting(parser: _Parser, args: argparse.Namespace, nproc: int) -> Meeting | None:
    least, most = _nodes(parser, args.nnodes)
    monitor_interval = _seconds(parser, "--monitor-interval", args.monitor_interval)
    if monitor_interval == 0:
        parser.error("--monitor-interval 0: must be more than 0")
    barrier = _seconds(parser, "--exit-barrier-timeout", args.exit_barrier_timeout)
    if not args.rdzv_endpoint:
        if most > 1:
            parser.error(
                f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT: one of the nodes, the same on all"
            )
        for option, value, default in (
            ("--rdzv-backend", args.rdzv_backend, NAME),
            ("--rdzv-conf", args.rdzv_conf, ""),
            ("--rdzv-id", args.rdzv_id, "none"),
            ("--node-id", args.node_id, None),
        ):
            if value != default:
                parser.error(
                    f"{option} {value} is without meaning alone on one node: add --rdzv-endpoint or drop it"
                )
        return None
    config = _config(parser, args, nproc)
    known = set(rendezvous_handler_registry._registry) | {NAME}
    if args.rdzv_backend not in known:
        parser.error(f"--rdzv-backend {args.rdzv_backend}: there is no such; use {', '.join(sorted(known))}")
    try:
        parse_rendezvous_endpoint(args.rdzv_endpoint, DEFAULT_PORT)
        parameters = RendezvousParameters(
            args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id, least, most, args.local_addr, **config
        )
        if args.rdzv_backend == NAME:
            read_parameters(parameters)
    except ValueError as error:
        parser.error(f"--rdzv-endpoint {args.rdzv_endpoint}: {error}")
    return Meeting(parameters, monitor_interval, barrier)


def _config(parser: _Parser, args: argparse.Namespace, nproc: int) -> dict[str, str]:
    try:
        config: dict[str, str] = _parse_rendezvous_config(args.rdzv_conf)
    except ValueError:
        parser.error(f"--rdzv-conf {args.rdzv_conf}: use NAME=VALUE with commas between them")
    for name, option in (("node_id", "--node-id"), ("nproc", "--nproc-per-node"), ("role", "--role")):
        if name in config:
            parser.error(f"--rdzv-conf {name}={config[name]}: use {option}")
    if args.rdzv_backend == NAME:
        config.update(nproc=str(nproc), role=args.role)
        if args.node_id is not None:
            config["node_id"] = args.node_id
    elif args.node_id is not None:
        parser.error(f"--node-id {args.node_id}: --rdzv-backend {args.rdzv_backend} knows no ids; drop it")
    return config


def _nodes(parser: _Parser, value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", value)
    if found is None:
        parser.error(f"--nnodes {value}: use a number, or the least and the most: 2:4")
    least, most = int(found[1]), int(found[2] or found[1])
    if least < 1:
        parser.error(f"--nnodes {value}: at least one node is needed")
    if least > most:
        parser.error(f"--nnodes {value}: the least, {least}, is more than the most, {most}; swap them")
    return least, most


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
