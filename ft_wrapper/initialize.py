"""Plug-ins that run at the start of every iteration."""

from .compose import PlugIn
from .exception import RestartAbort
from .settings import as_int, as_limit
from .state import FrozenState


class Initialize(PlugIn):
    """Base of the ``initialize`` plug-ins of `Wrapper`: runs at the start of every iteration.

    It runs on every rank, hot spares included, and gets the rank's state in the iteration that begins.
    An ``Exception`` restarts all ranks; a ``BaseException`` ends the call on this rank.
    """


class RetryController(Initialize):
    """Ends the call when there were too many iterations, or too few ranks are left.

    Args:
        max_iterations: how many iterations may be entered; None: no limit. Compared with ``state.iteration``,
            which with ``rejoin`` also counts the iterations of earlier calls.
        min_world_size: the fewest ranks, hot spares included, to go on with.
        min_active_world_size: the fewest active ranks to go on with.

    Raises:
        TypeError: an argument is not an int.
        ValueError: ``max_iterations`` is below 1, or another argument is below 0.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        self.max_iterations = as_limit("max_iterations", max_iterations, at_least=1)
        self.min_world_size = as_int("min_world_size", min_world_size, at_least=0)
        self.min_active_world_size = as_int("min_active_world_size", min_active_world_size, at_least=0)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Checks the limits.

        Raises:
            RestartAbort: a limit is exceeded; the message says which.
        """
        reasons = []
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            reasons.append(
                f"iteration {state.iteration} (counted from 0) is beyond max_iterations={self.max_iterations}"
            )
        if state.world_size < self.min_world_size:
            reasons.append(f"world size {state.world_size} is below min_world_size={self.min_world_size}")
        active = state.world_size if state.active_world_size is None else state.active_world_size
        if active < self.min_active_world_size:
            reasons.append(
                f"active world size {active} is below min_active_world_size={self.min_active_world_size}"
            )
        if reasons:
            raise RestartAbort(f"no further restart on rank {state.rank}: {'; '.join(reasons)}")
        return state
