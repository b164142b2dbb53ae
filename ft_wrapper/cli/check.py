"""``ftrun --check``: prints what may go wrong with a job on this machine."""

import os

from .. import check
from ..agent.options import Options
from ..check.findings import Finding

NO_CUDA = "no CUDA: what concerns NCCL is not checked"


def print_findings(options: Options) -> int:
    """Prints what may go wrong with the job on this node; returns the exit code: 1 if something may.

    Args:
        options: the job.
    """
    nodes = 1 if options.rendezvous is None else options.rendezvous.max_nodes
    world_size = nodes * options.nproc_per_node
    found = check.preflight(os.environ, nodes=nodes, world_size=world_size)
    script = options.program.script
    if script is not None and not options.program.is_module and not os.access(script, os.R_OK):
        found.append(Finding(f"script {script}", "it cannot be read by this user", f"chmod a+r {script}"))
    if not check.has_cuda():
        print(NO_CUDA)
    for line in map(str, found) if found else ["nothing found"]:
        print(line)
    return 1 if found else 0
