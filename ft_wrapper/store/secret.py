"""The job's secret, by which its processes know each other's texts in the store; see `protocol.seal`.

The agent makes one, or is given it, and hands it to processes of its user through its socket. It is never in
the environment of a rank, whose children would inherit it.
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

#: Where the agent hears hello: the name of an abstract Unix socket, without the NUL in front.
AGENT_ENV = "FT_WRAPPER_AGENT"
SECRET_ENV = "FT_WRAPPER_SECRET"
#: What a process says to an agent's socket in place of hello, to be given the secret.
ASKS = b"?"
#: Log: the job's agents, each with its socket. It is not sealed: who asks looks who answers.
AGENTS = "ft_wrapper/agents"
#: Register: the job's secret, where only its own can read the store.
SECRET = "ft_wrapper/secret"
_LEAST, _MOST = 16, 4096  # bytes of a secret that a user gives
_ASKED, _TIMEOUT = 64, 10.0  # agents, at most; seconds: each answers at once
_CREDENTIALS = struct.Struct("3i")
_known: list[bytes | None] = []  # empty until it is known
_warned: list[str] = []


def use(secret: bytes | None) -> None:
    """From now on this process's clients of stores have this secret; None: the job is open."""
    _known[:] = [secret]


def job_secret() -> bytes | None:
    """The secret of the job that this process belongs to; None if that is open.

    The agent is asked once. Where there is none, ``FT_WRAPPER_SECRET`` is read, and removed.
    """
    if not _known:
        agent = os.environ.get(AGENT_ENV)
        use(_ask(agent) if agent else given())
    return _known[0]


def agree(store: StoreMixin) -> None:
    """Takes the secret that stands in a store which only the job's own can read, or makes it."""
    if job_secret() is None:
        use(store.compare_set(SECRET, "", os.urandom(32).hex()))


def given() -> bytes | None:
    """The secret in ``FT_WRAPPER_SECRET``, which is removed; None if it is not set.

    Raises:
        ValueError: it is too short, or too long.
    """
    text = os.environ.pop(SECRET_ENV, "")
    return checked(SECRET_ENV, text.encode()) if text else None


def checked(where: str, secret: bytes) -> bytes:
    """A secret that a user has given, without white space around it.

    Raises:
        ValueError: it is too short, or too long; names where it stands.
    """
    if not _LEAST <= len(secret.strip()) <= _MOST:
        raise ValueError(
            f"{where}: a secret has {_LEAST} to {_MOST} bytes, and this one {len(secret.strip())}; give each "
            "job its own, as from 'openssl rand -hex 32'"
        )
    return secret.strip()


def seal_of(store: str) -> Seal | None:
    """What a client of the job's store seals with; None if the job is open.

    Args:
        store: which store it is, the same for all its clients.
    """
    secret = job_secret()
    return None if secret is None else Seal(secret, store, functools.partial(_warn, store))


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
    if not store.check([AGENTS]):
        return None
    agents = store.get(AGENTS).decode(errors="replace").split()[-_ASKED:]
    kept = store.get(SECRET) if store.check([SECRET]) else None
    secret = kept or next(filter(None, map(_ask, reversed(agents))), None)
    return Seal(secret, store.place, functools.partial(_warn, store.place))


def announce(store: StoreMixin, agent: str, record: str) -> None:
    """Says in the store that the job has a secret, which an agent hands out; nothing if it has none.

    Args:
        store: one of the job's.
        agent: its socket.
        record: a key that the job has written if it is on.

    Raises:
        StoreError: this agent has not the job's secret.
    """
    secret = job_secret()
    if secret is None:
        if store.check([AGENTS]):
            raise StoreError(f"the job has a secret: set {SECRET_ENV} to it on this node, too")
        return
    if read(store, record) is None and store.check([record]):
        raise forged(record)
    store.append(AGENTS, f"{agent}\n")
    if store.is_private:
        store.set(SECRET, secret)


def warn_if_open(store: str) -> None:
    """Says, once, what others can do where the job has no secret."""
    if job_secret() is None and not _warned:
        _warned.append(store)
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


def hand_out(line: socket.socket) -> None:
    """Sends the secret to who has asked for it; nothing behind `ASKS` if there is none."""
    line.sendall(ASKS + (job_secret() or b""))


def _ask(agent: str) -> bytes | None:
    """The secret that an agent of this user on this host hands out; None if there is no such agent."""
    with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
        line.settimeout(_TIMEOUT)
        line.connect(f"\0{agent}")
        if peer(line)[1] == os.geteuid():  # else somebody's who may have any reason to answer
            line.sendall(ASKS)
            with line.makefile("rb") as answer:  # to the end of the line: a refusal begins otherwise
                return answer.read(_MOST) or None if answer.read(1) == ASKS else None
    return None


def _warn(store: str, key: str) -> None:
    """Names the first key; with the others, and in each client, it would say the same."""
    log.log(
        logging.DEBUG if store in _warned else logging.ERROR,
        "store %s: key %s was not written with this job's secret: ignored. Somebody else writes there, or a "
        "node has another secret (SECURITY.md)",
        *(store, key),
    )
    _warned.append(store)
