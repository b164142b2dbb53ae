"""``ftrun status``: prints how a job stands, from any shell or host.

An agent of the job on this host is asked first, which answers at once. Only where there is none the job's
store is, for which torch has to be imported.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
from collections.abc import Iterator, Sequence

from ..exception import StoreError
from ..store.address import ANNOUNCED, ENDPOINT, canonical, members_of
from ..store.bounded import call_in_thread
from .local import jobs_here
from .status import Status

_PATIENCE = 1.5  # seconds to reach a host that does not answer


def main_status(argv: Sequence[str]) -> int:
    """``ftrun status``: prints how a job stands.

    Args:
        argv: the arguments.

    Returns:
        0.

    Raises:
        StoreError: there is no such job, or its store cannot be read.
        ValueError: a job cannot be called so, or is not called anything, and there is none on this host.
    """
    what = "Shows the state of a wrapped job: its iteration, its ranks, the last fault."
    parser = argparse.ArgumentParser("ftrun status", description=what, allow_abbrev=False)
    what = f"{ENDPOINT}: where the nodes meet, or the store of the ranks, which have it in {ANNOUNCED}; "
    what += "ftrun prints it at the start (default: the job on this host)"
    given = os.environ.get(ANNOUNCED)
    parser.add_argument("endpoint", nargs="?", default=given, metavar="ENDPOINT", help=what)
    what = "keep running, and print the status again when it changes"
    parser.add_argument("--watch", action="store_true", help=what)
    what = "with --watch, read the status at least this often (default: 5)"
    parser.add_argument("--interval", type=float, default=5.0, metavar="SECONDS", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args(argv)
    jobs = jobs_here(canonical(args.endpoint) if args.endpoint else "")
    if not jobs and not args.endpoint:
        raise ValueError(f"no ftrun of this user runs on this host; give {ENDPOINT}")
    if len(jobs) > 1:
        for job, _ in jobs:
            line = f"ftrun status {job.names[0] or '-'}  # {job.script}, pid {job.pid}"
            print(json.dumps(vars(job)) if args.json else line)
        return 0
    endpoint = args.endpoint or jobs[0][0].names[0]
    with contextlib.ExitStack() as opened:
        said = "".join(status for _, status in jobs)
        changes = itertools.groupby(_statuses(endpoint, said, args.interval, opened))
        statuses = _interruptible(status for status, _ in changes)
        for status in statuses if args.watch else itertools.islice(statuses, 1):
            print(status.to_json() if args.json else status.to_text(), flush=True)
    return 0


def _interruptible(statuses: Iterator[Status]) -> Iterator[Status]:
    """The same, so that ctrl-C is obeyed at once: in a call of torch's stores it would have to wait."""
    while (status := call_in_thread(lambda: next(statuses, None), "reading the status")) is not None:
        yield status


def _statuses(endpoint: str, said: str, longest: float, opened: contextlib.ExitStack) -> Iterator[Status]:
    """How a job stands, and how it stands after each change.

    Args:
        endpoint: what to call it.
        said: what an agent of it on this host says; empty if there is none.
        longest: see `stores.follow`.
        opened: closes the stores.
    """
    if said:
        yield Status.from_json(said)
    _check_listens(endpoint)
    from .stores import follow  # it needs torch

    yield from follow(endpoint, longest, opened)


def _check_listens(endpoint: str) -> None:
    """Raises StoreError if nothing listens where a job's store is, or no host answers soon."""
    failed = ""
    for member in members_of(endpoint):
        try:
            return socket.create_connection(member, _PATIENCE).close()
        except OSError as error:
            failed = str(error)
    raise StoreError(f"nothing listens at {endpoint}: {failed}")
