"""How this host is reached, and where it listens for that."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any

_ANY_PORT = 9  # nothing is sent there


def is_loopback(host: str) -> bool:
    """Whether a host, as it is called, is this machine for anyone who calls it that.

    Args:
        host: name or address. A name that a hosts file gives a loopback address is the name of one machine,
            and other machines reach it by that.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] == "localhost"


def loopback() -> str:
    """The address by which this host alone reaches itself: IPv4's, unless it has only that of IPv6."""
    return "127.0.0.1" if is_this_host("127.0.0.1") else "::1"


def host_port(host: str, port: int) -> str:
    """Host and port as text: ``HOST:PORT``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, str]:
    """Host, without brackets, and what stands for the port; empty where there is none."""
    host, _, port = text.rpartition(":")
    return without_brackets(host), port


def without_brackets(host: str) -> str:
    """An IPv6 address as system calls want it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_this_host(host: str) -> bool:
    """Whether a name that can be looked up, or an address, leads to this host."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def listening_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Where a server listens that is published as being on this host.

    On the address that is published and on no other one, wherever that can be found out. On all of them if
    the name has several here; if it has a loopback address here, as Debian's hosts file gives it, and other
    hosts know another one; or if it leads to this host by way of a proxy or a service.

    Args:
        host: name or address under which this host is published.
        port: to listen on.

    Returns:
        IPv4, unless the host has IPv6 addresses only; and the address, as `socket.socket.bind` takes it.

    Raises:
        OSError: the host is unknown.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {info[0] for info in found}
    family = socket.AF_INET if socket.AF_INET in families else found[0][0]
    addresses = {info[4] for info in found if info[0] == family}
    if len(addresses) == 1:
        (address,) = addresses
        is_hidden = is_loopback(str(address[0])) and not is_loopback(host)
        if not is_hidden and _is_own(family, address):
            return family, address
    return family, ("", port)


def own_address(towards: str) -> str:
    """This host's address, as seen by those who reach another host; its name, if there is no way there.

    Args:
        towards: that other host. It may be this one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)  # chooses the route, sends nothing
            own = str(way.getsockname()[0])
    except OSError:
        return socket.gethostname()
    if is_loopback(own) and not is_loopback(towards):
        # This host's own name, to which Debian's hosts file gives 127.0.1.1. The others know better.
        return towards
    return own


def address_of_this_node(host_name: str) -> str:
    """How other nodes reach this one, by name if it has one that can be looked up.

    Args:
        host_name: of a host that all nodes reach.
    """
    if is_loopback(host_name):
        return "localhost"  # then all nodes are on this machine
    name = socket.getfqdn()
    if not is_loopback(name):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
    return own_address(host_name)


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    """Whether an address is one of this host's interfaces'."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
