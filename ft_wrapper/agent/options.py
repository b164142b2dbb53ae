"""What ``ftrun``'s command line asks for, checked before anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std

from .command_line import (
    DEFAULT_RDZV_ID,
    NO_EFFECT,
    NO_HANDLER,
    Parser,
    make_parser,
    name,
)
from .node_options import Meeting, read_nodes
from .outputs import PREFIX_ENV
from .policy import RANK_RESTARTS, Policy
from .process import Program, python_program

__all__ = ["Meeting", "Options", "parse_args"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for, checked.

    Args:
        nproc_per_node: number of ranks.
        program: what each rank runs.
        script: what the command line calls it.
        role: name of the ranks in log lines and in ``ROLE_NAME``.
        log_dir: where log files go; a temporary directory when None.
        redirects: which streams go to files instead of the console.
        tee: which streams go to files and to the console.
        local_ranks_filter: the ranks that may write to the console; all when None.
        signals: what is forwarded to the ranks and then ends the job.
        shutdown_timeout: seconds between a forwarded signal and SIGKILL.
        policy: what is done about a rank that fails.
        max_restarts: how often all ranks may be restarted.
        max_rank_restarts: how often each rank may be started again alone.
        standby: whether ranks are forked from a process that has torch imported.
        logs_specs: what decides where log files go.
        virtual_local_rank: whether each rank sees its own GPU only.
        active_world_size: so many ranks call the function of a wrapped job; None: all.
        spare_nodes: so many of the nodes have hot spares only.
        meeting: how this node finds the others; None if there are none.
        address: what the user calls this node if there are no others; empty if nothing.
        port: where the ranks' store is if there are no others; 0 for a free port.
        run_id: what the user calls the job if there are no others; empty if nothing.
        log_line_prefix: what ``--tee`` puts before each line; role and rank when None.
        warnings: what the user should be told of the command line, a line each.
    """

    nproc_per_node: int
    program: Program
    script: str
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
    logs_specs: type[LogsSpecs] = DefaultLogsSpecs
    virtual_local_rank: bool = False
    active_world_size: int | None = None
    spare_nodes: int = 0
    meeting: Meeting | None = None
    address: str = ""
    port: int = 0
    run_id: str = ""
    log_line_prefix: str | None = None
    warnings: tuple[str, ...] = ()


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Reads and checks the command line.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Raises:
        SystemExit: an argument is wrong (2; one line on stderr names it and the way out), or help was
            asked for (0).
    """
    try:
        parser = make_parser()
    except ValueError as error:  # torchrun's own parser says no more than this
        print(f"ftrun: error: PET_* of an option without a value must be 0 or 1: {error}", file=sys.stderr)
        sys.exit(2)
    args = parser.parse_args(argv)
    args.rdzv_id = args.rdzv_id or DEFAULT_RDZV_ID  # torchrun's static rendezvous needs no name
    _warn_of_what_has_no_effect(parser, args)
    nproc = parser.nproc(args.nproc_per_node)
    _check_log_dir(parser, args)
    policy = _policy(parser, args)
    _check_devices(parser, args, nproc)
    nodes = read_nodes(parser, args, nproc, policy)
    return Options(
        nproc_per_node=nproc,
        program=_program(parser, args),
        script=args.training_script,
        role=args.role,
        log_dir=args.log_dir or None,
        redirects=parser.streams("--redirects", args.redirects, nproc),
        tee=parser.streams("--tee", args.tee, nproc),
        local_ranks_filter=parser.local_ranks("--local-ranks-filter", args.local_ranks_filter, nproc),
        signals=parser.signals(args.signals_to_handle),
        shutdown_timeout=parser.seconds("--shutdown-timeout", args.shutdown_timeout),
        policy=policy,
        max_restarts=parser.count("--max-restarts", args.max_restarts),
        max_rank_restarts=parser.count("--max-rank-restarts", args.max_rank_restarts, RANK_RESTARTS),
        standby=not args.no_standby,
        logs_specs=_logs_specs(parser, args.logs_specs),
        virtual_local_rank=bool(args.virtual_local_rank),
        run_id="" if args.standalone or args.rdzv_id == DEFAULT_RDZV_ID else args.rdzv_id,
        log_line_prefix=args.log_line_prefix_template or os.environ.get(PREFIX_ENV) or None,
        warnings=tuple(parser.warnings),
        **nodes,
    )


def _check_log_dir(parser: Parser, args: argparse.Namespace) -> None:
    path = args.log_dir
    if path and path != os.devnull and os.path.exists(path) and not os.path.isdir(path):
        parser.error(f"--log-dir {path}: is a file; name a directory")


def _warn_of_what_has_no_effect(parser: Parser, args: argparse.Namespace) -> None:
    for option, instead in NO_EFFECT.items():
        value = getattr(args, name(option))
        if value and (option, value) != ("--event-log-handler", NO_HANDLER):
            shown = ",".join(value) if isinstance(value, list) else value
            parser.warn(f"{option} {shown}: has no effect here; {instead}")
    unknown = parser.unknown()
    defaults = parser.parse_args([args.training_script]) if unknown else args
    for action in unknown:
        value = getattr(args, action.dest)
        if value != getattr(defaults, action.dest) or f"PET_{action.dest.upper()}" in os.environ:
            given = action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]} {value}"
            parser.warn(f"{given}: has no effect here: this version of ftrun does not know that option")


def _check_devices(parser: Parser, args: argparse.Namespace, nproc: int) -> None:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if args.virtual_local_rank and devices is not None and len(devices.split(",")) < nproc:
        parser.error(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={devices} has fewer GPUs than there are ranks with "
            f"--nproc-per-node {nproc}; start as many ranks as GPUs"
        )


def _logs_specs(parser: Parser, name: str | None) -> type[LogsSpecs]:
    if name is None:
        return DefaultLogsSpecs
    found = importlib.metadata.entry_points(group="torchrun.logs_specs", name=name)
    if not found:
        parser.error(
            f"--logs-specs {name}: no installed package has an entry point of that name in "
            "torchrun.logs_specs"
        )
    try:
        specs: type[LogsSpecs] = next(iter(found)).load()
    except (ImportError, AttributeError) as error:
        parser.error(f"--logs-specs {name}: cannot be imported: {error}")
    return specs


def _program(parser: Parser, args: argparse.Namespace) -> Program:
    script: str = args.training_script
    arguments = tuple(args.training_script_args)
    python = os.environ.get("PYTHON_EXEC")
    if args.run_path:  # by this Python, as under torchrun
        superfluous = [option for option in ("--no-python", "--module") if getattr(args, name(option))]
        if superfluous:
            parser.warn(f"--run-path: makes {' and '.join(superfluous)} superfluous: python runs {script}")
        args.no_python, args.module, python = False, False, None
    if args.no_python and args.module:
        parser.error(
            "--no-python and --module contradict each other: a module needs python; drop one of them"
        )
    if args.no_python:
        path = shutil.which(script)
        if path is None:
            parser.error(
                f"script {script}: no such program, or not executable (--no-python runs it without python)"
            )
        return Program((path, *arguments))
    if args.module:
        # Another Python has other modules, and says itself what it misses.
        if python is None and not _module_exists(script):
            parser.error(
                f"module {script}: not found, or a package without __main__; install it or set PYTHONPATH"
            )
    elif not os.path.exists(script):
        parser.error(f"script {script}: no such file in {os.getcwd()}; for a module's name give -m")
    program = python_program(script, arguments, is_module=args.module, python=python)
    # Another Python may have another torch, or none; and compiled files are left to Python itself.
    if python is not None or script.endswith(".pyc"):
        return Program(program.command)
    return program


def _policy(parser: Parser, args: argparse.Namespace) -> Policy:
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
