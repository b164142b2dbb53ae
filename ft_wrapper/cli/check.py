"""``ftrun --check``: prints what may go wrong with a job on this machine."""

import contextlib
import os
import socket
import time

from .. import check
from ..agent.options import Options
from ..check import Finding, reverse_lookup
from ..store.address import split_host_port

NO_CUDA = "no CUDA: what concerns NCCL is not checked"


def print_findings(options: Options) -> int:
    """Prints what may go wrong with the job on this node; returns the exit code: 1 if something may.

    Args:
        options: the job.
    """
    nodes = 1 if options.rendezvous is None else options.rendezvous.max_nodes
    world_size = nodes * options.nproc_per_node
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
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(host, 0, socket.AF_INET6, flags=socket.AI_V4MAPPED)[0][4]
        began = time.perf_counter()
        socket.getnameinfo(address, 0)
    return time.perf_counter() - began if began else 0.0
