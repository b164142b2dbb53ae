"""What counts where no one says otherwise, on the command line of ``ftrun`` and in the agent as a class."""

from __future__ import annotations

import signal

SHUTDOWN_TIMEOUT = 5.0
"""Seconds from the signal that ends ranks to SIGKILL."""
EXIT_BARRIER_TIMEOUT = 300.0
"""Seconds for which a node whose ranks are done waits for the others; as in torch's agents."""
RANK_RESTARTS = 10
"""How often each rank may be started again alone."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What is forwarded to the ranks, and ends them."""
