"""Torch's watchdog, for the workers.

With ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` the agent has a `FileTimerServer`, and its workers find the named
pipe in ``TORCHELASTIC_TIMER_FILE``. One that overruns a ``timer.expires(…)`` of
``torch.distributed.elastic.timer`` is killed, and is treated like any other that failed.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator

from torch.distributed.elastic.agent.server import local_elastic_agent as theirs
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

log = logging.getLogger(__name__)

_TIMERS_INTERVAL = 0.1  # seconds between two looks at the timers; as in torch's agent


class _Server(FileTimerServer):
    """Torch's, but it spares the agent."""

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        if worker_pid == os.getpid():
            return True  # torch's ends its own process, too, as its agents cannot replace a single worker
        log.warning("process %d has overrun a timer: it is sent signal %d", worker_pid, signal)
        reaped: bool = super()._reap_worker(worker_pid, signal)
        return reaped


@contextlib.contextmanager
def watchdog(run_id: str) -> Iterator[str]:
    """Serves the workers' timers within the context, if the environment asks for that.

    Args:
        run_id: the job.

    Returns:
        A context: the named pipe, which this user alone may open; empty if there is no watchdog.

    Raises:
        OSError: the pipe cannot be made.
    """
    if os.environ.get(theirs.TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="ft_wrapper_timers_") as own:
        path = os.environ.get(theirs.TORCHELASTIC_TIMER_FILE) or os.path.join(own, "pipe")
        umask = os.umask(0o077)  # who writes to the pipe can have any process of this user killed
        try:
            server = _Server(path, run_id, max_interval=_TIMERS_INTERVAL, daemon=True)
        except OSError as error:  # which names no file
            what = f"{theirs.TORCHELASTIC_TIMER_FILE}: {error.strerror}"
            raise OSError(error.errno, what, path) from error
        finally:
            os.umask(umask)
        server.start()
        try:
            yield path
        finally:
            server.stop()
