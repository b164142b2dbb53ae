"""Where a job's keys are in etcd, as text that agents hand to their ranks. No password is ever in it.

Who logs in, and what TLS needs, is found where ``etcdctl`` finds it: in ``ETCDCTL_USER``,
``ETCDCTL_PASSWORD``, ``ETCDCTL_CACERT``, ``ETCDCTL_CERT`` and ``ETCDCTL_KEY``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

if TYPE_CHECKING:
    from .etcd import EtcdStore

SCHEME = "etcd"
DEFAULT_PREFIX = "ft_wrapper"
DEFAULT_TTL = 600


@dataclasses.dataclass(frozen=True)
class EtcdAddress:
    """A place for keys: ``etcd://HOST:PORT,HOST:PORT/PREFIX?namespace=…``.

    Args:
        endpoints: the members: ``host:port,host:port``, each perhaps with ``https://`` in front.
        prefix: in front of all keys of the job; they go with one lease.
        namespace: in front of those that this address is about, behind the prefix.
        ca: path of the certificates of those who may sign the members', PEM; makes it TLS.
        cert: path of a certificate to show, PEM.
        key: path of its key, PEM.
        ttl: seconds for which the keys stay when no process keeps them alive any more.
    """

    endpoints: str
    prefix: str
    namespace: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    ttl: int = DEFAULT_TTL

    def within(self, namespace: str) -> EtcdAddress:
        """Another place of the same job."""
        return dataclasses.replace(self, namespace=self.namespace + namespace)

    def __str__(self) -> str:
        given = dataclasses.asdict(self)
        options = {name: given[name] for name in ("namespace", "ca", "cert", "key") if given[name]}
        if self.ttl != DEFAULT_TTL:
            options["ttl"] = self.ttl
        query = f"?{urlencode(options, safe='/')}" if options else ""
        # https:// has slashes of its own, and urlsplit takes no bracket behind another name.
        members = quote(self.endpoints, safe=":,")
        return f"{SCHEME}://{members}/{quote(self.prefix.strip('/'))}{query}"

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """Reads it.

        Raises:
            ValueError: it is none.
        """
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query))
        unknown = options.keys() - {"namespace", "ca", "cert", "key", "ttl"}
        prefix = unquote(parts.path.strip("/"))
        ttl = options.pop("ttl", str(DEFAULT_TTL))
        if parts.scheme != SCHEME or not parts.netloc or not prefix or unknown or not ttl.isdecimal():
            raise ValueError(f"{text!r} must look like {SCHEME}://HOST:PORT,HOST:PORT/PREFIX?namespace=NAME/")
        return cls(unquote(parts.netloc), prefix, ttl=int(ttl), **options)

    def connect(self, timeout: timedelta, *, begins: bool = False) -> EtcdStore:
        """A client, which keeps the job's keys alive until it is closed.

        Args:
            timeout: how long to try to reach etcd, then and later, and to wait in operations that wait.
            begins: whether to begin the job if there is none.

        Raises:
            StoreError: etcd cannot be reached, or refuses, or there is no such job; says why.
            ImportError: a library is missing; says which.
        """
        from .etcd import EtcdStore  # only now: it needs a library that comes with an extra

        return EtcdStore(
            self.endpoints,
            self.prefix,
            namespace=self.namespace,
            ca=self.ca,
            cert=self.cert,
            key=self.key,
            timeout=timeout,
            ttl=timedelta(seconds=self.ttl),
            begins=begins,
            **login(),
        )


def login(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """User and password, as arguments of `EtcdStore`, from where ``etcdctl`` has them; none without a user.

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


def tls_files(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The paths of certificates and key, as arguments of `EtcdAddress`, from where ``etcdctl`` has them."""
    names = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
    return {name: environment[variable] for name, variable in names.items() if environment.get(variable)}
