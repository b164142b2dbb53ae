"""How a rendezvous is configured: torch's parameters, or a URL. Errors say what to do."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from torch.distributed.elastic.rendezvous import RendezvousParameters

from .._text import without_secrets
from ..settings import as_int, as_seconds
from ..store import address as addresses
from .node_ids import node_id_from_environment

N = TypeVar("N", int, float)

NAME = "ft"
#: The names for etcd. Under torchrun the first name belongs to torch's handler for an old version of etcd.
ETCD_NAMES = ("etcd", "ft-etcd")
ETCD_PORT = 2379

# Options without meaning here: torchrun always passes some, and programs pass those of a TCPStore to any
# backend.
_IGNORED = frozenset({"timeout", "heartbeat_timeout", "rank", "is_host"})

_SECONDS = ("join_timeout", "last_call_timeout", "close_timeout", "keep_alive_interval", "patience")


@dataclasses.dataclass(frozen=True)
class RendezvousSettings:
    """How a rendezvous is configured.

    Args:
        run_id: name of the job. Nodes of another job at the same endpoint are refused.
        min_nodes: fewest nodes of a round.
        max_nodes: most nodes of a round, which begins at once with them; further nodes are spares.
        join_timeout: seconds within which enough nodes have to join.
        last_call_timeout: seconds to wait for more nodes once there are enough.
        close_timeout: seconds within which the rendezvous has to be closed or left.
        keep_alive_interval: seconds between two heartbeats.
        keep_alive_max_attempt: number of missed heartbeats after which a node is lost.
        patience: seconds after which a node that has joined writes itself into the record.
        agreed: further options of the agents that must be the same on all nodes, by name.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value, or two contradict each other; names them and says what to
            do.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    close_timeout: float = 30.0
    keep_alive_interval: float = 5.0
    keep_alive_max_attempt: int = 3
    patience: float = 1.0
    agreed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.run_id or not isinstance(self.run_id, str):
            raise ValueError(f"run_id={self.run_id!r} must not be empty; name the job with --rdzv-id")
        for name in ("min_nodes", "max_nodes", "keep_alive_max_attempt"):
            as_int(name, getattr(self, name), at_least=1)
        if self.min_nodes > self.max_nodes:
            raise ValueError(
                f"min_nodes={self.min_nodes} is more than max_nodes={self.max_nodes}; "
                "use --nnodes MIN:MAX with the smaller number first"
            )
        for name in _SECONDS:
            as_seconds(name, getattr(self, name), from_zero=name == "last_call_timeout")

    @property
    def keep_alive_timeout(self) -> float:
        """Seconds without a heartbeat after which a node is lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    def options(self) -> dict[str, str]:
        """Options that must be the same on all nodes."""
        return {
            "run_id": self.run_id,
            "nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "keep_alive_interval": f"{self.keep_alive_interval:g}",
            "keep_alive_max_attempt": str(self.keep_alive_max_attempt),
            **self.agreed,
        }


@dataclasses.dataclass(frozen=True)
class Identity:
    """This node, as far as it is configured.

    Args:
        node_id: id of the node; a unique one is made when None.
        is_index: whether the id is from a scheduler, so that another job step or pod may have the same id.
        address: address at which other nodes reach this node; found out when empty.
        nproc: number of ranks that the node starts.
        role: name of what these ranks do.
    """

    node_id: str | None = None
    address: str = ""
    nproc: int = 1
    role: str = "default"
    is_index: bool = False

    def __post_init__(self) -> None:
        if self.node_id is not None and not re.fullmatch(r"[\w.@+=-]+", self.node_id):
            raise ValueError(
                f"node_id={self.node_id!r} must consist of letters, digits and . @ + = - _; pass another one"
            )
        as_int("nproc", self.nproc, at_least=1)


_KNOWN = (*_SECONDS, "keep_alive_max_attempt", "read_timeout", "node_id", "nproc", "role")
_TCP_ONLY = ("is_host", "store_type")
_ETCD_ONLY = ("etcd_prefix", "cacert", "cert", "key", "ttl")


def read_parameters(parameters: RendezvousParameters) -> tuple[RendezvousSettings, Identity]:
    """Reads torch's parameters, as torchrun makes them of ``--rdzv-*`` and ``--nnodes``.

    Args:
        parameters: torch's parameters. ``config`` may hold all arguments of `RendezvousSettings` except the
            first three and ``agreed``; and ``read_timeout``, ``node_id``, ``nproc`` and ``role``; as text or
            as values. On a TCPStore also ``is_host`` and ``store_type`` (``tcp``); on etcd ``etcd_prefix``
            (``ft_wrapper``), ``cacert``, ``cert`` and ``key`` (paths), and ``ttl`` (seconds for which the
            keys of a dead job stay).

    Raises:
        ValueError: a parameter is unknown, or has a wrong value; names it and says what to do.
    """
    config = _given(parameters)
    for name, hint in unknown_options(parameters.backend, config).items():
        raise ValueError(without_secrets(f"--rdzv-conf {name}={config[name]}: unknown option; {hint}"))
    if str(config.get("store_type", "tcp")).strip().lower() != "tcp":
        raise ValueError(f"--rdzv-conf store_type={config['store_type']}: must be tcp; leave it out")
    kinds = {**dict.fromkeys(_SECONDS, float), "keep_alive_max_attempt": int}
    given: Any = {name: _number(kind, name, config[name]) for name, kind in kinds.items() if name in config}
    settings = RendezvousSettings(parameters.run_id, parameters.min_nodes, parameters.max_nodes, **given)
    identity = Identity(
        node_id=str(config["node_id"]) if "node_id" in config else node_id_from_environment(),
        is_index="node_id" not in config,
        address=parameters.local_addr or "",
        nproc=_number(int, "nproc", config.get("nproc", 1)),
        role=str(config.get("role", "default")),
    )
    # What a backend will read: errors are raised before anything is done.
    read_timeout(parameters)
    if parameters.backend in ETCD_NAMES:
        etcd_address(parameters)
    else:
        parameters.get_as_bool("is_host")
    return settings, identity


def read_timeout(parameters: RendezvousParameters) -> float:
    """Seconds for which an operation is retried while the store does not answer.

    Raises:
        ValueError: the value is wrong.
    """
    return as_seconds(
        "read_timeout", _number(float, "read_timeout", _given(parameters).get("read_timeout", 60))
    )


def unknown_options(backend: str, names: Iterable[str]) -> dict[str, str]:
    """The options that our rendezvous does not have, each with a hint at what may have been meant.

    Args:
        backend: the backend's name for ``--rdzv-backend``.
        names: names of the options.
    """
    known = _KNOWN + (_ETCD_ONLY if backend in ETCD_NAMES else _TCP_ONLY)
    hints = {}
    for name in names:
        if name not in known and name not in _IGNORED:
            near = difflib.get_close_matches(name, known, 1)
            hints[name] = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    return hints


def etcd_address(parameters: RendezvousParameters) -> addresses.EtcdAddress:
    """The address of a job's keys in etcd, under the job's name. Raises the errors of `read_parameters`."""
    config = _given(parameters)
    members = [member.strip() for member in parameters.endpoint.split(",") if member.strip()]
    if not members:
        raise ValueError("--rdzv-endpoint is empty; name etcd's members: HOST:PORT,HOST:PORT")
    endpoints = [member if re.search(r":\d+$", member) else f"{member}:{ETCD_PORT}" for member in members]
    prefix = str(config.get("etcd_prefix", addresses.DEFAULT_PREFIX)).strip("/")
    if not prefix:
        raise ValueError("--rdzv-conf etcd_prefix is empty; leave it out, or name what all keys begin with")
    files = addresses.etcd_tls_files()
    for option, name in (("cacert", "ca"), ("cert", "cert"), ("key", "key")):
        if option in config:
            files[name] = str(config[option])
    # Both only for their errors, before anything is done.
    addresses.etcd_login()
    addresses.parse_endpoints(endpoints, tls="ca" in files or "cert" in files)
    ttl = _number(int, "ttl", config.get("ttl", addresses.DEFAULT_TTL))
    if ttl < 10:
        raise ValueError(f"--rdzv-conf ttl={ttl}: must be at least 10 seconds")
    return addresses.EtcdAddress(",".join(endpoints), f"{prefix}/{parameters.run_id}", ttl=ttl, **files)


def parameters_from_url(url: str) -> RendezvousParameters:
    """Reads a URL: ``ft://HOST:PORT/RUN_ID?min_nodes=1&max_nodes=2&join_timeout=600``.

    Args:
        url: the URL. ``min_workers`` and ``max_workers`` mean the same as ``min_nodes`` and ``max_nodes``;
            everything else after the question mark is an option of ``--rdzv-conf``, or ``local_addr``.

    Raises:
        ValueError: the URL is malformed; names what is missing.
    """
    parts, shown = urlsplit(url), without_secrets(url)
    run_id = unquote(parts.path.strip("/"))
    if not parts.scheme or not parts.netloc or not run_id:
        raise ValueError(
            f"rendezvous URL {shown!r}: must look like {NAME}://HOST:PORT/RUN_ID?min_nodes=1&max_nodes=2"
        )
    config: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        name = {"min_workers": "min_nodes", "max_workers": "max_nodes"}.get(name, name)
        if name in config:
            raise ValueError(f"rendezvous URL {shown!r}: {name} is given twice; leave one out")
        config[name] = value
    sizes = []
    for name in ("min_nodes", "max_nodes"):
        if name not in config:
            raise ValueError(f"rendezvous URL {shown!r}: {name} is missing; append ?min_nodes=1&max_nodes=2")
        sizes.append(_number(int, name, config.pop(name)))
    local_addr = config.pop("local_addr", None)
    if "timeout" in config:  # a user wrote this URL, while torchrun's own timeout is ignored
        config.setdefault("join_timeout", config.pop("timeout"))
    return RendezvousParameters(parts.scheme, parts.netloc, run_id, sizes[0], sizes[1], local_addr, **config)


def _given(parameters: RendezvousParameters) -> dict[str, Any]:
    return {name: value for name, value in parameters.config.items() if value is not None}


def _number(kind: type[N], name: str, value: object) -> N:
    try:
        return kind(str(value))
    except ValueError:
        what, example = ("a whole number", 3) if kind is int else ("a number of seconds", 30)
        raise ValueError(f"{name}={value}: is not {what}; write e.g. {name}={example}") from None
