"""Plug-ins that run when a rank leaves the job for good."""

from .compose import PlugIn


class Terminate(PlugIn):
    """Base of the ``terminate`` plug-ins of `Wrapper`: runs on a rank that leaves before the call ends.

    A rank leaves if it is unhealthy, if the rank assignment discards it, or if the function raises a
    ``BaseException``. The other ranks go on. A killed process cannot run it. It runs before the rank's error
    is raised to the caller, and gets the state in the rank's last iteration.
    """
