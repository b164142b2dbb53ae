"""Plug-ins that run when the wrapped call has completed."""

import abc

from .state import FrozenState


class Completion(abc.ABC):
    """Base of the ``completion`` plug-ins of `Wrapper`: runs when all active ranks have finished.

    Every rank of the job runs it, hot spares included, just before the wrapped call returns.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Runs at the end of a call.

        Args:
            state: the rank's state in the last iteration.

        Returns:
            The state.
        """
