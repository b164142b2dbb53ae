"""The command line of ``ftrun``: torchrun's options, as the installed torch has them, and our own."""

from __future__ import annotations

import argparse
import copy
import importlib
import os
from typing import Any, NoReturn

import torch
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from .. import __version__
from ..rendezvous.backend import DEFAULT_PORT
from ..rendezvous.settings import ETCD_NAMES, NAME
from .defaults import EXIT_BARRIER_TIMEOUT, RANK_RESTARTS, SHUTDOWN_TIMEOUT, SIGNALS
from .policy import Policy

DEFAULT_MONITOR_INTERVAL = 0.1  # torchrun's
DEFAULT_RDZV_ID = "none"  # torchrun's
DEFAULT_MASTER_ADDR = "127.0.0.1"  # torchrun's
DEFAULT_MASTER_PORT = 29500  # torchrun's
NO_HANDLER = "null"  # torchrun's, for events

NO_EFFECT = {
    "--event-log-handler": "events are written as JSON lines to the file that FT_WRAPPER_EVENTS names",
    "--numa-binding": "bind ranks in the script, by os.sched_setaffinity, or by numactl and --no-python",
    "--duplicate-stdout-filters": "search the log files, with --tee 1 or --redirects 1",
    "--duplicate-stderr-filters": "search the log files, with --tee 2 or --redirects 2",
}
"""Options of torchrun's that do nothing here, though they ask for something: what to do instead."""

EXPLAINED = {
    "--start-method": "changes nothing: it is for functions, and ranks run scripts",
    "--run-path": "the script is a path, whatever --module and --no-python say; ranks that are forked run it "
    "in this way in any case",
    **{option: f"has no effect here: {instead}" for option, instead in NO_EFFECT.items()},
}
"""Help for options of torchrun's that stay as they are in its parser."""


def name(option: str) -> str:
    """What an option is called in the result of parsing.

    Args:
        option: in full.
    """
    return option[2:].replace("-", "_")


READ_AS_TORCHRUNS = frozenset(
    {
        *("nnodes", "nproc_per_node", "rdzv_id", "rdzv_conf", "local_addr", "role", "module", "no_python"),
        *("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs", "start_method", "run_path"),
        *("signals_to_handle", "virtual_local_rank", "log_line_prefix_template"),
        *map(name, NO_EFFECT),
        *("training_script", "training_script_args", "help"),
    }
)
"""What is taken from torchrun's parser as it is there, by its name in the result of parsing."""

OWN = "options that torchrun does not have"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and end the program with 2.

    Args:
        theirs: torchrun's parser, whose options it takes over.
        more: further arguments of `argparse.ArgumentParser`.

    Attributes:
        warnings: what is to be told of the command line, though it will do; a line each.
    """

    def __init__(self, theirs: argparse.ArgumentParser, **more: Any) -> None:
        super().__init__(parents=[theirs], add_help=False, conflict_handler="resolve", **more)
        self._theirs = dict(theirs._option_string_actions)
        self.warnings: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Ends with one line, and without the usage text that would bury it."""
        self.exit(2, f"ftrun: error: {message}\n")

    def warn(self, message: str) -> None:
        """Notes what the user should know, though it goes on.

        Args:
            message: names the option, its value and the consequence.
        """
        self.warnings.append(message)

    def has(self, option: str) -> bool:
        """Whether there is such an option.

        Args:
            option: spelled in full.
        """
        return option in self._option_string_actions

    def unknown(self) -> list[argparse.Action]:
        """Options of the installed torchrun that this version of ours does not know."""
        theirs = self._theirs.values()
        return [
            action for action in self._actions if action in theirs and action.dest not in READ_AS_TORCHRUNS
        ]

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for: if it does for an option of torchrun's, only for that.

        An option's two spellings are one option, which not every version of argparse knows.
        """
        found = super()._get_option_tuples(option_string)
        matches: dict[int, Any] = {}
        for match in [match for match in found if match[1] in self._theirs] or found:
            matches.setdefault(id(match[0]), match)
        return list(matches.values())


class _Help(argparse.HelpFormatter):
    """Shows each option in one spelling: with two, half of the help would be names."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [text for text in action.option_strings if "_" not in text]
        return super()._format_action_invocation(shown)


class _PrintCompletion(argparse.Action):
    """Writes what a shell needs to complete ``ftrun``'s options, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        _, shell, option = arguments
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            parser.error(f"{option} {shell}: needs the package shtab; pip install shtab")
        print(shtab.complete(parser, shell=shell))
        parser.exit()


def make_parser() -> Parser:
    """All options of ``ftrun``, each also set by a variable ``PET_…`` as torchrun's are.

    Raises:
        ValueError: such a variable of an option without a value is no number.
    """
    parser = Parser(
        get_args_parser(),
        prog="ftrun",
        formatter_class=_Help,
        usage="ftrun [options] script ...\n"
        "       ftrun status [ENDPOINT]       how a job stands\n"
        "       ftrun report EVENTS ...       what its restarts took",
        description="Starts the ranks of a job on this machine, which may be one of several, and hosts the "
        "store that they agree on. A rank of a wrapped job that dies is started again alone.",
        epilog="As under torchrun, options may be abbreviated, written with underscores, and set by a "
        "variable: PET_NPROC_PER_NODE=2. 'ftrun status --help' and 'ftrun report --help' tell of these.",
    )
    _add_what_differs(parser, parser.add_argument_group("options whose default or meaning is not torchrun's"))
    _add_what_torch_may_lack(parser)
    _add_own(parser, parser.add_argument_group(OWN))
    _explain(parser)
    return parser


def _add(parser: Parser, group: argparse._ArgumentGroup, option: str, **settings: Any) -> None:
    """Adds an option; it takes the place of torchrun's, with all its spellings."""
    theirs = parser._option_string_actions.get(option)
    group.add_argument(*(_spellings(option) if theirs is None else theirs.option_strings[:]), **settings)


def _add_what_differs(parser: Parser, group: argparse._ArgumentGroup) -> None:
    _add(
        parser,
        group,
        "--rdzv-backend",
        action=env,
        default=NAME,
        metavar="NAME",
        help=f"how the nodes find each other: {NAME}, which static is another name for; {ETCD_NAMES[0]}; or "
        f"one of torch's, c10d for instance (default: {NAME})",
    )
    _add(
        parser,
        group,
        "--rdzv-endpoint",
        action=env,
        default="",
        metavar="HOST:PORT",
        help=f"where they do: with {NAME} and c10d the node of that name hosts the store (default port: "
        f"{DEFAULT_PORT}); with {ETCD_NAMES[0]} all its members: HOST:PORT,HOST:PORT",
    )
    _add(
        parser,
        group,
        "--standalone",
        action=check_env,
        help="this node alone: no option of the rendezvous counts",
    )
    _add(
        parser,
        group,
        "--node-rank",
        action=env,
        default="",
        metavar="N",
        help="which node this is, from 0, and its --node-id: nodes are ranked in this order; with "
        "--master-addr, node 0 hosts the rendezvous store; not with torch's rendezvous",
    )
    _add(
        parser,
        group,
        "--master-addr",
        action=env,
        default="",
        metavar="HOST",
        help="with --master-port another way to write --rdzv-endpoint HOST:PORT, which comes first "
        f"(default: {DEFAULT_MASTER_ADDR}); on one node, where the ranks' store listens",
    )
    _add(
        parser,
        group,
        "--master-port",
        action=env,
        default="",
        metavar="PORT",
        help=f"see there (default: {DEFAULT_MASTER_PORT}); on one node, the port of the ranks' store "
        "(default: a free one)",
    )
    _add(
        parser,
        group,
        "--monitor-interval",
        action=env,
        default=str(DEFAULT_MONITOR_INTERVAL),
        metavar="SECONDS",
        help=f"how often to look whether nodes wait, with torch's rendezvous; {NAME} and {ETCD_NAMES[0]} "
        f"tell, and the end of a rank is seen at once (default: {DEFAULT_MONITOR_INTERVAL:g})",
    )
    _add(
        parser,
        group,
        "--max-restarts",
        action=env,
        default=None,
        metavar="N",
        help="how often all ranks may be restarted; counted for all nodes together (default: 0)",
    )
    _add(
        parser,
        group,
        "--shutdown-timeout",
        action=env,
        default=os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT)),
        metavar="SECONDS",
        help="from a forwarded signal, or the end of a group, to SIGKILL (default: "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else {SHUTDOWN_TIMEOUT:g})",
    )
    _add(
        parser,
        group,
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print what the shell needs to complete the options of ftrun, and exit; takes the package shtab",
    )


def _add_what_torch_may_lack(parser: Parser) -> None:
    """Options of newer torchruns, for older ones; as they are in those that have them."""
    for option, settings in {
        "--signals-to-handle": {
            "action": env,
            "default": ",".join(signum.name for signum in SIGNALS),
            "help": "signals that are forwarded to the ranks and end the job (default: %(default)s)",
        },
        "--virtual-local-rank": {
            "action": check_env,
            "help": "each rank sees its own GPU only: CUDA_VISIBLE_DEVICES names it, and LOCAL_RANK is 0",
        },
        "--log-line-prefix-template": {
            "action": env,
            "default": "",
            "help": "what --tee puts before each line, with ${role_name}, ${rank}, ${local_rank} and "
            "${hostname} in it (default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else role and rank)",
        },
        **{option: {"action": env, "default": ""} for option in NO_EFFECT},
        "--event-log-handler": {"action": env, "default": NO_HANDLER},
    }.items():
        if not parser.has(option):
            parser.add_argument(*_spellings(option), **settings)  # type: ignore[arg-type]


def _add_own(parser: Parser, group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--version",
        action="version",
        version=f"ftrun {__version__}, torch {torch.__version__}",
        help="say which versions of ftrun and torch these are",
    )
    _add(
        parser,
        group,
        "--restart-policy",
        action=env,
        default=Policy.AUTO.value,
        metavar="POLICY",
        help="when a rank fails: rank: it is started again alone; group: all are ended and restarted; "
        "auto: group, and rank once a wrapped job has formed (default: auto)",
    )
    _add(
        parser,
        group,
        "--max-rank-restarts",
        action=env,
        default=None,
        metavar="N",
        help=f"how often each rank may be started again alone (default: {RANK_RESTARTS})",
    )
    _add(
        parser,
        group,
        "--active-world-size",
        action=env,
        default=None,
        metavar="N",
        help="so many ranks call the function of a wrapped job, the others are hot spares (default: all)",
    )
    _add(
        parser,
        group,
        "--spare-nodes",
        action=env,
        default="0",
        metavar="K",
        help="K nodes more than --nnodes says take part, and as many ranks as they have are hot spares "
        "(default: 0)",
    )
    _add(
        parser,
        group,
        "--node-id",
        action=env,
        default=None,
        metavar="ID",
        help="which node this is; started again with the same id it takes its own place (default: "
        "--node-rank, else the number that SLURM or Kubernetes gave it, else a new one)",
    )
    _add(
        parser,
        group,
        "--exit-barrier-timeout",
        action=env,
        default=str(EXIT_BARRIER_TIMEOUT),
        metavar="SECONDS",
        help=f"how long a node whose ranks are done waits for the others (default: {EXIT_BARRIER_TIMEOUT:g})",
    )
    _add(
        parser,
        group,
        "--no-standby",
        action=check_env,
        help="start each rank by itself, instead of forking it from a process that has imported torch "
        "(always so with --no-python and PYTHON_EXEC)",
    )


def _explain(parser: Parser) -> None:
    """Says in the help what is not as torch says it there."""
    for option, why in EXPLAINED.items():
        parser._option_string_actions[option].help = why
    for action in parser._get_positional_actions():
        if action.dest == "training_script":
            action.metavar, action.help = "script", "what each rank runs"
        elif action.dest == "training_script_args":
            action.metavar, action.help = "...", "its arguments"


def _spellings(option: str) -> tuple[str, ...]:
    return (option, f"--{name(option)}") if "-" in option[2:] else (option,)
