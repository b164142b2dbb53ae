"""Which store a job uses, by whom it is hosted: never by a training process, so that any rank may die."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .. import _text
from ..exception import StoreError
from ..protocol.operations import Operations
from . import secret
from .address import EtcdAddress, etcd_login, host_port, is_etcd, master_port, split_host_port, tcp_address
from .base import StoreMixin
from .tcp import TCPStore
from .tcp_server import TCPStoreServer

if TYPE_CHECKING:
    from .etcd import EtcdStore

ANNOUNCED = "FT_WRAPPER_STORE"
_PROBE = timedelta(seconds=5)  # for a store to answer that has the port already


@dataclasses.dataclass(frozen=True)
class StorePlan:
    """How a rank, and its monitor, get at the store.

    Args:
        connect: makes a client; call it in the process that uses it, never across a fork.
        port: where the monitor of the job's first slot has to host a server; None if somebody else does.
        host: the host of that server, as the clients call it.
        description: what to call it in messages; the same for the same store.
        chosen: whether the user chose the address, host or port. Then somebody else may host a store there
            already; at an address that was only derived from MASTER_PORT, that is a stranger's.
        plain: what `announced_plan` makes the same plan of in another process, as JSON values; None if it is
            no store that ``ftrun`` announces.
    """

    connect: Callable[[], StoreMixin]
    port: int | None
    host: str
    description: str
    chosen: bool = False
    plain: Mapping[str, Any] | None = None

    def open_server(self) -> TCPStoreServer:
        """Hosts the store in this process, a rank's monitor; only where there is a `port`.

        Raises:
            StoreError: the port is taken.
        """
        assert self.port is not None
        return TCPStoreServer(self.port, self.host, by_rank=True)

    def is_hosted_by_rank(self, store: Operations) -> bool:
        """Whether a rank of the job does host the store; it closes its port after the last goodbye.

        Args:
            store: a client that `connect` made.

        Raises:
            StoreError: the store cannot be reached.
        """
        return self.port is not None and isinstance(store, TCPStore) and store.is_hosted_by_rank()

    def is_served(self, *, by_rank: bool) -> bool:
        """Whether a store of this job answers already where one was to be hosted, and not a stranger.

        Args:
            by_rank: whether one that another rank's monitor hosts is right: its predecessor's. One that
                no one's monitor hosts is the user's, if the user chose the address.
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
    """What makes a client.

    Args:
        address: of the store: ``HOST:PORT`` of a TCPStore, or ``etcd://…``.
        timeout: how long a store that does not answer is tried again.

    Raises:
        ValueError: it is no address.
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
    """A client. Arguments and errors as for `connector`; and StoreError: the store does not answer."""
    return connector(address, timeout)()


def connect_etcd(address: EtcdAddress, timeout: timedelta, *, begins: bool = False) -> "EtcdStore":
    """A client of a job's keys in etcd, which keeps them alive until it is closed.

    Args:
        address: of the keys. User and password come from where ``etcdctl`` takes them.
        timeout: how long to try to reach etcd, now and later, and to wait in operations that wait.
        begins: whether to begin the job if there is none.

    Raises:
        StoreError: etcd cannot be reached, or refuses, or there is no such job; says why.
        ImportError: a library is missing; says which.
    """
    from .etcd import EtcdStore  # only now: it needs a library that comes with an extra

    given = dataclasses.asdict(address) | etcd_login() | {"ttl": timedelta(seconds=address.ttl)}
    store = EtcdStore(**given, timeout=timeout, begins=begins)
    if begins and store.is_private:
        secret.agree(store)
    return store


def plan_store(
    factory: Callable[..., StoreMixin], kwargs: Mapping[str, Any] | None, timeout: timedelta
) -> StorePlan:
    """Chooses the store.

    In order: what ``ftrun`` announces; what ``store_factory`` and ``store_kwargs`` say; torchrun's own
    store; a server that the monitor of rank 0 hosts on MASTER_PORT + 1.

    Args:
        factory: the wrapper's ``store_factory``.
        kwargs: the wrapper's ``store_kwargs``.
        timeout: how long to keep trying, unless ``kwargs`` has its own timeout.

    Raises:
        ValueError: an environment variable that is needed is missing or malformed.
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
        # torchrun keeps its store when it starts the workers again: each attempt is a job of its own.
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
    """A store's arguments as they may be shown: without secrets."""
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
    """The plan for a TCPStore that somebody else hosts."""
    connect = functools.partial(TCPStore, host, port, **kwargs)
    return StorePlan(connect, None, host, f"TCPStore({host_port(host, port)})")
