"""Whether the environment is this process's own: a process that inherited a rank's environment is not it."""

import os
from collections.abc import Callable, Mapping

from ..state import ACTIVE_WORLD_SIZE_ENV, FORMATION_SIZE_ENV
from ..store.secret import AGENT_ENV

PROCESS_ENV = "FT_WRAPPER_PROCESS"
# Each launcher of ranks sets one of these to a new value.
_LAUNCHED = ("TORCHELASTIC_ERROR_FILE", "SLURM_STEP_ID")
_OWN = (PROCESS_ENV, AGENT_ENV, "FT_WRAPPER_STORE", FORMATION_SIZE_ENV, ACTIVE_WORLD_SIZE_ENV)


def mark(environment: Mapping[str, str], pid: int = 0) -> str:
    """Returns the value of `PROCESS_ENV` for a rank.

    Args:
        environment: the rank's environment, as its launcher made it.
        pid: the rank's process; 0 if its launcher does not know it yet.
    """
    return " ".join([str(pid), *(environment.get(name, "-") for name in _LAUNCHED)])


def check_own_environment() -> None:
    """Checks that the environment is this process's own.

    If a launcher inside one of our ranks started this process, the environment is its own. The outer rank's
    variables are then removed from it.

    Raises:
        ValueError: the environment belongs to another process.
    """
    marked = os.environ.get(PROCESS_ENV, "")
    pid = marked.partition(" ")[0]
    if pid in ("", str(os.getpid())):
        return
    if "RANK" not in os.environ or marked != mark(os.environ, int(pid)):
        for name in _OWN:
            os.environ.pop(name, None)
    elif pid != "0":
        raise ValueError(
            f"this process has inherited the environment of rank {os.environ['RANK']}, process {pid}, and is "
            "not that rank; start it without RANK and WORLD_SIZE to run it alone, with torchrun or ftrun to "
            f"run it on several ranks, or without {PROCESS_ENV} if another launcher has set its rank"
        )


def mark_own() -> Callable[[], object]:
    """Marks the environment as this process's own.

    Returns:
        A function for the call's end: it removes the mark. The mark of a launched rank stays, since the
        processes that it starts later are not the rank either.
    """
    is_launched = "RANK" in os.environ
    os.environ[PROCESS_ENV] = mark(os.environ, os.getpid())
    return lambda: is_launched or os.environ.pop(PROCESS_ENV, None)
