"""Plug-ins that run when a rank leaves the job for good."""

import abc

from .state import FrozenState


class Terminate(abc.ABC):
    """Base of the ``terminate`` plug-ins of `Wrapper`: runs on a rank that leaves before the call ends.

    A rank leaves if it is unhealthy, if the rank assignment discards it, or if the function raises a
    ``BaseException``. The others go on. A process that is killed cannot run it.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Runs before the rank's error is raised to the caller.

        Args:
            state: the rank's state in its last iteration.

        Returns:
            The state.
        """
