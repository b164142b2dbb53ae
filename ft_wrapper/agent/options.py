"""What ``ftrun``'s command line asks for, checked before anything is started."""

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint

from ..log_lines import FORMATS, TEXT
from ..rendezvous.backends import DEFAULT_PORT
from ..rendezvous.settings import ETCD_NAMES, NAME, read_parameters, unknown_options
from ..store import secret as store_secret
from ..store.address import why_unknown, without_brackets
from . import command_line
from .command_line import Parser, name
from .node_check import NodeCheck
from .outputs import ERROR_FILE_ENV, PREFIX_ENV, PREFIX_WORDS
from .policy import RANK_RESTARTS, Policy
from .process import Program, python_program

OURS = (NAME, *ETCD_NAMES)
#: The default of torchrun's ``--rdzv-backend``: here another name of ours.
STATIC = "static"


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
        drain_timeout: seconds for which SIGTERM lets ranks come to their next step, where the other nodes go
            on without this one; 0: it ends them.
        policy: what is done about a rank that fails.
        max_restarts: how often all ranks may be restarted.
        max_rank_restarts: how often each rank may be started again alone.
        standby: whether ranks are forked from a process that has torch imported.
        logs_specs: what decides where log files go.
        virtual_local_rank: whether each rank sees its own GPU only.
        active_world_size: so many ranks call the function of a wrapped job; None: all.
        spare_nodes: so many of the nodes have hot spares only.
        devices: of this node, if it has more ranks and some are spares: active ones get one each; else 0.
        monitor_interval: seconds between two looks whether nodes wait, with handlers that do not notify.
        exit_barrier_timeout: seconds for which a node whose ranks are done waits for the others.
        rendezvous: how this node finds the others; None if there are none.
        address: what the user calls this node if there are no others; empty if nothing.
        port: where the ranks' store is if there are no others; 0 for a free port.
        run_id: what the user calls the job if there are no others; empty if nothing.
        log_line_prefix: what ``--tee`` puts before each line; role and rank when None.
        warnings: what the user should be told of the command line, a line each.
        check: whether to look for what may go wrong, and to start nothing.
        log_format: how log lines look, those of the ranks' wrappers, too: ``text`` or ``json``.
        node_check: what this node has to pass before it takes a seat; None: nothing.
        result_file: where to write how the job has ended; empty for nowhere.
        drained_exit_code: of this process once its node was drained.
        secret: of the job, if the user gives it.
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
    monitor_interval: float
    exit_barrier_timeout: float
    logs_specs: type[LogsSpecs] = DefaultLogsSpecs
    virtual_local_rank: bool = False
    active_world_size: int | None = None
    spare_nodes: int = 0
    devices: int = 0
    rendezvous: RendezvousParameters | None = None
    address: str = ""
    port: int = 0
    run_id: str = ""
    log_line_prefix: str | None = None
    drain_timeout: float = 0.0
    warnings: tuple[str, ...] = ()
    check: bool = False
    log_format: str = TEXT
    node_check: NodeCheck | None = None
    result_file: str = ""
    drained_exit_code: int = 0
    secret: bytes | None = dataclasses.field(default=None, repr=False)


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Reads and checks the command line.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Raises:
        SystemExit: an argument is wrong (2; one line on stderr names it and the way out), or help was
            asked for (0).
    """
    try:
        parser = command_line.make_parser()
    except ValueError as error:  # torchrun's own parser says no more than this
        print(f"ftrun: error: PET_* of an option without a value must be 0 or 1: {error}", file=sys.stderr)
        sys.exit(2)
    args = parser.read(argv)
    args.rdzv_id = args.rdzv_id or command_line.DEFAULT_RDZV_ID  # torchrun's static rendezvous needs no name
    _warn_of_what_has_no_effect(parser, args)
    nproc = parser.nproc()
    if args.log_dir and args.log_dir != os.devnull and os.path.isfile(args.log_dir):
        parser.error(f"--log-dir {args.log_dir}: is a file; name a directory")
    secret = _secret(parser, args.job_secret_file)
    result = args.result_file or ""
    is_other = os.path.islink(result) or (os.path.exists(result) and not os.path.isfile(result))
    if result and (is_other or not os.path.isdir(os.path.dirname(os.path.abspath(result)))):
        parser.error(f"--result-file {result}: name a file, which is replaced, in a folder that is there")
    if args.log_format not in FORMATS:
        parser.error(f"--log-format {args.log_format}: use {' or '.join(FORMATS)}")
    policy = _policy(parser, args)
    _check_devices(parser, args, nproc)
    nodes = _nodes(parser, args, nproc, policy)
    backend = nodes["rendezvous"].backend if "rendezvous" in nodes else ""
    return Options(
        nproc_per_node=nproc,
        program=_program(parser, args),
        script=args.training_script,
        role=args.role,
        log_dir=args.log_dir or None,
        redirects=parser.streams("--redirects", nproc),
        tee=parser.streams("--tee", nproc),
        local_ranks_filter=parser.local_ranks(nproc),
        signals=parser.signals(),
        shutdown_timeout=parser.seconds("--shutdown-timeout"),
        drain_timeout=_drain_timeout(parser, backend, is_ours=backend in OURS),
        policy=policy,
        max_restarts=parser.count("--max-restarts"),
        max_rank_restarts=parser.count("--max-rank-restarts", RANK_RESTARTS),
        standby=not args.no_standby,
        logs_specs=parser.logs_specs(),
        virtual_local_rank=bool(args.virtual_local_rank),
        run_id="" if args.standalone or args.rdzv_id == command_line.DEFAULT_RDZV_ID else args.rdzv_id,
        log_line_prefix=_log_line_prefix(parser, args),
        warnings=tuple(parser.warnings),
        check=bool(args.check),
        log_format=args.log_format,
        node_check=_node_check(parser, backend, is_ours=backend in OURS),
        result_file=args.result_file or "",
        secret=secret,
        drained_exit_code=parser.count("--drained-exit-code", most=255),
        **nodes,
    )


def _warn_of_what_has_no_effect(parser: Parser, args: argparse.Namespace) -> None:
    for option, instead in command_line.NO_EFFECT.items():
        value = getattr(args, name(option))
        if value and value != command_line.NO_HANDLER:
            shown = ",".join(value) if isinstance(value, list) else value
            parser.warn(f"{option} {shown}: has no effect here; {instead}")
    unknown = parser.unknown()
    defaults = parser.parse_args([args.training_script]) if unknown else args
    for action in unknown:
        value = getattr(args, action.dest)
        if value != getattr(defaults, action.dest) or f"PET_{action.dest.upper()}" in os.environ:
            given = action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]} {value}"
            parser.warn(f"{given}: has no effect here: this version of ftrun does not know that option")
    error_file = os.environ.get(ERROR_FILE_ENV, "")
    if error_file and not os.path.isdir(os.path.dirname(os.path.abspath(error_file))):
        parser.warn(f"{ERROR_FILE_ENV}={error_file}: no effect: there is no such folder")


def _log_line_prefix(parser: Parser, args: argparse.Namespace) -> str | None:
    given = args.log_line_prefix_template or os.environ.get(PREFIX_ENV) or None
    template = string.Template(given or "")
    if not template.is_valid() or not PREFIX_WORDS.issuperset(template.get_identifiers()):
        names = ", ".join(f"${{{word}}}" for word in sorted(PREFIX_WORDS))
        parser.warn(f"--log-line-prefix-template {given}: only {names} are filled in")
    return given


def _secret(parser: Parser, path: str | None) -> bytes | None:
    """The job's secret, if the user gives it; it is not left in the environment."""
    try:
        in_environment = store_secret.given()
        return store_secret.checked(path, Path(path).read_bytes()) if path else in_environment
    except (OSError, ValueError) as error:
        parser.error(f"--job-secret-file {path}: {error}" if path else str(error))


def _check_devices(parser: Parser, args: argparse.Namespace, nproc: int) -> None:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if args.virtual_local_rank and devices is not None and len(devices.split(",")) < nproc:
        parser.error(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={devices} has fewer GPUs than there are ranks with "
            f"--nproc-per-node {nproc}; start as many ranks as GPUs"
        )


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
        parser.contradict("--no-python", "--module", "a module needs python; drop one of them")
    if args.no_python:
        path = shutil.which(script)
        if path is None:
            parser.error(f"script {script}: no such program, or not executable (--no-python: without python)")
        return Program((path, *arguments))
    if args.module:
        # Another Python has other modules, and says itself what it misses.
        if python is None and not _module_exists(script):
            parser.error(f"module {script}: not found, or without __main__; install it or set PYTHONPATH")
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
            why = f"{option} limits what this policy never does; drop one of them"
            parser.contradict(f"{option} {value}", f"--restart-policy {policy.value}", why)
    return policy


def _module_exists(name: str) -> bool:
    """Whether ``python -m name`` would find it, without importing anything: its packages may do a lot."""
    path = sys.path
    sys.path = [os.getcwd(), *path]
    try:
        parts = [*name.split("."), "__main__"]
        spec = importlib.util.find_spec(parts[0])
        for end in range(2, len(parts) + 1):
            if spec is None:
                return False
            if spec.submodule_search_locations is None:  # no package
                return end == len(parts)
            full_name = ".".join(parts[:end])
            spec = importlib.machinery.PathFinder.find_spec(full_name, list(spec.submodule_search_locations))
        return spec is not None
    except (KeyError, ImportError):
        # The path of a namespace package inside another one is not known before the outer one's import.
        return True
    except ValueError:
        return False
    finally:
        sys.path = path


# Nodes -----------------------------------------------------------------------------------------------------


def _nodes(parser: Parser, args: argparse.Namespace, nproc: int, policy: Policy) -> dict[str, Any]:
    """How many nodes the job has, and how they find each other, as fields of `Options`."""
    least, most = parser.nodes()
    spares = _spare_nodes(parser, args, policy)
    if args.standalone:
        _check_standalone(parser, args, least, spares)
        most = 1
    found: dict[str, Any] = {
        "active_world_size": _active_world_size(parser, args, most, nproc, spares),
        "monitor_interval": parser.seconds("--monitor-interval", 1e-3),
        "exit_barrier_timeout": parser.seconds("--exit-barrier-timeout"),
    }
    found["devices"] = _devices(parser, args, most, spares, found["active_world_size"])
    is_alone = args.standalone or (most + spares == 1 and not args.rdzv_endpoint)
    if not args.standalone:
        _check_backend(parser, args)
        _check_node_rank(parser, args, most + spares, is_alone)
    port = parser.count("--master-port", command_line.DEFAULT_MASTER_PORT, 65535)
    if is_alone:
        _warn_of_what_is_superfluous(parser, args)
        # As torchrun, which has a free one with --standalone; a script may name it: init_method="tcp://…".
        own = 0 if args.standalone or not args.master_port else port
        return {**found, "address": without_brackets(args.master_addr or ""), "port": own}
    endpoint = _endpoint(parser, args, port, spares)
    if args.rdzv_backend in ETCD_NAMES and args.rdzv_id == command_line.DEFAULT_RDZV_ID:
        parser.error(f"--rdzv-backend {args.rdzv_backend} needs --rdzv-id ID: it tells the jobs there apart")
    parameters = _parameters(parser, args, endpoint, least, most + spares, nproc)
    return {**found, "spare_nodes": spares, "rendezvous": parameters}


def _spare_nodes(parser: Parser, args: argparse.Namespace, policy: Policy) -> int:
    spares = parser.count("--spare-nodes")
    if spares == 0:
        return 0
    said = f"--spare-nodes {spares}"
    if args.active_world_size is not None:
        other = f"--active-world-size {args.active_world_size}"
        parser.contradict(said, other, "both say how many ranks are active; drop one of them")
    if policy is Policy.GROUP:
        why = "all ranks are restarted, spare or not; drop one (nodes beyond the most of --nnodes wait)"
        parser.contradict(said, "--restart-policy group", why)
    if args.rdzv_backend not in (*OURS, STATIC):
        why = f"there, each lost node ends all ranks; use --rdzv-backend {NAME}"
        parser.contradict(said, f"--rdzv-backend {args.rdzv_backend}", why)
    return spares


def _active_world_size(
    parser: Parser, args: argparse.Namespace, most: int, nproc: int, spares: int
) -> int | None:
    if spares:
        return most * nproc
    if args.active_world_size is None:
        return None
    active = parser.count("--active-world-size")
    if active < 1:
        parser.error(f"--active-world-size {active}: at least one rank has to call the function")
    if active > most * nproc:
        parser.error(
            f"--active-world-size {active}: is more than the {most * nproc} ranks that there are with "
            f"--nnodes {args.nnodes} and --nproc-per-node {nproc}; start more of them, or lower it"
        )
    return active


def _devices(parser: Parser, args: argparse.Namespace, most: int, spares: int, active: int | None) -> int:
    """Reads what `Options.devices` is; ends the program if there are too few."""
    nproc, is_auto = parser.nproc(), args.devices_per_node == "auto"
    count = 0 if is_auto else parser.count("--devices-per-node")
    if active is None or active >= (most + spares) * nproc:
        return 0
    count = torch.cuda.device_count() if is_auto else count  # it asks NVML, and makes no context
    if not 2 <= count < nproc:  # ranks that share a single one are taken to do so on purpose
        return 0
    given = f"--spare-nodes {spares}" if spares else f"--active-world-size {active}"
    given = f"--nproc-per-node {nproc} {given}"
    ways = f"start {count} ranks a node, with --spare-nodes; or give --devices-per-node 0 if they may share"
    if args.virtual_local_rank:
        parser.contradict(given, "--virtual-local-rank", f"a spare sees no lost rank's device; {ways}")
    if active > most * count:
        ways = ways if spares else f"lower --active-world-size to {most * count}; or {ways}"
        parser.error(f"{given}: there are {most} x {count} devices for {active} active ranks; {ways}")
    if most > 1:
        parser.warn(f"{given}: only spares that stay on their node have a device there: see Tree; or {ways}")
    return count


def _check_standalone(parser: Parser, args: argparse.Namespace, least: int, spares: int) -> None:
    """Complains of what a node that is alone cannot have; torchrun waits in vain for other nodes then."""
    for option, value, says_otherwise in (
        ("--nnodes", args.nnodes, least > 1),
        ("--spare-nodes", args.spare_nodes, spares > 0),
    ):
        if says_otherwise:
            why = "this node is alone, or it is not; drop one of them"
            parser.contradict("--standalone", f"{option} {value}", why)


def _check_backend(parser: Parser, args: argparse.Namespace) -> None:
    known = {STATIC, *OURS, *rendezvous_handler_registry._registry}
    if args.rdzv_backend not in known:
        parser.error(f"--rdzv-backend {args.rdzv_backend}: there is no such; use {', '.join(sorted(known))}")


def _check_node_rank(parser: Parser, args: argparse.Namespace, most: int, is_alone: bool) -> None:
    if not args.node_rank:
        return
    rank = parser.count("--node-rank")
    if args.rdzv_backend not in (STATIC, *OURS):
        return  # a platform sets it in any case; torchrun does not use it then, either
    # torchrun looks for the others of this one node, in vain, if there is a port to look at.
    if rank >= most and (args.master_port or not is_alone):
        parser.error(
            f"--node-rank {rank}: with {most} {'nodes' if most > 1 else 'node'} the last one is {most - 1}; "
            "give the number of them with --nnodes; one that is to wait until a place is free has --node-id "
            "ID instead"
        )
    if args.node_id not in (None, args.node_rank):
        why = "nodes are ranked by their ids; drop one of them"
        parser.contradict(f"--node-rank {rank}", f"--node-id {args.node_id}", why)


def _warn_of_what_is_superfluous(parser: Parser, args: argparse.Namespace) -> None:
    """Says which options have no effect on a node that meets no other."""
    options = [
        ("--rdzv-backend", args.rdzv_backend, (NAME, STATIC)),
        ("--rdzv-conf", args.rdzv_conf, ()),
        ("--node-rank", args.node_rank, ("0",)),
        ("--node-id", args.node_id, ()),
    ]
    if args.standalone:
        options += [
            ("--nnodes", args.nnodes, ("1", "1:1")),
            ("--rdzv-endpoint", args.rdzv_endpoint, ()),
            ("--rdzv-id", args.rdzv_id, (command_line.DEFAULT_RDZV_ID,)),
            ("--master-port", args.master_port, ()),
        ]
    given = ", ".join(f"{option} {value}" for option, value, usual in options if value and value not in usual)
    if given and args.standalone:
        parser.warn(f"{given}: no effect beside --standalone, by which this node is alone")
    elif given:
        parser.warn(f"{given}: no effect on one node without --rdzv-endpoint, for it meets no other")


def _endpoint(parser: Parser, args: argparse.Namespace, port: int, spares: int) -> str:
    """Where the nodes meet; where torchrun's do if the user does not say."""
    if args.rdzv_endpoint:
        return str(args.rdzv_endpoint)
    what = f"--nnodes {args.nnodes}" + (f" with --spare-nodes {spares}" if spares else "")
    if args.rdzv_backend in ETCD_NAMES:
        parser.error(f"{what} needs --rdzv-endpoint HOST:PORT: etcd's members, the same on all")
    if args.master_addr or args.master_port:  # as torchrun's static rendezvous has it
        return f"{args.master_addr or command_line.DEFAULT_MASTER_ADDR}:{port}"
    if args.rdzv_backend in (STATIC, *OURS):
        endpoint = where = f"{command_line.DEFAULT_MASTER_ADDR}:{command_line.DEFAULT_MASTER_PORT}"
    else:
        endpoint, where = "", "localhost"  # at which port is up to the handler
    parser.warn(
        f"{what}: without --rdzv-endpoint or --master-addr the nodes meet at {where}, so all of them have to "
        "be on this host"
    )
    return endpoint


def _parameters(
    parser: Parser, args: argparse.Namespace, endpoint: str, least: int, most: int, nproc: int
) -> RendezvousParameters:
    backend = NAME if args.rdzv_backend == STATIC else args.rdzv_backend
    config = _config(parser, args, backend, nproc)
    if args.local_addr and (why := why_unknown(args.local_addr)):
        # No error: a pod's own name is known a little after the pod begins.
        parser.warn(f"--local-addr {args.local_addr}: others reach this node by it; here it is {why}")
    try:
        if backend not in ETCD_NAMES:
            parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        parameters = RendezvousParameters(
            backend, endpoint, args.rdzv_id, least, most, args.local_addr, **config
        )
        if backend in OURS:
            read_parameters(parameters)
    except ValueError as error:
        parser.error(f"--rdzv-endpoint {endpoint}: {error}")
    return parameters


def _config(parser: Parser, args: argparse.Namespace, backend: str, nproc: int) -> dict[str, str]:
    try:
        config: dict[str, str] = _parse_rendezvous_config(args.rdzv_conf)
    except ValueError:
        parser.error(f"--rdzv-conf {args.rdzv_conf}: use NAME=VALUE with commas between them")
    if backend not in OURS:
        if args.node_id is not None:
            parser.warn(f"--node-id {args.node_id}: no effect: --rdzv-backend {backend} knows no ids")
        return config
    for key, hint in unknown_options(backend, config).items():
        parser.warn(f"--rdzv-conf {key}={config.pop(key)}: no effect: there is no such option; {hint}")
    if config.get("store_type", "tcp").lower() != "tcp":
        parser.warn(f"--rdzv-conf store_type={config.pop('store_type')}: no effect: the store is tcp here")
    rank = str(int(args.node_rank)) if args.node_rank else None
    for key, option, value in (
        ("node_id", "--node-id" if args.node_id else "--node-rank", args.node_id or rank),
        ("nproc", "--nproc-per-node", str(nproc)),
        ("role", "--role", args.role),
    ):
        if config.get(key, value) != value and value is not None:
            parser.warn(f"--rdzv-conf {key}={config[key]}: no effect: {option} says {value}")
        if value is not None:
            config[key] = value
    if args.node_rank and backend == NAME and (args.rdzv_backend == STATIC or not args.rdzv_endpoint):
        # As in torch's static rendezvous, whatever the name of the endpoint leads to: a proxy, a service.
        config.setdefault("is_host", str(rank == "0").lower())
    return config


# What a node has to pass before it takes a seat; how it leaves ----------------------------------------------


def _node_check(parser: Parser, backend: str, *, is_ours: bool) -> NodeCheck | None:
    """Reads the options; ends the program for what is wrong.

    Args:
        parser: has read the command line.
        backend: how the nodes meet; empty if this one is alone.
        is_ours: whether that is a rendezvous of ours.
    """
    given = parser.given
    if given.node_checks:
        why = "there are no built-in checks; use --node-check CMD"
        parser.error(f"--node-checks {given.node_checks}: {why}, such as examples/cluster/node_check.sh")
    command = given.node_check or ""
    timeout = min(parser.seconds("--node-check-timeout", 1e-3), 1e6)  # poll takes no more than some 25 days
    if backend and not is_ours and command:
        why = f"there, the others wait for a node that stays out; use --rdzv-backend {NAME}"
        parser.contradict(f"--node-check {command}", f"--rdzv-backend {backend}", why)
    is_limited = given.node_check_retries is not None or not backend
    retries = parser.count("--node-check-retries") if is_limited else None
    return NodeCheck(command, timeout, retries) if command else None


def _drain_timeout(parser: Parser, backend: str, *, is_ours: bool) -> float:
    """Reads for how long SIGTERM drains this node; warns where it cannot.

    Args:
        parser: has read the command line.
        backend: how the nodes meet; empty if this one is alone.
        is_ours: whether that is a rendezvous of ours.
    """
    seconds = parser.seconds("--drain-timeout")
    if is_ours or not seconds:
        return seconds
    where = f"with --rdzv-backend {backend}; use {NAME} or etcd" if backend else "on one node"
    parser.warn(f"--drain-timeout {parser.given.drain_timeout}: no effect {where}")
    return 0.0
