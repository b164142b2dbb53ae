"""A store's address as text: ``HOST:PORT`` of a TCPStore, or ``etcd://…``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

from .._addresses import split_host_port
from .etcd_address import SCHEME, EtcdAddress
from .mixin import StoreMixin
from .tcp import TCPStore, tcp_address


def is_etcd(address: str) -> bool:
    """Whether the keys are in etcd, where no node has to live for them."""
    return address.startswith(f"{SCHEME}://")


def connector(address: str, timeout: timedelta) -> Callable[[], StoreMixin]:
    """What makes a client.

    Args:
        address: of the store.
        timeout: how long a store that does not answer is tried again.

    Raises:
        ValueError: it is no address.
    """
    if is_etcd(address):
        return partial(EtcdAddress.parse(address).connect, timeout)
    host, port = split_host_port(address)
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} must be host:port, or {SCHEME}://host:port/prefix")
    host, number = tcp_address(host, int(port))
    return partial(TCPStore, host, number, timeout=timeout)


def connect(address: str, timeout: timedelta) -> StoreMixin:
    """A client. Arguments and errors as for `connector`; and StoreError: it does not answer."""
    return connector(address, timeout)()
