"""How this host is reached."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_ANY_PORT = 9  # nothing is sent there


def is_loopback(host: str) -> bool:
    """Whether a host, as it is called, is this machine for whoever calls it that.

    Args:
        host: name or address. A name that a hosts file gives a loopback address is the name of one machine,
            and other machines reach it by that.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] == "localhost"


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
