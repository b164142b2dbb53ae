"""Which way the nodes of a job find each other, by what the command line says."""

from __future__ import annotations

import dataclasses
import logging

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from .._addresses import address_of_this_node, is_this_host, loopback
from ..rendezvous.backend import DEFAULT_PORT
from ..rendezvous.handler import make_backend
from ..rendezvous.settings import ETCD_NAMES, NAME, read_parameters
from .classic_nodes import ClassicNodes
from .ft_nodes import FtNodes
from .node_options import Meeting
from .nodes import Nodes, OneNode
from .options import Options
from .policy import Policy

log = logging.getLogger(__name__)


def meet(options: Options) -> Nodes:
    """This node's part among the others. Connects to no one yet.

    Args:
        options: the job.
    """
    meeting = options.meeting
    if meeting is None:
        return OneNode(options.nproc_per_node, _address_alone(options.address), options.port)
    if meeting.parameters.backend in (NAME, *ETCD_NAMES):
        return _ft(options, meeting)
    return _classic(options, meeting)


def _address_alone(given: str) -> str:
    """Where a node that is alone hosts its store: where the user says, if that is this host."""
    if given and not is_this_host(given):
        used = loopback()
        log.warning("--master-addr %s leads to no address of this host: its ranks use %s", given, used)
        return used
    return given or loopback()


def _ft(options: Options, meeting: Meeting) -> FtNodes:
    settings, identity, how = read_parameters(meeting.parameters)
    agreed = {"restart_policy": options.policy.value, "max_restarts": str(options.max_restarts)}
    # A node that says less agrees with nodes of a version that had no such options.
    if options.active_world_size is not None:
        agreed["active_world_size"] = str(options.active_world_size)
    if options.spare_nodes:
        agreed["spare_nodes"] = str(options.spare_nodes)
    return FtNodes(
        lambda: make_backend(meeting.parameters, how),
        dataclasses.replace(settings, agreed=agreed),
        identity,
        replaces=options.policy is not Policy.GROUP,
        exit_barrier_timeout=meeting.exit_barrier_timeout,
    )


def _classic(options: Options, meeting: Meeting) -> ClassicNodes:
    given = meeting.parameters
    host_name, _ = parse_rendezvous_endpoint(given.endpoint, DEFAULT_PORT)
    address = given.local_addr or address_of_this_node(host_name)
    parameters = RendezvousParameters(
        given.backend, given.endpoint, given.run_id, given.min_nodes, given.max_nodes, address, **given.config
    )
    return ClassicNodes(
        lambda: get_rendezvous_handler(parameters),
        address=address,
        nproc=options.nproc_per_node,
        role=options.role,
        monitor_interval=meeting.monitor_interval,
        exit_barrier_timeout=meeting.exit_barrier_timeout,
    )
