"""How a rendezvous is configured: torch's parameters, or a URL; errors name the way out."""

import dataclasses
import difflib
import os
import re
import socket
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from torch.distributed.elastic.rendezvous import RendezvousParameters

from .._text import without_secrets
from ..settings import as_int, as_seconds
from ..store import address as addresses

N = TypeVar("N", int, float)

NAME = "ft"
#: Under torchrun the first one is taken: a handler for a version of etcd that is gone has it.
ETCD_NAMES = ("etcd", "ft-etcd")
ETCD_PORT = 2379

# What torchrun always passes, an option of its own handler that has no meaning here, and what programs pass
# to any backend though it is about a TCPStore.
_IGNORED = frozenset({"timeout", "heartbeat_timeout", "rank", "is_host"})

_SECONDS = ("join_timeout", "last_call_timeout", "close_timeout", "keep_alive_interval", "patience")


@dataclasses.dataclass(frozen=True)
class RendezvousSettings:
    """How a rendezvous is configured.

    Args:
        run_id: the job. Nodes of another one at the same endpoint are refused.
        min_nodes: a round needs that many nodes.
        max_nodes: with that many it begins at once; more are spares.
        join_timeout: seconds within which enough nodes have to join.
        last_call_timeout: seconds to wait for more nodes once there are enough.
        close_timeout: seconds within which closing and leaving have to be done.
        keep_alive_interval: seconds between two heartbeats.
        keep_alive_max_attempt: a node is lost once it has missed that many heartbeats.
        patience: seconds after which a node that has joined writes itself into the record.
        agreed: further options of the agents that must be the same on all nodes, by name.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: one has a wrong value, or two contradict each other; names them and the way out.
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
        """What must be the same on all nodes."""
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
        node_id: its id; a unique one is made when None.
        is_index: whether a scheduler gave it that id: another step, or pod, may have the same.
        address: where the others reach it; found out when empty.
        nproc: ranks that it starts.
        role: what they do.
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
        parameters: ``config`` may hold all arguments of `RendezvousSettings` but the first three and
            ``agreed``, ``read_timeout``, ``node_id``, ``nproc`` and ``role``, as text or as values. On a
            TCPStore also ``is_host`` and ``store_type`` (``tcp``); in etcd, which no node hosts,
            ``etcd_prefix`` (``ft_wrapper``), ``cacert``, ``cert`` and ``key`` (paths), ``ttl`` (seconds for
            which the keys of a job that has died stay).

    Raises:
        ValueError: something is unknown, or has a wrong value; names it and the way out.
    """
    config = _given(parameters)
    for name, hint in unknown_options(parameters.backend, config).items():
        raise ValueError(without_secrets(f"--rdzv-conf {name}={config[name]}: unknown option; {hint}"))
    if str(config.get("store_type", "tcp")).strip().lower() != "tcp":
        raise ValueError(f"--rdzv-conf store_type={config['store_type']}: only tcp is there; leave it out")
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
    # What a backend will ask for: an error comes before anything is done.
    read_timeout(parameters)
    if parameters.backend in ETCD_NAMES:
        etcd_address(parameters)
    else:
        parameters.get_as_bool("is_host")
    return settings, identity


def read_timeout(parameters: RendezvousParameters) -> float:
    """Seconds for which a store, or an etcd, that does not answer is tried again; errors as above."""
    return as_seconds(
        "read_timeout", _number(float, "read_timeout", _given(parameters).get("read_timeout", 60))
    )


def unknown_options(backend: str, names: Iterable[str]) -> dict[str, str]:
    """Which options a rendezvous of ours does not have, each with what may have been meant.

    Args:
        backend: what ``--rdzv-backend`` calls it.
        names: of the options.
    """
    known = _KNOWN + (_ETCD_ONLY if backend in ETCD_NAMES else _TCP_ONLY)
    hints = {}
    for name in names:
        if name not in known and name not in _IGNORED:
            near = difflib.get_close_matches(name, known, 1)
            hints[name] = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    return hints


def etcd_address(parameters: RendezvousParameters) -> addresses.EtcdAddress:
    """Where a job's keys are in etcd: under its own name. Errors as of `read_parameters`."""
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
    addresses.etcd_login()  # an error comes before anything is done
    addresses.parse_endpoints(endpoints, tls="ca" in files or "cert" in files)  # the same
    ttl = _number(int, "ttl", config.get("ttl", addresses.DEFAULT_TTL))
    if ttl < 10:
        raise ValueError(f"--rdzv-conf ttl={ttl}: must be at least 10 seconds")
    return addresses.EtcdAddress(",".join(endpoints), f"{prefix}/{parameters.run_id}", ttl=ttl, **files)


def parameters_from_url(url: str) -> RendezvousParameters:
    """Reads a URL: ``ft://HOST:PORT/RUN_ID?min_nodes=1&max_nodes=2&join_timeout=600``.

    Args:
        url: ``min_workers`` and ``max_workers`` mean the same as ``min_nodes`` and ``max_nodes``; everything
            else after the question mark is an option as in ``--rdzv-conf``, ``local_addr`` too.

    Raises:
        ValueError: it is no such URL; names what is missing.
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
    if "timeout" in config:  # of a URL, which torchrun has not written
        config.setdefault("join_timeout", config.pop("timeout"))
    return RendezvousParameters(parts.scheme, parts.netloc, run_id, sizes[0], sizes[1], local_addr, **config)


def node_id_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """The number that a cluster manager gave this node; None without one.

    SLURM's process number, within a job step only (a batch script's own is always 0), and the completion
    index of a Kubernetes Job. Not tried on such clusters.
    """
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return environment["SLURM_PROCID"]
    return environment.get("JOB_COMPLETION_INDEX")


def new_node_id() -> str:
    """An id that no other node has."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', socket.gethostname())}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def _given(parameters: RendezvousParameters) -> dict[str, Any]:
    return {name: value for name, value in parameters.config.items() if value is not None}


def _number(kind: type[N], name: str, value: object) -> N:
    try:
        return kind(str(value))
    except ValueError:
        what, example = ("a whole number", 3) if kind is int else ("a number of seconds", 30)
        raise ValueError(f"{name}={value}: is not {what}; write e.g. {name}={example}") from None
