"""Which id a node has if its user gives it none. Without torch, for ``ftrun --supervise``."""

import os
import re
import socket
import uuid
from collections.abc import Mapping

#: Which id a supervisor gives its ``ftrun``, unless the user gives one; empty: this process is to supervise.
NODE_ID_ENV = "FT_WRAPPER_NODE_ID"


def node_id_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """The number that a cluster manager gave this node; None without a cluster manager.

    It is SLURM's process number, within a job step only (that of a batch script is always 0), or the
    completion index of a Kubernetes Job. Tried with SLURM 22.05.
    """
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return environment["SLURM_PROCID"]
    return environment.get("JOB_COMPLETION_INDEX")


def new_node_id() -> str:
    """An id that no other node has."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', socket.gethostname())}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
