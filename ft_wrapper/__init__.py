"""Keeps distributed PyTorch training going through faults, inside the processes that survive them."""

from . import (
    abort,
    attribution,
    completion,
    exception,
    finalize,
    health_check,
    initialize,
    nested_restarter,
    rank_assignment,
    state,
    store,
    terminate,
)
from ._version import __version__ as __version__
from .call_wrapper import CallWrapper
from .compose import Compose
from .log_lines import install as _install_log_handler
from .state import FrozenState, Mode, State
from .wrapper import Wrapper

_install_log_handler()

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "nested_restarter",
    "rank_assignment",
    "state",
    "store",
    "terminate",
]
