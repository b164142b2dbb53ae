"""What torch's types say of a node's ranks: a spec's entry point, the worker group, failures."""

import sys

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ...store.address import split_host_port
from ..group import Group
from ..process import Program, python_program
from ..rounds import End


def program_of(entrypoint: str, arguments: list[str]) -> Program:
    """What an entry point of torch's runs: a program, or a script that Python can run after a fork."""
    if entrypoint.endswith(".py"):
        return python_program(entrypoint, arguments)
    rest = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if entrypoint == sys.executable and rest:
        if rest[0] == "-m" and len(rest) > 1:
            return python_program(rest[1], rest[2:], is_module=True)
        if rest[0].endswith(".py"):
            return python_program(rest[0], rest[1:])
    return Program((entrypoint, *arguments))


def worker_group(spec: api.WorkerSpec, group: Group) -> api.WorkerGroup:
    """The ranks as they are now, by torch's type; it does not change afterwards.

    Args:
        spec: of the workers.
        group: their state.
    """
    made, where, pids = api.WorkerGroup(spec), group.round, group.pids
    made.state = group.state
    if where is None:
        return made
    host, port = split_host_port(where.address)
    made.group_rank, made.group_world_size = where.group_rank, where.group_world_size  # type: ignore[assignment]
    made.master_addr, made.master_port = host, int(port)  # type: ignore[assignment]
    made.workers = [
        api.Worker(rank, where.rank(rank), where.role_rank + rank, where.world_size, where.role_world_size)
        for rank in range(group.nproc)
    ]
    for rank, pid in pids.items():
        made.workers[rank].id = pid
    return made


def process_failures(end: End, first_rank: int) -> dict[int, ProcessFailure]:
    """The last failure of each rank that counts; the ranks in the order in which they failed first."""
    found: dict[int, ProcessFailure] = {}
    for failure in end.failures:
        one = ProcessFailure(failure.rank - first_rank, failure.pid, failure.exitcode, failure.error_file)
        if not failure.error_file:
            one.timestamp = int(failure.when)
            one.message = failure.error or one.message
        found[failure.rank] = one
    return found
