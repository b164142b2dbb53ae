"""Where the members of an etcd cluster are, and the files that TLS takes."""

from __future__ import annotations

import dataclasses
import os
import ssl
import urllib.parse
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where a member answers its clients."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_endpoints(endpoints: str | Sequence[str], tls: bool = False) -> list[Endpoint]:
    """Returns the members that a text or a list names.

    Args:
        endpoints: ``host:port,host:port``, or a list of these; with or without a scheme.
        tls: whether those without a scheme speak TLS.

    Raises:
        ValueError: it cannot be right.
    """
    parts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    found = [_parse_one(part.strip(), tls) for part in parts if part.strip()]
    if not found:
        raise ValueError("endpoints of etcd are empty; pass 'host:port,host:port,…'")
    return found


def _parse_one(text: str, tls: bool) -> Endpoint:
    url = urllib.parse.urlsplit(text if "://" in text else f"{'https' if tls else 'http'}://{text}")
    if url.username is not None or url.password is not None:
        raise ValueError("an endpoint of etcd holds a password; pass user and password on their own")
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if url.scheme not in ("http", "https") or not host or port is None or url.path.strip("/"):
        raise ValueError(
            f"endpoint {text!r} of etcd must be host:port, http://host:port or https://host:port"
        )
    if tls and url.scheme == "http":
        raise ValueError(f"endpoint {text!r} of etcd is plain http, though there are certificates for TLS")
    return Endpoint(host, port, url.scheme == "https")


def check_files(ca: str | None, cert: str | None, key: str | None) -> None:
    """Sees whether the files of certificates can be used.

    Args:
        ca: path of the certificates of those who may sign the members'.
        cert: path of a certificate to show.
        key: path of its key.

    Raises:
        ValueError: they cannot.
    """
    context = ssl.create_default_context()
    for name, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"{name}={path!r} for etcd cannot be read")
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"ca={ca!r}, cert={cert!r}, key={key!r} for etcd do not fit: {error}") from None
