"""The command ``ftrun``: hands its arguments to what they name, such as its commands for a running job.

What a job needs, torch above all, is imported when one is started. The commands for a running one, from any
shell or host, import torch, which takes seconds, only once the job's store is needed: arguments are checked
first, then whether anything listens there; a status first asks the job's agent on this host.
"""

import argparse
import atexit
import contextlib
import difflib
import itertools
import json
import logging
import os
import pkgutil
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from .. import __version__
from .._text import without_secrets
from ..agent.signals import handle_notices
from ..exception import StoreError
from ..rendezvous.drains import Refused
from ..rendezvous.node_ids import NODE_ID_ENV
from ..settings import LONGEST
from ..store.address import ANNOUNCED, ENDPOINT, canonical, members_of
from ..store.bounded import call_in_thread
from .local import jobs_here
from .status import Status
from .supervise import supervise

#: The commands that change a running job, by the functions of `control` that have their names: what they do.
CHANGES = {
    "notice": "Asks the ranks of a running job for a checkpoint, all at the same step. It ends nothing.",
    "drain": "Removes a node, or one rank, from a running job when the next step begins. Spares take over, "
    "or fewer ranks go on. Drained ranks are not restarted; a node leaves after its last rank.",
    "restart": "Ends the iteration of a running job: its ranks enter the function again, in the same "
    "processes.",
    "stop": "Ends a job: on all nodes the ranks get SIGTERM, and time to end. Each ftrun exits with 0.",
}
#: The other commands of ``ftrun``, and where they are. A script of such a name is started as ``./status``.
COMMANDS = {"status": "ft_wrapper.cli.main:main_status", "report": "ft_wrapper.report.command:main"}
_NAMES = frozenset({*COMMANDS, *CHANGES})
# How long the ranks have if ``--within`` does not say, and what happens then.
_WITHIN = {
    "notice": (None, "how long they have (default: not known)"),
    "drain": (30.0, "after this long, terminate ranks that have not left (default: 30)"),
}
_PATIENCE = 1.5  # seconds to reach a host that does not answer


def level_of_ftrun() -> str:
    """What ``LOGLEVEL`` says, else ``INFO``. torch reads it, too, when its elastic package is imported.

    Raises:
        SystemExit: it is not a level: torch would show a traceback (2; one line on stderr).
    """
    said = os.environ.get("LOGLEVEL", "INFO")
    if said not in logging.getLevelNamesMapping():
        known = ", ".join(logging.getLevelNamesMapping())
        print(f"ftrun: error: LOGLEVEL={said}: there is no such level; use {known}", file=sys.stderr)
        sys.exit(2)
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Does what ``ftrun`` does, in this process.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Returns:
        The exit code, see `run.run`; that of a command; with ``--check`` 1 if something was found, else 0.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    name = words[0] if words else ""
    if words == ["--version"]:  # as the parser of all options has it, which needs torch
        from importlib.metadata import version  # it takes its time, too

        print(f"ftrun {__version__}, torch {version('torch')}")
        return 0
    if name in _NAMES:
        return _carry_out(name, words[1:])
    meant = difflib.get_close_matches(name, _NAMES, 1)
    if meant and not name.startswith("-") and not os.path.exists(name):
        print(f"ftrun: error: {name}: no such command or file; did you mean {meant[0]!r}?", file=sys.stderr)
        return 2
    level = level_of_ftrun()  # before torch's elastic package fails
    if os.environ.get(NODE_ID_ENV) == "":
        return supervise()
    from .run import start_job

    return start_job(words, level)


def _carry_out(name: str, argv: Sequence[str]) -> int:
    """Carries out a command; ends quietly once its reader, such as ``head``, has read enough."""
    try:
        code: int = main_change(name, argv) if name in CHANGES else pkgutil.resolve_name(COMMANDS[name])(argv)
        sys.stdout.flush()
    except (StoreError, RuntimeError, ImportError, ValueError) as error:  # torch's own are RuntimeErrors
        print(f"ftrun {name}: error: {without_secrets(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more, at its end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def command() -> NoReturn:
    """The command ``ftrun``: `main`, and the end of the process with its exit code.

    It skips Python's own shutdown, which writes to most of torch's memory: a third of a second. Before Python
    3.14, a thread that returns from torch's code meanwhile would also abort the process.
    """
    handle_notices(lambda *_: None)  # before the agent takes them over, and afterwards, too
    if _NAMES.intersection(sys.argv[1:2]):  # c10d prints two lines for each wait that times out
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = main()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


# A job's status --------------------------------------------------------------------------------------------


def main_status(argv: Sequence[str]) -> int:
    """``ftrun status``: prints a job's status.

    Args:
        argv: the arguments.

    Returns:
        0.

    Raises:
        StoreError: there is no such job, or its store cannot be read.
        ValueError: the name cannot be a job's, or there is no name and no job on this host.
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
    """The same, but ctrl-C works at once: in a call of torch's stores it would have to wait."""
    while (status := call_in_thread(lambda: next(statuses, None), "reading the status")) is not None:
        yield status


def _statuses(endpoint: str, said: str, longest: float, opened: contextlib.ExitStack) -> Iterator[Status]:
    """A job's status now and after each change.

    Args:
        endpoint: the job's endpoint.
        said: the status from its agent on this host; empty if there is none.
        longest: see `control.follow`.
        opened: closes the stores.
    """
    if said:
        yield Status.from_json(said)
    _check_listens(endpoint)
    from .control import follow  # it needs torch

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


# Commands that change a job --------------------------------------------------------------------------------


def _parser(name: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"ftrun {name}", description=what, allow_abbrev=False)
    if name == "drain":
        what = "a node's id, or a slot's number where no node has that id (to be sure: node:ID or slot:N)"
        parser.add_argument("target", metavar="NODE|SLOT", help=f"{what}; 'ftrun status' shows both")
    what = f"{ENDPOINT}: where the nodes meet; on one node, the endpoint that ftrun prints at the start"
    what += f" (default: {ANNOUNCED}{', else the job on this host' if name == 'status' else ''})"
    given = os.environ.get(ANNOUNCED, "")
    parser.add_argument("endpoint", nargs="?", default=given, metavar="ENDPOINT", help=what)
    return parser


def main_change(name: str, argv: Sequence[str]) -> int:
    """A command that changes a job.

    Args:
        name: of the command.
        argv: the arguments.

    Returns:
        0; 1 if it was refused, as when too few ranks would be left, or was not carried out in time.

    Raises:
        StoreError: the job cannot be reached.
        ValueError: an argument is wrong.
        SystemExit: an argument is wrong (2; said on stderr).
    """
    parser = _parser(name, CHANGES[name])
    parser.add_argument("--why", default="", metavar="TEXT", help="goes into the log of the job")
    if name in _WITHIN:
        seconds, what = _WITHIN[name]
        parser.add_argument("--within", type=float, default=seconds, metavar="SECONDS", help=what)
    args = parser.parse_intermixed_args(argv)  # options also between a target and an endpoint
    if "target" in args and not re.fullmatch(r"slot:\d+|node:.+|(?!slot:|node:).+", args.target, re.DOTALL):
        parser.error(f"{args.target!r}: name a node or a slot: NODE, node:ID, SLOT or slot:N")
    if not 0 <= (getattr(args, "within", None) or 0.0) <= LONGEST:
        parser.error(f"--within {args.within}: must be at least 0 and finite, and at most {LONGEST} seconds")
    canonical(args.endpoint)
    _check_listens(args.endpoint)
    from . import control  # it needs torch

    args.why = f"ftrun {name} on {socket.gethostname()}{args.why and f': {args.why}'}"
    try:
        print(getattr(control, name)(**vars(args)))
    except Refused as error:
        print(f"ftrun {name}: refused: {without_secrets(str(error))}", file=sys.stderr)
        return 1
    return 0
