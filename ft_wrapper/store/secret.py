"""The job's secret, by which its processes recognize their own texts in the store; see `protocol.seal`.

The agent makes the secret, or gets it from the user, and sends it to processes of its user through its
socket. The secret is never in the environment of a rank, whose children would inherit it.
"""

import contextlib
import functools
import logging
import os
import socket
import struct

from ..exception import StoreError
from ..protocol.operations import read
from ..protocol.seal import Seal, forged
from .base import StoreMixin

log = logging.getLogger(__name__)

#: Environment variable: name of the agent's abstract Unix socket, without the NUL in front.
AGENT_ENV = "FT_WRAPPER_AGENT"
SECRET_ENV = "FT_WRAPPER_SECRET"
#: Request for the secret, sent to an agent's socket in place of hello.
ASKS = b"?"
#: Log: sockets of the job's agents. Not sealed, since a process checks the user of the agent that answers.
AGENTS = "ft_wrapper/agents"
#: Register: the job's secret, if only the job's own processes can read the store.
SECRET = "ft_wrapper/secret"
_LEAST, _MOST = 16, 4096  # bytes of a secret that a user gives
_ASKED, _TIMEOUT = 64, 10.0  # most agents asked; seconds to wait for each, though a live one answers at once
_CREDENTIALS = struct.Struct("3i")
_known: list[bytes | None] = []  # empty until it is known whether there is a secret
_warned: list[str] = []


def use(secret: bytes | None) -> None:
    """Sets the secret of this process's later clients of stores; None for an open job."""
    _known[:] = [secret]


def job_secret() -> bytes | None:
    """The secret of the job that this process belongs to; None if the job is open.

    It is requested from the agent once. Without an agent, ``FT_WRAPPER_SECRET`` is read and removed.
    """
    if not _known:
        agent = os.environ.get(AGENT_ENV)
        use(_ask(agent) if agent else given())
    return _known[0]


def agree(store: StoreMixin) -> None:
    """Takes the secret from a store that only the job's own processes can read, or writes a new one there."""
    if job_secret() is None:
        use(store.compare_set(SECRET, "", os.urandom(32).hex()))


def given() -> bytes | None:
    """The secret in ``FT_WRAPPER_SECRET``, which is removed; None if the variable is not set.

    Raises:
        ValueError: the secret is too short or too long.
    """
    text = os.environ.pop(SECRET_ENV, "")
    return checked(SECRET_ENV, text.encode()) if text else None


def checked(where: str, secret: bytes) -> bytes:
    """A user's secret, without white space around it.

    Args:
        where: where the secret is from, for the error.
        secret: the secret.

    Raises:
        ValueError: the secret is too short or too long.
    """
    if not _LEAST <= len(secret.strip()) <= _MOST:
        raise ValueError(
            f"{where}: a secret has {_LEAST} to {_MOST} bytes, this one has {len(secret.strip())}; give each "
            "job its own, for example from 'openssl rand -hex 32'"
        )
    return secret.strip()


def seal_of(store: str) -> Seal | None:
    """The seal of a client of the job's store; None if the job is open.

    Args:
        store: name of the store, the same for all of its clients.
    """
    secret = job_secret()
    return None if secret is None else Seal(secret, store, functools.partial(_warn, store))


def found_seal(store: StoreMixin) -> Seal | None:
    """The seal for a tool outside the job, which gets the secret from an agent of its user on this host.

    Args:
        store: a store of the job, opened without a secret.

    Returns:
        The seal. None if the job is open; if the tool does not get the secret, a seal that checks nothing and
        cannot seal.

    Raises:
        StoreError: the store cannot be used.
    """
    if not store.check([AGENTS]):
        return None
    agents = store.get(AGENTS).decode(errors="replace").split()[-_ASKED:]
    kept = store.get(SECRET) if store.check([SECRET]) else None
    secret = kept or next(filter(None, map(_ask, reversed(agents))), None)
    return Seal(secret, store.place, functools.partial(_warn, store.place))


def announce(store: StoreMixin, agent: str, record: str) -> None:
    """Notes in the store that the job has a secret, which an agent hands out; does nothing in an open job.

    Args:
        store: a store of the job.
        agent: name of the agent's socket.
        record: a key that a running job has written.

    Raises:
        StoreError: this agent does not have the job's secret.
    """
    secret = job_secret()
    if secret is None:
        if store.check([AGENTS]):
            raise StoreError(f"the job has a secret: set {SECRET_ENV} to it on this node, too")
        return
    if store.check([record]) and read(store, record) is None:  # in this order: another node may write it now
        raise forged(record)
    store.append(AGENTS, f"{agent}\n")
    if store.is_private:
        store.set(SECRET, secret)


def warn_if_open(store: str) -> None:
    """Warns once that strangers can change the store, if the job has no secret."""
    if job_secret() is None and not _warned:
        _warned.append(store)
        log.warning(
            "the store at %s is open: others who can connect to it can end this job, or take part in it; set "
            "%s on all nodes, or give ftrun --job-secret-file (SECURITY.md)",
            *(store, SECRET_ENV),
        )


def peer(line: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, and its effective user."""
    pid, uid, _ = _CREDENTIALS.unpack(
        line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def hand_out(line: socket.socket) -> None:
    """Answers a request for the secret: `ASKS`, followed by the secret if there is one."""
    line.sendall(ASKS + (job_secret() or b""))


def _ask(agent: str) -> bytes | None:
    """The secret that an agent of this user on this host hands out; None if there is no such agent."""
    with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
        line.settimeout(_TIMEOUT)
        line.connect(f"\0{agent}")
        if peer(line)[1] == os.geteuid():  # another user's process cannot be trusted
            line.sendall(ASKS)
            with line.makefile("rb") as answer:  # until the agent closes; a refusal begins with another byte
                return answer.read(_MOST) or None if answer.read(1) == ASKS else None
    return None


def _warn(store: str, key: str) -> None:
    """Logs an error only for the first forged key of a store: further errors would say the same."""
    log.log(
        logging.DEBUG if store in _warned else logging.ERROR,
        "store %s: key %s was not written with this job's secret: ignored. A stranger writes there, or a "
        "node has a different secret (SECURITY.md)",
        *(store, key),
    )
    _warned.append(store)
