"""Plug-ins that run when the wrapped call has completed."""

from __future__ import annotations

import abc

from .state import FrozenState


class Completion(abc.ABC):
    """Base of the ``completion`` plug-ins of `Wrapper`: runs once all active ranks have finished.

    Every rank that is still in the job runs it, hot spares too, right before the wrapped call returns.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Does what is to be done at the end of a call.

        Args:
            state: the rank's state in the last iteration.

        Returns:
            The state.
        """
