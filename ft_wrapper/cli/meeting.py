"""How the nodes of a job find each other, by its options."""

import copy
import dataclasses
import logging
import os

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..agent.ft_nodes import FtNodes, OneNode
from ..agent.nodes import Nodes
from ..agent.options import Options
from ..agent.policy import Policy
from ..agent.torch_api.classic_nodes import ClassicNodes
from ..rendezvous.backends import DEFAULT_PORT, make_backend
from ..rendezvous.settings import ETCD_NAMES, NAME, etcd_address, read_parameters, read_timeout
from ..store.address import address_of_this_node, canonical, host_port, is_this_host, loopback
from .local import LocalJob

log = logging.getLogger("ft_wrapper.run")


def meet(options: Options) -> Nodes:
    """This node's part among the others. Does not connect yet.

    Args:
        options: the job.
    """
    parameters = options.rendezvous
    if parameters is None:
        at, check = (_address_alone(options.address), options.port), options.node_check
        return OneNode(options.nproc_per_node, *at, role=options.role, check=check)
    if parameters.backend in (NAME, *ETCD_NAMES):
        return _ft(options, parameters)
    return _classic(options, parameters)


def local_job(options: Options, nodes: Nodes) -> LocalJob:
    """What ``ftrun status`` finds of the job on this host.

    Args:
        options: the job.
        nodes: as `meet` has made it.
    """
    parameters, endpoint = options.rendezvous, nodes.store
    if parameters is not None and parameters.backend in ETCD_NAMES:
        endpoint = str(etcd_address(parameters))
    elif parameters is not None and parameters.backend == NAME:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
        endpoint = host_port(host, port) if port else endpoint
    return LocalJob(
        [endpoint, *map(canonical, filter(None, (endpoint, nodes.store)))], options.script, os.getpid()
    )


def _address_alone(given: str) -> str:
    """Where a node that is alone hosts its store: where the user says, if that is this host."""
    if given and not is_this_host(given):
        log.warning("--master-addr %s leads to no address of this host: its ranks use %s", given, loopback())
        return loopback()
    return given or loopback()


def _ft(options: Options, parameters: RendezvousParameters) -> FtNodes:
    settings, identity = read_parameters(parameters)
    agreed = {"restart_policy": options.policy.value, "max_restarts": str(options.max_restarts)}
    # A node that says less agrees with nodes of a version that had no such options.
    more = {"active_world_size": options.active_world_size, "spare_nodes": options.spare_nodes}
    agreed |= {name: str(number) for name, number in more.items() if number}
    return FtNodes(
        lambda: make_backend(parameters),
        dataclasses.replace(settings, agreed=agreed),
        identity,
        replaces=options.policy is not Policy.GROUP,
        exit_barrier_timeout=options.exit_barrier_timeout,
        check=options.node_check,
        where=f"{parameters.endpoint}, at most {read_timeout(parameters):g} s",
    )


def _classic(options: Options, parameters: RendezvousParameters) -> ClassicNodes:
    host_name, _ = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    parameters = copy.copy(parameters)
    parameters.local_addr = parameters.local_addr or address_of_this_node(host_name)
    spec = WorkerSpec(
        options.role,
        options.nproc_per_node,
        None,  # type: ignore[arg-type]  # the handler is made with the first round
        entrypoint=options.script,
        monitor_interval=options.monitor_interval,
        local_addr=parameters.local_addr,
    )
    return ClassicNodes(spec, options.exit_barrier_timeout, lambda: get_rendezvous_handler(parameters))
