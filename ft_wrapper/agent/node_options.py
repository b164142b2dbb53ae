"""The options of ``ftrun`` about one node: what it has to pass before it takes a seat, and how it leaves."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..check import node
from ..check.node import Wanted
from ..rendezvous.settings import NAME
from .node_checks import TIMEOUT, BuiltIn, Command
from .proving import Proof

if TYPE_CHECKING:
    from .command_line import Parser

_DEFAULT = "auto"


@dataclasses.dataclass(frozen=True)
class NodeChecks:
    """What a node has to pass before it takes a seat.

    Args:
        wanted: the built-in checks; see `ft_wrapper.check.node`.
        command: the user's, for a shell; empty if there is none.
        timeout: seconds that each of them may take.
        retries: how often they are tried again before the node ends; None: without end.
    """

    wanted: Wanted = dataclasses.field(default_factory=dict)
    command: str = ""
    timeout: float = TIMEOUT
    retries: int | None = None

    def proof(self) -> Proof:
        """The checks, ready to be run."""
        # Each for itself: a mistake in one of them hides nothing that another one finds.
        looks = [functools.partial(node.look, {name: number}) for name, number in self.wanted.items()]
        checks: list[Callable[[], str]] = [BuiltIn(look, self.timeout) for look in looks]
        if self.command:
            checks.append(Command(self.command, self.timeout))
        return Proof(tuple(checks), self.retries, takes_time=bool(self.command))


def add_options(add: Callable[..., Any]) -> None:
    """Adds the options.

    Args:
        add: takes an option with its value's name, its help, and its default.
    """
    add(
        "--node-check CMD",
        "a shell command that must exit with 0 before this node takes a seat; otherwise the node is kept out "
        "and tries again; the last line of the command's output is the reason",
    )
    add(
        "--node-checks NAMES",
        f"built-in checks before that, separated by commas: {', '.join((*node.AUTO, *node.NAMED_ONLY))}; "
        f"{', '.join(node.NUMBERS)} with the amount that must exist, as in gpus=8; none; auto for the first "
        f"{len(node.AUTO)}, on one node for none (default: {_DEFAULT})",
        default=_DEFAULT,
    )
    add(
        "--node-check-timeout SECONDS",
        f"how long the command may take, and each built-in check (default: {TIMEOUT:g})",
        default=f"{TIMEOUT:g}",
    )
    add(
        "--node-check-retries N",
        "how often a node that is kept out tries again before it gives up (default: no limit; 0 on one node)",
    )


def read_options(parser: "Parser", backend: str, *, is_ours: bool) -> NodeChecks:
    """Reads the options; ends the program for what is wrong.

    Args:
        parser: has read the command line.
        backend: how the nodes meet; empty if this one is alone.
        is_ours: whether that is a rendezvous of ours.
    """
    given = parser.given
    names, command = given.node_checks or _DEFAULT, given.node_check or ""
    try:
        wanted = node.parse(names)
    except ValueError as error:
        parser.error(f"--node-checks {names}: {error}")
    timeout = parser.seconds("--node-check-timeout")
    if timeout == 0:
        parser.error("--node-check-timeout 0: must be more than 0")
    if names == _DEFAULT and not is_ours:
        wanted = {}
    if backend and not is_ours and (wanted or command):
        said = f"--node-check {command}" if command else f"--node-checks {names}"
        why = f"there, the others wait for a node that stays out; use --rdzv-backend {NAME}"
        parser.contradict(said, f"--rdzv-backend {backend}", why)
    is_limited = given.node_check_retries is not None or not backend
    retries = parser.count("--node-check-retries") if is_limited else None
    return NodeChecks(wanted, command, timeout, retries)


def read_drain_timeout(parser: "Parser", backend: str, *, is_ours: bool) -> float:
    """Reads for how long SIGTERM drains this node; warns where it cannot.

    Args:
        parser: has read the command line.
        backend: how the nodes meet; empty if this one is alone.
        is_ours: whether that is a rendezvous of ours.
    """
    seconds = parser.seconds("--drain-timeout")
    if is_ours or not seconds:
        return seconds
    where = f"with --rdzv-backend {backend}; use {NAME} or etcd" if backend else "on one node"
    parser.warn(f"--drain-timeout {parser.given.drain_timeout}: no effect {where}")
    return 0.0
