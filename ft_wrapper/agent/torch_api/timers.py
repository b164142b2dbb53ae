"""Torch's watchdog, for the workers.

With ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` the agent has a `FileTimerServer`, and its workers find the named
pipe in ``TORCHELASTIC_TIMER_FILE``. One that overruns a ``timer.expires(…)`` of
``torch.distributed.elastic.timer`` is killed, has failed, and is treated like any other that has.
"""

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterator

from torch.distributed.elastic.agent.server import local_elastic_agent as theirs
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest, FileTimerServer

log = logging.getLogger(__name__)

_TIMERS_INTERVAL = 0.1  # seconds between two looks at the timers; as in torch's agent
_END_TIMEOUT = 5.0


class _Server(FileTimerServer):
    """Torch's, but for two things: it spares the agent, and it can be stopped before its first use."""

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        if worker_pid == os.getpid():
            return True  # torch's ends its own process, too, as its agents cannot replace a single worker
        log.warning("process %d has overrun a timer: it is sent signal %d", worker_pid, signal)
        reaped: bool = super()._reap_worker(worker_pid, signal)
        return reaped

    def stop(self) -> None:
        thread: threading.Thread | None = self._watchdog_thread
        self._stop_signaled = True
        nothing = FileTimerRequest(worker_pid=0, scope_id="", expiration_time=-1).to_json()
        # Its thread may wait for the first worker to open the pipe, or for a line.
        with contextlib.suppress(OSError), open(self._file_path, "r+b", buffering=0) as pipe:
            os.set_blocking(pipe.fileno(), False)
            pipe.write(f"{nothing}\n".encode())
            if thread is not None:
                thread.join(_END_TIMEOUT)
        super().stop()


@contextlib.contextmanager
def watchdog(run_id: str) -> Iterator[str]:
    """Serves the workers' timers for a while, if the environment asks for that.

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
