"""The jobs of this user on this host: each ``ftrun`` serves its job's status on a Unix socket.

The sockets lie in a folder that only this user may enter. A client reads two lines: the job, and its status.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ..store.bounded import in_background

log = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds in which the other side has to send or take a line


@dataclasses.dataclass(frozen=True)
class LocalJob:
    """A job of which an agent runs on this host.

    Args:
        names: what it can be called; the first one for people, empty before the nodes have met.
        script: what it runs.
        pid: of the agent.
    """

    names: list[str]
    script: str
    pid: int


@contextlib.contextmanager
def served(job: Callable[[], LocalJob]) -> Iterator[None]:
    """Serves a job's status within the context, in a thread; if it cannot, the log says why.

    Args:
        job: returns the job. Called in the thread.
    """
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        try:
            path = _folder() / uuid.uuid4().hex[:8]  # such a path may have some hundred characters
            opened.callback(path.unlink, missing_ok=True)
            listening.bind(f"{path}.new")  # a client takes a file without a listener for stale
            listening.listen()
            os.rename(f"{path}.new", path)
        except OSError as error:
            log.info("ftrun status finds this job only by its endpoint: %s", error)
        else:
            thread = in_background("answering ftrun status", lambda: _answer(listening, job))
            opened.callback(thread.join, _PATIENCE)
            opened.callback(listening.shutdown, socket.SHUT_RDWR)  # wakes the thread
        yield


def _answer(listening: socket.socket, job: Callable[[], LocalJob]) -> None:
    with contextlib.suppress(OSError):  # at the end: it is shut down
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(_PATIENCE)
                found = job()
                connection.sendall(json.dumps(dataclasses.asdict(found)).encode() + b"\n")
                from .control import read_now  # not before a client asks

                connection.sendall(read_now(found.names[0]).encode() + b"\n")


def jobs_here(name: str = "") -> list[tuple[LocalJob, str]]:
    """The jobs of this user on this host; the files of agents that are gone are removed.

    Args:
        name: of the job that is meant; empty for all.

    Returns:
        Each job, and its status as JSON; that is empty if the agent cannot read it.
    """
    found: dict[str, tuple[LocalJob, str]] = {}
    with contextlib.suppress(OSError):
        for path in _folder().iterdir():
            with contextlib.suppress(OSError, ValueError, TypeError), socket.socket(socket.AF_UNIX) as agent:
                agent.settimeout(_PATIENCE)
                try:
                    agent.connect(str(path))
                except ConnectionRefusedError:
                    if not path.suffix:
                        path.unlink()
                    raise
                with agent.makefile(encoding="utf-8") as lines:
                    job = LocalJob(**json.loads(lines.readline()))
                    if not name or name in job.names:
                        found.setdefault(job.names[0], (job, ""))  # even if its store does not answer in time
                        found[job.names[0]] = job, lines.readline().strip()
    return sorted(found.values(), key=lambda one: one[0].pid)


def _folder() -> Path:
    """Where the sockets of this user are; makes it.

    Raises:
        OSError: it cannot be made, or other users may enter it, or may have made it.
    """
    folder = Path(tempfile.gettempdir(), f"ft_wrapper-{os.geteuid()}")
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user may enter")
    return folder
