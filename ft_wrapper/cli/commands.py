"""The commands of ``ftrun`` for a running job, from any shell or host: their arguments, and what they print.

torch takes seconds to import, so that waits until a job's store is needed: arguments are checked first, then
whether anything listens there; for a status the job's agent on this host is asked before.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence

from .._text import without_secrets
from ..exception import StoreError
from ..rendezvous.drains import Refused
from ..settings import LONGEST
from ..store.address import ANNOUNCED, ENDPOINT, canonical, members_of
from ..store.bounded import call_in_thread
from .local import jobs_here
from .status import Status

#: Seconds from a drain until ranks are ended that have not come to their next step, by default.
WITHIN = 30.0
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
    parser = _parser("status", "Shows the state of a wrapped job: its iteration, its ranks, the last fault.")
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


# What changes a job ----------------------------------------------------------------------------------------


def main_drain(argv: Sequence[str]) -> int:
    """``ftrun drain``.

    Args:
        argv: the arguments.

    Returns:
        0; 1 if too few ranks would be left, or they have not left in time.

    Raises:
        StoreError: the job cannot be reached.
        ValueError: an argument is wrong.
        SystemExit: an argument is wrong (2; said on stderr).
    """
    what = "Removes the ranks of a node, or one rank, from a running job when their next step begins: spares "
    what += "take over, or the others continue. They are not restarted; a node leaves after its last rank."
    parser = _parser("drain", what)
    what = f"after this long, terminate ranks that have not left (default: {WITHIN:g})"
    parser.add_argument("--within", type=float, default=WITHIN, metavar="SECONDS", help=what)
    args = parser.parse_args(argv)
    if not re.fullmatch(r"slot:\d+|node:.+|(?!slot:|node:).+", args.target, re.DOTALL):
        parser.error(f"{args.target!r}: name a node or a slot: NODE, node:ID, SLOT or slot:N")
    if not 0 <= args.within <= LONGEST:
        parser.error(f"--within {args.within}: must be at least 0 and finite, and at most {LONGEST} seconds")
    return _control("drain", args, args.target, args.within)


def main_restart(argv: Sequence[str]) -> int:
    """``ftrun restart``; arguments, result and errors as for `main_drain`."""
    what = "Ends the iteration of a running job: its ranks enter the function again, in the same processes."
    return _control("restart", _parser("restart", what).parse_args(argv))


def main_stop(argv: Sequence[str]) -> int:
    """``ftrun stop``; arguments, result and errors as for `main_drain`."""
    what = "Ends a job: on all nodes the ranks get SIGTERM, and time to end. Each ftrun exits with 0."
    return _control("stop", _parser("stop", what).parse_args(argv))


def _parser(name: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"ftrun {name}", description=what, allow_abbrev=False)
    if name == "drain":
        what = "a node's id, or a slot's number where no node has that id (to be sure: node:ID or slot:N)"
        parser.add_argument("target", metavar="NODE|SLOT", help=f"{what}; 'ftrun status' shows both")
    what = f"{ENDPOINT}: where the nodes meet; on one node, the endpoint that ftrun prints at the start"
    what += f" (default: {ANNOUNCED}{', else the job on this host' if name == 'status' else ''})"
    given = os.environ.get(ANNOUNCED, "")
    parser.add_argument("endpoint", nargs="?", default=given, metavar="ENDPOINT", help=what)
    if name != "status":
        parser.add_argument("--why", default="", metavar="TEXT", help="goes into the log of the job")
    return parser


def _control(name: str, args: argparse.Namespace, *more: object) -> int:
    """Does to a job what a command is for, by the function of `control` that has its name.

    Args:
        name: of the command.
        args: its arguments.
        more: those of the function between the endpoint and the reason.

    Returns:
        0; 1 if it was refused.
    """
    canonical(args.endpoint)
    _check_listens(args.endpoint)
    from . import control  # it needs torch

    why = f"ftrun {name} on {socket.gethostname()}{args.why and f': {args.why}'}"
    try:
        print(getattr(control, name)(args.endpoint, *more, why))
    except Refused as error:
        print(f"ftrun {name}: refused: {without_secrets(str(error))}", file=sys.stderr)
        return 1
    return 0
