"""Plug-ins that tell an outer restarter, which reads this process' output, what the wrapper is doing.

Each writes one line to standard output, for example::

    [2025-01-31 12:00:00,000] [ALWAYS] [ft_wrapper.nested_restarter] [NestedRestarter] name=[InProcess] ...

whatever the logging of the process is set to. They go through the logger ``ft_wrapper.nested_restarter``;
replace its handler to send them elsewhere.
"""

import logging

from . import abort, completion, initialize, terminate
from .log_lines import StandardHandler
from .settings import as_int
from .state import FrozenState

_logger = logging.getLogger(__name__)

_handler = StandardHandler("stdout", logging.INFO)
_handler.setFormatter(logging.Formatter("[%(asctime)s] [ALWAYS] [%(name)s] %(message)s"))
_logger.addHandler(_handler)
_logger.setLevel(logging.INFO)
_logger.propagate = False  # the same line again, through the root logger, would be another change of state


class _Announcement:
    """Writes a state, with its stage if it has one, on one rank.

    Args:
        special_rank: the initial rank that writes the line.

    Raises:
        TypeError: ``special_rank`` is not an int.
        ValueError: ``special_rank`` is negative.
    """

    restarter_state: str
    restarter_stage: str | None = None

    def __init__(self, special_rank: int = 0) -> None:
        self.special_rank = as_int("special_rank", special_rank, at_least=0)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Writes the line on the special rank.

        Args:
            state: the rank's state.

        Returns:
            The state.
        """
        if state.initial_rank == self.special_rank:
            stage = "" if self.restarter_stage is None else f" stage={self.restarter_stage}"
            _logger.info("[NestedRestarter] name=[InProcess] state=%s%s", self.restarter_state, stage)
        return state


class NestedRestarterHandlingCompleted(_Announcement, initialize.Initialize):
    """Reports ``initialize`` the first time, then ``handling``, stage ``completed``: a restart is done.

    Args:
        special_rank: the initial rank that writes the line.
    """

    restarter_state = "initialize"

    def __call__(self, state: FrozenState) -> FrozenState:
        super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


class NestedRestarterHandlingStarting(_Announcement, abort.Abort):
    """Reports ``handling``, stage ``starting``: a restart begins.

    Args:
        special_rank: the initial rank that writes the line.
    """

    restarter_state = "handling"
    restarter_stage = "starting"


class NestedRestarterFinalized(_Announcement, completion.Completion):
    """Reports ``finalized``: the wrapped call is done.

    Args:
        special_rank: the initial rank that writes the line.
    """

    restarter_state = "finalized"


class NestedRestarterAborted(_Announcement, terminate.Terminate):
    """Reports ``aborted``: this rank leaves before the call is done.

    Args:
        special_rank: the initial rank that writes the line.
    """

    restarter_state = "aborted"
