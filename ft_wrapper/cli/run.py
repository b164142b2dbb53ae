"""A job that ``ftrun`` starts, from its arguments to its exit code."""

import copy
import dataclasses
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from .. import check, events
from .._files import replace_broken_streams
from .._text import without_secrets
from ..agent import outputs
from ..agent.agent import run_agent
from ..agent.ft_nodes import FtNodes, OneNode
from ..agent.nodes import CannotStart, Nodes, exit_code_of
from ..agent.options import Options
from ..agent.options import parse_args as parse_args
from ..agent.policy import Policy
from ..agent.rounds import End, JobResult
from ..agent.torch_api.classic_nodes import ClassicNodes
from ..check import Finding, reverse_lookup
from ..log_lines import JSON, choose_format, make_formatter, note_node
from ..rendezvous.backends import DEFAULT_PORT, make_backend
from ..rendezvous.settings import ETCD_NAMES, NAME, etcd_address, read_parameters, read_timeout
from ..store import secret
from ..store.address import (
    address_of_this_node,
    canonical,
    host_port,
    is_this_host,
    loopback,
    split_host_port,
)
from .local import LocalJob, served

# The name of the public module.
log = logging.getLogger("ft_wrapper.run")

NO_CUDA = "no CUDA: what concerns NCCL is not checked"


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
            nodes = meet(options)
            cleanup.enter_context(served(lambda: local_job(options, nodes)))
            end = run_agent(options, options.logs(log_dir), nodes)
            replace_broken_streams()
        except (OSError, CannotStart) as error:
            words = " ".join(str(error).split())
            if isinstance(error.__cause__ or error, socket.gaierror):
                # It says neither which name nor what to do.
                words += f"; check that the endpoint and this host's own name, {socket.gethostname()}, can "
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
    """Writes the result file, if one was asked for, as a whole or not at all; returns the exit code."""
    if result.verdict == "drained":
        result = dataclasses.replace(result, exit_code=options.drained_exit_code)
    if path := options.result_file:
        part = f"{path}.{os.urandom(8).hex()}"  # another user who knew the name could put a link there
        try:
            with open(part, "x", encoding="utf-8") as file:
                file.write(result.to_text() + "\n")
            os.replace(part, path)
        except OSError as error:
            log.error("--result-file %s cannot be written: %s", path, error)
            with suppress(OSError):
                os.unlink(part)
    return result.exit_code


# Before and after ------------------------------------------------------------------------------------------


@contextmanager
def _log_folder(options: Options) -> Iterator[str]:
    """Makes the folder if it does not exist; then only its owner may enter it, whatever the umask.

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
        log.error("%s", outputs.report(end.failures, options.job.nproc, end.node))
        outputs.write_own_error_file(end.failures[0])
    result = end.result()
    if result.exit_code:
        log.error("%s", result)
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
    """Starts the job that a command line asks for, or with ``--check`` looks for what may go wrong with it.

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


# How its nodes find each other ------------------------------------------------------------------------------


def meet(options: Options) -> Nodes:
    """This node's part among the other nodes. Does not connect yet.

    Args:
        options: the job.
    """
    parameters = options.rendezvous
    if parameters is None:
        address = options.address
        if address and not is_this_host(address):
            words = "--master-addr %s leads to no address of this host: its ranks use %s"
            log.warning(words, address, loopback())
            address = ""
        return OneNode(options.job, address, options.port, options.node_check)
    if parameters.backend in (NAME, *ETCD_NAMES):
        return _ft(options, parameters)
    return _classic(options, parameters)


def local_job(options: Options, nodes: Nodes) -> LocalJob:
    """What ``ftrun status`` finds of the job on this host.

    Args:
        options: the job.
        nodes: as `meet` has made it.
    """
    parameters, endpoint = options.rendezvous, nodes.store
    if parameters is not None and parameters.backend in ETCD_NAMES:
        endpoint = str(etcd_address(parameters))
    elif parameters is not None and parameters.backend == NAME:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
        endpoint = host_port(host, port) if port else endpoint
    return LocalJob(
        [endpoint, *map(canonical, filter(None, (endpoint, nodes.store)))], options.script, os.getpid()
    )


def _ft(options: Options, parameters: RendezvousParameters) -> FtNodes:
    settings, identity = read_parameters(parameters)
    agreed = {"restart_policy": options.policy.value, "max_restarts": str(options.job.max_restarts)}
    # A node that publishes fewer options agrees with nodes of a version without them.
    more = {"active_world_size": options.job.active_world_size, "spare_nodes": options.spare_nodes}
    more["node_bench"] = int(options.node_bench is not None)
    agreed |= {name: str(number) for name, number in more.items() if number}
    return FtNodes(
        lambda: make_backend(parameters),
        dataclasses.replace(settings, agreed=agreed),
        identity,
        replaces=options.policy is not Policy.GROUP,
        exit_barrier_timeout=options.exit_barrier_timeout,
        check=options.node_check,
        bench=options.node_bench,
        where=f"{parameters.endpoint}, at most {read_timeout(parameters):g} s",
    )


def _classic(options: Options, parameters: RendezvousParameters) -> ClassicNodes:
    host_name, _ = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    parameters = copy.copy(parameters)
    parameters.local_addr = parameters.local_addr or address_of_this_node(host_name)
    spec = WorkerSpec(
        options.job.role,
        options.job.nproc,
        None,  # type: ignore[arg-type]  # the handler is made with the first round
        entrypoint=options.script,
        monitor_interval=options.monitor_interval,
        local_addr=parameters.local_addr,
    )
    return ClassicNodes(spec, options.exit_barrier_timeout, lambda: get_rendezvous_handler(parameters))


# What may go wrong with it, for ``--check`` -----------------------------------------------------------------


def print_findings(options: Options) -> int:
    """Prints what may go wrong with the job on this node; returns the exit code: 1 if something may.

    Args:
        options: the job.
    """
    nodes = 1 if options.rendezvous is None else options.rendezvous.max_nodes
    world_size = nodes * options.job.nproc
    found = check.preflight(os.environ, nodes=nodes, world_size=world_size)
    endpoint = "" if options.rendezvous is None else options.rendezvous.endpoint
    host = split_host_port(endpoint.partition(",")[0])[0] or "127.0.0.1"
    found += reverse_lookup(host, _lookup_seconds(host))
    script = options.program.script
    if script is not None and not options.program.is_module and not os.access(script, os.R_OK):
        found.append(Finding(f"script {script}", "it cannot be read by this user", f"chmod a+r {script}"))
    if not check.has_cuda():
        print(NO_CUDA)
    for line in map(str, found) if found else ["nothing found"]:
        print(line)
    return 1 if found else 0


def _lookup_seconds(host: str) -> float:
    """How long the name of an address takes to look up, in the form in which torch's client asks."""
    began = 0.0
    with suppress(OSError):
        address = socket.getaddrinfo(host, 0, socket.AF_INET6, flags=socket.AI_V4MAPPED)[0][4]
        began = time.perf_counter()
        socket.getnameinfo(address, 0)
    return time.perf_counter() - began if began else 0.0
