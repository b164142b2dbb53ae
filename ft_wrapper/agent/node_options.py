"""What the command line says about the nodes of a job: how many there are, and how they find each other."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint

from ..rendezvous.backends import DEFAULT_PORT
from ..rendezvous.settings import ETCD_NAMES, NAME, read_parameters, unknown_options
from ..store.address import without_brackets
from .command_line import DEFAULT_MASTER_ADDR, DEFAULT_MASTER_PORT, DEFAULT_RDZV_ID, Parser
from .policy import Policy

OURS = (NAME, *ETCD_NAMES)
STATIC = "static"
"""The default of torchrun's ``--rdzv-backend``: here another name of ours."""


@dataclasses.dataclass(frozen=True)
class Meeting:
    """How the nodes of a job find each other.

    Args:
        parameters: of the rendezvous; torch's.
        monitor_interval: seconds between two looks whether nodes wait, with handlers that do not notify.
        exit_barrier_timeout: seconds for which a node whose ranks are done waits for the others.
    """

    parameters: RendezvousParameters
    monitor_interval: float
    exit_barrier_timeout: float


def read_nodes(parser: Parser, args: argparse.Namespace, nproc: int, policy: Policy) -> dict[str, Any]:
    """All that is about nodes, as fields of `Options`."""
    least, most = parser.nodes(args.nnodes)
    spares = _spare_nodes(parser, args, policy)
    if args.standalone:
        _check_standalone(parser, args, least, spares)
        most = 1
    active = _active_world_size(parser, args, most, nproc, spares)
    monitor_interval = parser.seconds("--monitor-interval", args.monitor_interval)
    if monitor_interval == 0:
        parser.error("--monitor-interval 0: must be more than 0")
    barrier = parser.seconds("--exit-barrier-timeout", args.exit_barrier_timeout)
    is_alone = args.standalone or (most + spares == 1 and not args.rdzv_endpoint)
    if not args.standalone:
        _check_backend(parser, args)
        _check_node_rank(parser, args, most + spares, is_alone)
    master = _master(parser, args)
    if is_alone:
        _warn_of_what_is_superfluous(parser, args)
        # As torchrun, which has a free one with --standalone; a script may name it: init_method="tcp://…".
        port = 0 if args.standalone or not args.master_port else int(args.master_port)
        return {"active_world_size": active, "address": without_brackets(args.master_addr), "port": port}
    endpoint = _endpoint(parser, args, master, spares)
    if args.rdzv_backend in ETCD_NAMES and args.rdzv_id == DEFAULT_RDZV_ID:
        parser.error(f"--rdzv-backend {args.rdzv_backend} needs --rdzv-id ID: it tells the jobs there apart")
    parameters = _parameters(parser, args, endpoint, least, most + spares, nproc)
    meeting = Meeting(parameters, monitor_interval, barrier)
    return {"active_world_size": active, "spare_nodes": spares, "meeting": meeting}


def _spare_nodes(parser: Parser, args: argparse.Namespace, policy: Policy) -> int:
    spares = parser.count("--spare-nodes", args.spare_nodes)
    if spares == 0:
        return 0
    if args.active_world_size is not None:
        parser.error(
            f"--spare-nodes {spares} and --active-world-size {args.active_world_size} contradict each other: "
            "both say how many ranks are active; drop one of them"
        )
    if policy is Policy.GROUP:
        parser.error(
            f"--spare-nodes {spares} and --restart-policy group contradict each other: all ranks are "
            "restarted, spare or not; drop one of them (nodes beyond the most of --nnodes wait without it)"
        )
    if args.rdzv_backend not in (*OURS, STATIC):
        parser.error(
            f"--spare-nodes {spares} and --rdzv-backend {args.rdzv_backend} contradict each other: there, "
            f"each lost node ends all ranks; use --rdzv-backend {NAME}"
        )
    return spares


def _active_world_size(
    parser: Parser, args: argparse.Namespace, most: int, nproc: int, spares: int
) -> int | None:
    if spares:
        return most * nproc
    if args.active_world_size is None:
        return None
    active = parser.count("--active-world-size", args.active_world_size)
    if active < 1:
        parser.error(f"--active-world-size {active}: at least one rank has to call the function")
    if active > most * nproc:
        parser.error(
            f"--active-world-size {active}: is more than the {most * nproc} ranks that there are with "
            f"--nnodes {args.nnodes} and --nproc-per-node {nproc}; start more of them, or lower it"
        )
    return active


def _check_standalone(parser: Parser, args: argparse.Namespace, least: int, spares: int) -> None:
    """Complains of what a node that is alone cannot have; torchrun waits in vain for other nodes then."""
    for option, value, says_otherwise in (
        ("--nnodes", args.nnodes, least > 1),
        ("--spare-nodes", args.spare_nodes, spares > 0),
    ):
        if says_otherwise:
            parser.error(
                f"--standalone and {option} {value} contradict each other: this node is alone, or it is "
                "not; drop one of them"
            )


def _check_backend(parser: Parser, args: argparse.Namespace) -> None:
    known = {STATIC, *OURS, *rendezvous_handler_registry._registry}
    if args.rdzv_backend not in known:
        parser.error(f"--rdzv-backend {args.rdzv_backend}: there is no such; use {', '.join(sorted(known))}")


def _check_node_rank(parser: Parser, args: argparse.Namespace, most: int, is_alone: bool) -> None:
    if not args.node_rank:
        return
    rank = parser.count("--node-rank", args.node_rank)
    if args.rdzv_backend not in (STATIC, *OURS):
        return  # a platform sets it in any case; torchrun does not use it then, either
    # torchrun looks for the others of this one node, in vain, if there is a port to look at.
    if rank >= most and (args.master_port or not is_alone):
        parser.error(
            f"--node-rank {rank}: with {most} {'nodes' if most > 1 else 'node'} the last one is {most - 1}; "
            "give the number of them with --nnodes; one that is to wait until a place is free has --node-id "
            "ID instead"
        )
    if args.node_id not in (None, args.node_rank):
        parser.error(
            f"--node-rank {rank} and --node-id {args.node_id} contradict each other: nodes are ranked by "
            "their ids; drop one of them"
        )


def _master(parser: Parser, args: argparse.Namespace) -> str:
    """The endpoint, as torchrun's static rendezvous has it; empty if there is none."""
    port = args.master_port or str(DEFAULT_MASTER_PORT)
    parser.port("--master-port", port)
    if not args.master_addr and not args.master_port:
        return ""
    return f"{args.master_addr or DEFAULT_MASTER_ADDR}:{int(port)}"


def _warn_of_what_is_superfluous(parser: Parser, args: argparse.Namespace) -> None:
    """Says which options have no effect on a node that meets no other."""
    options = [
        ("--rdzv-backend", args.rdzv_backend, (NAME, STATIC)),
        ("--rdzv-conf", args.rdzv_conf, ("",)),
        ("--node-rank", args.node_rank, ("", "0")),
        ("--node-id", args.node_id, (None,)),
    ]
    if args.standalone:
        options += [
            ("--nnodes", args.nnodes, ("1", "1:1")),
            ("--rdzv-endpoint", args.rdzv_endpoint, ("",)),
            ("--rdzv-id", args.rdzv_id, (DEFAULT_RDZV_ID,)),
            ("--master-port", args.master_port, ("",)),
        ]
    given = ", ".join(f"{option} {value}" for option, value, defaults in options if value not in defaults)
    if given and args.standalone:
        parser.warn(f"{given}: no effect beside --standalone, by which this node is alone")
    elif given:
        parser.warn(f"{given}: no effect on one node without --rdzv-endpoint, for it meets no other")


def _endpoint(parser: Parser, args: argparse.Namespace, master: str, spares: int) -> str:
    """Where the nodes meet; where torchrun's do if the user does not say."""
    if args.rdzv_endpoint:
        return str(args.rdzv_endpoint)
    what = f"--nnodes {args.nnodes}" + (f" with --spare-nodes {spares}" if spares else "")
    if args.rdzv_backend in ETCD_NAMES:
        parser.error(f"{what} needs --rdzv-endpoint HOST:PORT: etcd's members, the same on all")
    if master:
        return master
    if args.rdzv_backend in (STATIC, *OURS):
        endpoint = where = f"{DEFAULT_MASTER_ADDR}:{DEFAULT_MASTER_PORT}"
    else:
        endpoint, where = "", "localhost"  # at which port is up to the handler
    parser.warn(
        f"{what}: without --rdzv-endpoint or --master-addr the nodes meet at {where}, so all of them have to "
        "be on this host"
    )
    return endpoint


def _parameters(
    parser: Parser, args: argparse.Namespace, endpoint: str, least: int, most: int, nproc: int
) -> RendezvousParameters:
    backend = NAME if args.rdzv_backend == STATIC else args.rdzv_backend
    config = _config(parser, args, backend, nproc)
    try:
        if backend not in ETCD_NAMES:
            parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        parameters = RendezvousParameters(
            backend, endpoint, args.rdzv_id, least, most, args.local_addr, **config
        )
        if backend in OURS:
            read_parameters(parameters)
    except ValueError as error:
        parser.error(f"--rdzv-endpoint {endpoint}: {error}")
    return parameters


def _config(parser: Parser, args: argparse.Namespace, backend: str, nproc: int) -> dict[str, str]:
    try:
        config: dict[str, str] = _parse_rendezvous_config(args.rdzv_conf)
    except ValueError:
        parser.error(f"--rdzv-conf {args.rdzv_conf}: use NAME=VALUE with commas between them")
    if backend not in OURS:
        if args.node_id is not None:
            parser.warn(f"--node-id {args.node_id}: no effect: --rdzv-backend {backend} knows no ids")
        return config
    for name, hint in unknown_options(backend, config).items():
        parser.warn(f"--rdzv-conf {name}={config.pop(name)}: no effect: there is no such option; {hint}")
    if config.get("store_type", "tcp").lower() != "tcp":
        parser.warn(f"--rdzv-conf store_type={config.pop('store_type')}: no effect: the store is tcp here")
    for name, option, value in (
        ("node_id", "--node-id" if args.node_id else "--node-rank", args.node_id or args.node_rank or None),
        ("nproc", "--nproc-per-node", str(nproc)),
        ("role", "--role", args.role),
    ):
        if config.get(name, value) != value and value is not None:
            parser.warn(f"--rdzv-conf {name}={config[name]}: no effect: {option} says {value}")
    config.update(nproc=str(nproc), role=args.role)
    if args.node_id is not None:
        config["node_id"] = args.node_id
    elif args.node_rank:
        config["node_id"] = str(int(args.node_rank))
    if args.node_rank and backend == NAME and (args.rdzv_backend == STATIC or not args.rdzv_endpoint):
        # As in torch's static rendezvous, whatever the name of the endpoint leads to: a proxy, a service.
        config.setdefault("is_host", str(int(args.node_rank) == 0).lower())
    return config
