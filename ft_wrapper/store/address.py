"""Addresses: of hosts, of a TCPStore, of keys in etcd.

An address of keys in etcd never holds a password. The user and the files for TLS come from the environment
variables of ``etcdctl``: ``ETCDCTL_USER``, ``ETCDCTL_PASSWORD``, ``ETCDCTL_CACERT``, ``ETCDCTL_CERT`` and
``ETCDCTL_KEY``.
"""

import contextlib
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from .._text import without_secrets
from ..state import int_from_env

#: Environment variable: address of the store that ``ftrun`` has for its ranks.
ANNOUNCED = "FT_WRAPPER_STORE"
ETCD_SCHEME = "etcd"
DEFAULT_PREFIX = "ft_wrapper"
#: Seconds for which the keys of a job stay in etcd when no process keeps them alive.
DEFAULT_TTL = 600

_ANY_PORT = 9  # nothing is sent there


# Hosts and ports ---------------------------------------------------------------------------------------


def host_port(host: str, port: int) -> str:
    """Host and port as text: ``HOST:PORT``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, str]:
    """The host, without brackets, and the text after the last colon; each is empty if it is missing."""
    host, _, port = text.rpartition(":")
    return without_brackets(host), port


def without_brackets(host: str) -> str:
    """A host without the brackets of an IPv6 address, as system calls take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Whether a name or address is a loopback one on every machine.

    False for a name to which only a hosts file gives a loopback address: it is the name of one machine, and
    other machines reach that machine by it.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] == "localhost"


def loopback() -> str:
    """The loopback address: IPv4's, unless the host has IPv6 only."""
    return "127.0.0.1" if is_this_host("127.0.0.1") else "::1"


def is_this_host(host: str) -> bool:
    """Whether a name or address leads to this host; False if the name cannot be looked up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError for text that is not a host name
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def why_unknown(host: str) -> str:
    """Why a host's name or address cannot be looked up here; empty if it can."""
    try:
        socket.getaddrinfo(without_brackets(host), None)
    except (OSError, UnicodeError) as error:  # UnicodeError for text that is not a host name
        return f"unknown: {getattr(error, 'strerror', None) or error}"
    return ""


def listening_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The address on which to listen for a server that is published under a name or address of this host.

    This is only the published address, if it can be determined. It is all addresses if the name has several
    here; if the name has a loopback address here, as in Debian's hosts file, while other hosts know a
    different one; or if the name leads to this host through a proxy or a service.

    Args:
        host: name or address under which this host is published.
        port: port to listen on.

    Returns:
        The family (IPv4, unless the host has IPv6 addresses only), and the address for `socket.socket.bind`.

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
    """This host's address on the route to another host; this host's name if there is no route.

    Args:
        towards: the other host, or this one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)  # chooses the route, sends nothing
            own = str(way.getsockname()[0])
    except OSError:
        return socket.gethostname()
    if is_loopback(own) and not is_loopback(towards):
        # This host's own name, which Debian's hosts file maps to 127.0.1.1; other hosts know its address.
        return towards
    return own


def address_of_this_node(host_name: str) -> str:
    """The address by which other nodes reach this node: its name, if the name can be looked up.

    Args:
        host_name: name of a host that all nodes reach.
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
    """Whether an address belongs to an interface of this host."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


# A TCPStore --------------------------------------------------------------------------------------------


def tcp_address(host_name: str | None, port: int | None) -> tuple[str, int]:
    """Completes an address by MASTER_ADDR and MASTER_PORT + 1.

    Args:
        host_name: host of the store; MASTER_ADDR when None.
        port: port of the store; MASTER_PORT + 1 when None.

    Raises:
        ValueError: an argument is malformed, or a variable is missing or malformed; names it and its value,
            and says what to do.
    """
    if host_name is None:
        host_name = without_brackets(os.environ.get("MASTER_ADDR", ""))
        if not host_name:
            raise ValueError(
                "environment variable MASTER_ADDR is not set; start the script with ftrun or torchrun, "
                "which set it, or pass store_kwargs={'host_name': ...}"
            )
    if port is None:
        port = master_port() + 1
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"port={port!r} of the store must lie in 1..65535")
    try:
        host_name.encode("idna")
    except UnicodeError as error:  # each look-up would raise this
        raise ValueError(f"host_name={host_name!r} of the store is not a host name: {error}") from None
    return host_name, port


def master_port() -> int:
    """Reads MASTER_PORT.

    Raises:
        ValueError: the variable is missing, or is not a port.
    """
    launch = "start the script with ftrun or torchrun, which set it"
    port = int_from_env("MASTER_PORT", 1, 65534, launch)
    if port is None:
        raise ValueError(
            f"environment variable MASTER_PORT is not set; {launch}, or pass store_kwargs={{'port': ...}}"
        )
    return port


# What a user calls a job -------------------------------------------------------------------------------


#: What a user calls a job.
ENDPOINT = "HOST:PORT, or etcd://HOST:PORT/PREFIX"


def canonical(endpoint: str) -> str:
    """The canonical form of a user's name for a job: one form for all that are equal without a look-up.

    Raises:
        ValueError: this is not a name of a job.
    """
    with contextlib.suppress(ValueError):
        if is_etcd(endpoint):
            return str(EtcdAddress.parse(endpoint))
        host, port = split_host_port(endpoint)
        if host:
            host, number = tcp_address(host, int(port))
            return host_port("localhost" if is_loopback(host) else host, number)
    raise ValueError(f"{endpoint or 'no endpoint'}: give {ENDPOINT}")


def members_of(endpoint: str) -> list[tuple[str, int]]:
    """Host and port of a job's store, or of each member of etcd, from a user's name for the job."""
    if is_etcd(endpoint):
        return [(one.host, one.port) for one in parse_endpoints(EtcdAddress.parse(endpoint).endpoints)]
    host, port = split_host_port(endpoint)
    return [(host, int(port))]


# etcd --------------------------------------------------------------------------------------------------


def is_etcd(address: str) -> bool:
    """Whether an address is that of keys in etcd, which outlive every node."""
    return address.startswith(f"{ETCD_SCHEME}://")


@dataclasses.dataclass(frozen=True)
class EtcdAddress:
    """The address of keys in etcd: ``etcd://HOST:PORT,HOST:PORT/PREFIX?namespace=…``.

    Args:
        endpoints: the members: ``host:port,host:port``, each with ``https://`` in front if it speaks TLS.
        prefix: prefix of all keys of the job, which share one lease.
        namespace: prefix of this store's keys, after ``prefix``.
        ca: path of the CA certificates that the members' certificates are checked against, PEM; turns on TLS.
        cert: path of the client's certificate, PEM.
        key: path of the certificate's key, PEM.
        ttl: seconds for which the keys stay when no process keeps them alive.
    """

    endpoints: str
    prefix: str
    namespace: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    ttl: int = DEFAULT_TTL

    def within(self, namespace: str) -> "EtcdAddress":
        """The address of the same job's keys in a namespace below this one."""
        return dataclasses.replace(self, namespace=self.namespace + namespace)

    def __str__(self) -> str:
        usual = dataclasses.asdict(EtcdAddress(self.endpoints, self.prefix))
        options = {name: given for name, given in dataclasses.asdict(self).items() if given != usual[name]}
        query = f"?{urlencode(options, safe='/')}" if options else ""
        # Quoted, since https:// contains slashes, and urlsplit allows no bracket after another name.
        members = quote(self.endpoints, safe=":,")
        return f"{ETCD_SCHEME}://{members}/{quote(self.prefix.strip('/'))}{query}"

    @classmethod
    def parse(cls, text: str) -> "EtcdAddress":
        """Reads an address.

        Raises:
            ValueError: the text is not an address.
        """
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query))
        unknown = options.keys() - {"namespace", "ca", "cert", "key", "ttl"}
        prefix = unquote(parts.path.strip("/"))
        ttl = options.pop("ttl", str(DEFAULT_TTL))
        if not is_etcd(text) or not parts.netloc or not prefix or unknown or not ttl.isdecimal():
            raise ValueError(
                f"{without_secrets(text)!r} must look like {ETCD_SCHEME}://HOST:PORT,HOST:PORT/PREFIX?namespace=NAME/"
            )
        return cls(unquote(parts.netloc), prefix, ttl=int(ttl), **options)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The address at which a member of etcd serves clients."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def parse_endpoints(endpoints: str | Sequence[str], tls: bool = False) -> list[Endpoint]:
    """Reads the addresses of etcd's members.

    Args:
        endpoints: ``host:port,host:port``, or a list of ``host:port``; with or without a scheme.
        tls: whether members without a scheme speak TLS.

    Raises:
        ValueError: the addresses are malformed.
    """
    parts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
    found = [_parse_endpoint(part.strip(), tls) for part in parts if part.strip()]
    if not found:
        raise ValueError("endpoints of etcd are empty; pass 'host:port,host:port,…'")
    return found


def _parse_endpoint(text: str, tls: bool) -> Endpoint:
    url = urlsplit(text if "://" in text else f"{'https' if tls else 'http'}://{text}")
    if url.username is not None or url.password is not None:
        raise ValueError(
            "an endpoint of etcd holds a password, or a user; pass both on their own: "
            "ETCDCTL_USER=USER:PASSWORD, or user= and password= of EtcdStore"
        )
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if url.scheme not in ("http", "https") or not host or port is None or url.path.strip("/"):
        shown = without_secrets(text)
        raise ValueError(
            f"endpoint {shown!r} of etcd must be host:port, http://host:port or https://host:port"
        )
    if tls and url.scheme == "http":
        raise ValueError(f"endpoint {text!r} of etcd is plain http, though there are certificates for TLS")
    return Endpoint(host, port, url.scheme == "https")


def etcd_login(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """User and password as arguments of `EtcdStore`; empty without a user.

    Raises:
        ValueError: there is a user without a password.
    """
    user, colon, password = environment.get("ETCDCTL_USER", "").partition(":")
    if not user:
        return {}
    password = password if colon else environment.get("ETCDCTL_PASSWORD", "")
    if not password:
        raise ValueError(
            f"ETCDCTL_USER={user} comes without a password: write it as user:password, or set "
            "ETCDCTL_PASSWORD"
        )
    return {"user": user, "password": password}


def etcd_tls_files(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The paths of certificates and key as arguments of `EtcdAddress`."""
    names = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
    return {name: environment[variable] for name, variable in names.items() if environment.get(variable)}
