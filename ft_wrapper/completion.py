"""Plug-ins that run when the wrapped call has completed."""

from .compose import PlugIn


class Completion(PlugIn):
    """Base of the ``completion`` plug-ins of `Wrapper`: runs when all active ranks have finished.

    Every rank of the job runs it, hot spares included, just before the wrapped call returns. It gets the
    rank's state in the last iteration.
    """
