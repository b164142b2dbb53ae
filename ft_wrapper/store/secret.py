"""The job's secret, by which its processes know each other's texts in the store; see `protocol.seal`.

The agent makes one, or is given it, and hands it to processes of its user through a socket. It is never in
the environment of a rank, whose children would inherit it.
"""

import functools
import logging
import os
import secrets
import socket
import struct

from ..exception import StoreError
from ..protocol.operations import read
from ..protocol.seal import Seal, forged
from .mixin import StoreMixin

log = logging.getLogger(__name__)

#: Where the agent hears hello: the name of an abstract Unix socket, without the NUL in front.
AGENT_ENV = "FT_WRAPPER_AGENT"
SECRET_ENV = "FT_WRAPPER_SECRET"
LEAST = 16
"""Bytes of a secret that a user gives."""
#: Log: where the job's agents hand out its secret. It is not sealed: who asks looks who answers.
AGENTS = "ft_wrapper/agents"
#: Register: the job's secret, where only its own can read the store.
SECRET = "ft_wrapper/secret"
_MOST = 64  # agents that are asked
_TIMEOUT = 10.0  # seconds: an agent answers at once
_CREDENTIALS = struct.Struct("3i")
_LONGEST = 1 << 12

_secret: bytes | None = None
_is_known = False
_told: list[str] = []


def use(secret: bytes | None) -> None:
    """From now on this process's clients of stores have this secret; None: the job is open."""
    global _secret, _is_known
    _secret, _is_known = secret, True


def job_secret() -> bytes | None:
    """The secret of the job that this process belongs to; None if that is open.

    The agent is asked once. Where there is none, ``FT_WRAPPER_SECRET`` is read, and removed.
    """
    if not _is_known:
        agent = os.environ.get(AGENT_ENV)
        use(_ask(agent) if agent else given())
    return _secret


def given() -> bytes | None:
    """The secret in ``FT_WRAPPER_SECRET``, which is removed: None if it is not set.

    Raises:
        ValueError: it is too short.
    """
    return checked(SECRET_ENV, text.encode()) if (text := os.environ.pop(SECRET_ENV, "")) else None


def checked(where: str, secret: bytes) -> bytes:
    """A secret that a user has given, without white space around it.

    Raises:
        ValueError: it is too short; names where it stands.
    """
    secret = secret.strip()
    if len(secret) < LEAST:
        raise ValueError(
            f"{where}: a secret of {len(secret)} bytes could be guessed; give {LEAST} or more, as from "
            "'openssl rand -hex 32', another one for each job"
        )
    return secret


def make() -> bytes:
    """A secret that no other job has."""
    return secrets.token_bytes(32)


def seal_of(store: str) -> Seal | None:
    """What a client of the job's store seals with; None if the job is open.

    Args:
        store: which store it is, the same for all its clients.
    """
    secret = job_secret()
    return None if secret is None else _seal(secret, store)


def found_seal(store: StoreMixin) -> Seal | None:
    """The seal for a program that is none of the job's: its agents on this host give their user the secret.

    Args:
        store: one of the job's, which has been opened without a secret.

    Returns:
        None if the job is open; where there is a secret that this program does not get, one that opens all
        and seals nothing.

    Raises:
        StoreError: it cannot be used.
    """
    if store.check([SECRET]):
        return _seal(store.get(SECRET), store.place)
    if not store.check([AGENTS]):
        return None
    names = store.get(AGENTS).decode(errors="replace").split()[-_MOST:]
    return _seal(next(filter(None, map(_ask, reversed(names))), None), store.place)


def announce(store: StoreMixin, agent: str, record: str) -> None:
    """Says in the store that the job has a secret, which an agent hands out; nothing if it has none.

    Args:
        store: one of the job's.
        agent: where it hands it out.
        record: a key that the job has written if it is on.

    Raises:
        StoreError: this agent has not the job's secret.
    """
    secret = job_secret()
    if secret is not None:
        if read(store, record) is None and store.check([record]):
            raise forged(record)
        store.append(AGENTS, f"{agent}\n")
        if store.is_private:
            store.set(SECRET, secret)
    elif store.check([AGENTS]):
        raise StoreError(f"the job has a secret: give this node its --job-secret-file, or set {SECRET_ENV}")


def warn_if_open(store: str) -> None:
    """Says, once, what others can do where the job has no secret."""
    if job_secret() is None and not _told:
        _told.append(store)
        log.warning(
            "the store at %s is open: others who can connect to it can end this job, or take part in it; set "
            "%s on all nodes, or give ftrun --job-secret-file (SECURITY.md)",
            *(store, SECRET_ENV),
        )


def peer(line: socket.socket) -> tuple[int, int]:
    """Who has connected, or listens, at the other end of a Unix socket: process and effective user."""
    pid, uid, _ = _CREDENTIALS.unpack(
        line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def address_of(agent: str) -> str:
    """Where an agent hands out the secret: the name of an abstract Unix socket."""
    return f"\0{agent}-secret"


def _ask(agent: str) -> bytes | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_TIMEOUT)
        try:
            line.connect(address_of(agent))
            if peer(line)[1] not in (os.geteuid(), 0):
                return None  # somebody else's, who may have any reason to answer
            _, fds, _, _ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except (OSError, ValueError) as error:
            log.debug("agent %s gives no secret: %s", agent, error)
            return None
    try:
        return os.pread(fds[0], _LONGEST, 0) if fds else None
    finally:
        for fd in fds:
            os.close(fd)


def _seal(secret: bytes | None, store: str) -> Seal:
    return Seal(secret, store, functools.partial(_warn, store))


def _warn(store: str, key: str) -> None:
    log.error(
        "store %s: key %s was not written with this job's secret: ignored. Somebody else writes there, "
        "or a node has another secret (SECURITY.md)",
        *(store, key),
    )
