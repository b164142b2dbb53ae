"""Which store a job uses, and which process hosts it: never a training process, so that any rank may die."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .. import _text
from ..exception import StoreError
from ..protocol.operations import Operations
from . import secret
from .address import ANNOUNCED as ANNOUNCED
from .address import EtcdAddress, etcd_login, host_port, is_etcd, master_port, split_host_port, tcp_address
from .base import StoreMixin
from .tcp import TCPStore, TCPStoreServer

if TYPE_CHECKING:
    from .etcd import EtcdStore

_PROBE = timedelta(seconds=5)  # time for an answer from a store that already has the port


@dataclasses.dataclass(frozen=True)
class StorePlan:
    """How a rank and its monitor connect to the store.

    Args:
        connect: makes a client; called in the process that uses the client, never across a fork.
        port: port of the server that the monitor of the job's first slot has to host; None if another process
            hosts the store.
        host: host of that server, by the name or address that clients use.
        description: name of the store for messages; the same for the same store.
        chosen: whether the user chose the host or port. Then another process may already host the job's store
            there. A store at an address that was only derived from MASTER_PORT is another job's.
        plain: arguments of `announced_plan` for the same plan in another process, as JSON values; None unless
            ``ftrun`` announced the store.
    """

    connect: Callable[[], StoreMixin]
    port: int | None
    host: str
    description: str
    chosen: bool = False
    plain: Mapping[str, Any] | None = None

    def open_server(self) -> TCPStoreServer:
        """Hosts the store in this process, a rank's monitor; only if `port` is not None.

        Raises:
            StoreError: the port is taken.
        """
        assert self.port is not None
        return TCPStoreServer(self.port, self.host, by_rank=True)

    def is_hosted_by_rank(self, store: Operations) -> bool:
        """Whether a rank's monitor hosts the store, and closes its port after the last goodbye.

        Args:
            store: a client made by `connect`.

        Raises:
            StoreError: the store cannot be reached.
        """
        return self.port is not None and isinstance(store, TCPStore) and store.is_hosted_by_rank()

    def is_served(self, *, by_rank: bool) -> bool:
        """Whether a store of this job, not of another job, already answers at the planned address.

        Args:
            by_rank: whether a store hosted by a rank's monitor may be this job's: that of the slot's earlier
                process. A store that no monitor hosts is the user's, if the user chose the address.
        """
        if self.port is None or not (by_rank or self.chosen):
            return False
        with (
            contextlib.suppress(StoreError),
            contextlib.closing(TCPStore(self.host, self.port, timeout=_PROBE)) as client,
        ):
            return by_rank if client.is_hosted_by_rank() else self.chosen
        return False


def connector(address: str, timeout: timedelta) -> Callable[[], StoreMixin]:
    """A function that makes a client.

    Args:
        address: address of the store: ``HOST:PORT`` of a TCPStore, or ``etcd://…``.
        timeout: how long an operation is retried while the store does not answer.

    Raises:
        ValueError: the text is not an address.
    """
    if is_etcd(address):
        return functools.partial(connect_etcd, EtcdAddress.parse(address), timeout)
    host, port = split_host_port(address)
    if not host or not port.isdecimal():
        shown = _text.without_secrets(address)
        raise ValueError(f"{shown!r} must be host:port, or etcd://host:port/prefix")
    host, number = tcp_address(host, int(port))
    return functools.partial(TCPStore, host, number, timeout=timeout)


def connect(address: str, timeout: timedelta) -> StoreMixin:
    """Makes a client; see `connector`. Also raises StoreError if the store does not answer."""
    return connector(address, timeout)()


@contextlib.contextmanager
def opened_by_tool(address: str, timeout: timedelta) -> Iterator[StoreMixin]:
    """A temporary client for a tool outside the job; arguments and errors as for `connect`."""
    with contextlib.closing(connect(address, timeout)) as store:
        store.seal = store.seal or secret.found_seal(store)
        yield store


def connect_etcd(address: EtcdAddress, timeout: timedelta, *, begins: bool = False) -> "EtcdStore":
    """Makes a client of a job's keys in etcd, which keeps them alive until it is closed.

    Args:
        address: address of the keys. User and password come from the environment variables of ``etcdctl``.
        timeout: how long to try to reach etcd, now and later, and to wait in operations that wait.
        begins: whether to start the job if there is none.

    Raises:
        StoreError: etcd cannot be reached, or refuses, or there is no such job; gives the reason.
        ImportError: a library is missing; names it.
    """
    from .etcd import EtcdStore  # imported late, since it needs a library that only an extra installs

    given = dataclasses.asdict(address) | etcd_login() | {"ttl": timedelta(seconds=address.ttl)}
    store = EtcdStore(**given, timeout=timeout, begins=begins)
    if begins and store.is_private:
        secret.agree(store)
    return store


def plan_store(
    factory: Callable[..., StoreMixin], kwargs: Mapping[str, Any] | None, timeout: timedelta
) -> StorePlan:
    """Chooses the store.

    In order: the store that ``ftrun`` announces; that of ``store_factory`` and ``store_kwargs``; torchrun's
    store; a server that the monitor of rank 0 hosts on MASTER_PORT + 1.

    Args:
        factory: the wrapper's ``store_factory``.
        kwargs: the wrapper's ``store_kwargs``.
        timeout: how long to keep trying, unless ``kwargs`` has its own timeout.

    Raises:
        ValueError: a required environment variable is missing or malformed.
    """
    announced = os.environ.get(ANNOUNCED)
    if announced:
        return announced_plan(announced, timeout.total_seconds())
    given = dict(kwargs or {})
    while isinstance(factory, functools.partial) and not factory.args:
        given, factory = factory.keywords | given, factory.func
    if factory is not TCPStore:
        name = getattr(factory, "__name__", type(factory).__name__)
        described = f"{name}({without_password(given)})"
        return StorePlan(functools.partial(factory, **given), None, "", described)
    if not given and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it restarts the workers, and each attempt is a separate job.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        host, port = tcp_address(None, master_port())
        if os.environ.get("RANK") == "0":
            secret.warn_if_open(host_port(host, port))
        return _tcp(host, port, timeout=timeout, namespace=f"ft_wrapper/{run_id}/{attempt}/")
    host_name, chosen_port = given.pop("host_name", None), given.pop("port", None)
    host, port = tcp_address(host_name, chosen_port)
    plan = _tcp(host, port, **{"timeout": timeout} | given)
    is_chosen = host_name is not None or chosen_port is not None
    return dataclasses.replace(plan, port=port, chosen=is_chosen)


def without_password(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A store's arguments without secrets, for messages."""
    texts = {name: _text.without_secrets(value) for name, value in kwargs.items() if isinstance(value, str)}
    return {**kwargs, **texts, **({"password": "…"} if "password" in kwargs else {})}


def announced_plan(address: str, timeout: float) -> StorePlan:
    """The plan for a store that ``ftrun`` announces.

    Args:
        address: ``host:port``, or ``etcd://…``.
        timeout: seconds for which to keep trying.

    Raises:
        ValueError: the address is malformed.
    """
    try:
        connect = connector(address, timedelta(seconds=timeout))
    except ValueError as error:
        raise ValueError(
            f"environment variable {ANNOUNCED}: {error}; ftrun sets it, remove it otherwise"
        ) from None
    described = _text.without_secrets(address if is_etcd(address) else f"TCPStore({address})")
    return StorePlan(connect, None, "", described, plain={"address": address, "timeout": timeout})


def _tcp(host: str, port: int, **kwargs: Any) -> StorePlan:
    """The plan for a TCPStore that another process hosts."""
    connect = functools.partial(TCPStore, host, port, **kwargs)
    return StorePlan(connect, None, host, f"TCPStore({host_port(host, port)})")
