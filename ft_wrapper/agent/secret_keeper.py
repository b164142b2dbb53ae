"""Hands the job's secret to processes of this user on this host, in memory that no one can change."""

import contextlib
import fcntl
import logging
import os
import socket
import threading

from ..store.bounded import in_background
from ..store.secret import address_of, job_secret, peer

log = logging.getLogger(__name__)

_PAUSE = 1.0  # seconds to the next try where descriptors have run out


class SecretKeeper:
    """A thread that answers each connection of this user with the secret, and those of others with nothing.

    It reads nothing, so that no one keeps it waiting.

    Args:
        agent: what ranks find in ``FT_WRAPPER_AGENT``.

    Raises:
        OSError: no socket can be made.
    """

    def __init__(self, agent: str) -> None:
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address_of(agent))
        self._listener.listen(128)
        self._thread = in_background("handing out the job's secret", self._accept)

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RD)
        self._thread.join()  # at once
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("cannot hand out the job's secret, trying again in %g s: %s", _PAUSE, error)
                self._closing.wait(_PAUSE)
                continue
            with line, contextlib.suppress(OSError):  # it has gone
                self._answer(line)

    def _answer(self, line: socket.socket) -> None:
        secret = job_secret()
        if secret is None or peer(line)[1] not in (os.geteuid(), 0):
            return
        fd = os.memfd_create("ft_wrapper-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, secret)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            line.setblocking(False)
            socket.send_fds(line, [b"!"], [fd])
        finally:
            os.close(fd)
