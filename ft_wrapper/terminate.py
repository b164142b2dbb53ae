"""Plug-ins that run when a rank leaves the job for good."""

from __future__ import annotations

import abc

from .state import FrozenState


class Terminate(abc.ABC):
    """Base of the ``terminate`` plug-ins of `Wrapper`: runs on a rank that leaves before the call is done.

    It leaves because it is unhealthy, was discarded by the rank assignment, or because a ``BaseException``
    left the function. The others go on. A process that dies cannot run it.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Does what is to be done before the rank's error is raised to the caller.

        Args:
            state: the rank's state in its last iteration.

        Returns:
            The state.
        """
