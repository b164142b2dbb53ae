"""The command line of ``ftrun``: torchrun's options, as the installed torch has them, and our own.

`Parser` also reads single values; `ft_wrapper.agent.options` checks what they mean together.
"""

import argparse
import copy
import functools
import importlib.metadata
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.run import determine_local_world_size, get_args_parser

from .. import __version__
from .._text import without_secrets
from ..log_lines import FORMAT_ENV, TEXT
from ..rendezvous.backends import DEFAULT_PORT
from ..rendezvous.settings import ETCD_NAMES, NAME
from ..settings import LONGEST
from ..store.secret import SECRET_ENV
from .node_check import TIMEOUT
from .nodes import EXIT_BARRIER_TIMEOUT
from .policy import RANK_RESTARTS, Policy
from .signals import SHUTDOWN_TIMEOUT, SIGNALS

# torchrun's
DEFAULT_MONITOR_INTERVAL = 0.1
DEFAULT_RDZV_ID = "none"
DEFAULT_MASTER_ADDR = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
NO_HANDLER = "null"  # for events

_MOST = 2**31 - 1  # of anything that is counted
_MOST_RANKS = 4096  # of one node: each is a process, with files and memory of its own here

#: Options of torchrun's that do nothing here, though they ask for something: what to do instead.
NO_EFFECT = {
    "--event-log-handler": "events are written as JSON lines to the file that FT_WRAPPER_EVENTS names",
    "--numa-binding": "bind ranks in the script, by os.sched_setaffinity, or by numactl and --no-python",
    "--duplicate-stdout-filters": "search the log files, with --tee 1 or --redirects 1",
    "--duplicate-stderr-filters": "search the log files, with --tee 2 or --redirects 2",
}

#: Help for options of torchrun's that stay as they are in its parser.
EXPLAINED = {
    "--start-method": "changes nothing: it is for functions, and ranks run scripts",
    "--run-path": "the script is a path, whatever --module and --no-python say; forked ranks always run it "
    "this way",
    **{option: f"has no effect here: {instead}" for option, instead in NO_EFFECT.items()},
}


def name(option: str) -> str:
    """What an option, spelled in full, is called in the result of parsing."""
    return option[2:].replace("-", "_")


#: What is taken from torchrun's parser as it is there, by its name in the result of parsing.
READ_AS_TORCHRUNS = frozenset(
    {
        *("nnodes", "nproc_per_node", "rdzv_id", "rdzv_conf", "local_addr", "role", "module", "no_python"),
        *("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs", "start_method", "run_path"),
        *("signals_to_handle", "virtual_local_rank", "log_line_prefix_template"),
        *map(name, NO_EFFECT),
        *("training_script", "training_script_args", "help"),
    }
)

OWN = "options that torchrun does not have"


class Parser(argparse.ArgumentParser):
    """Takes over torchrun's options. An error is one line, and ends the program with 2.

    An error names the option, its value and the way out.

    Attributes:
        given: what `read` has found, by the options' names.
        warnings: what the user should know, though the command line will do; a line each.
    """

    given: argparse.Namespace

    def __init__(self, theirs: argparse.ArgumentParser, **more: Any) -> None:
        super().__init__(parents=[theirs], add_help=False, conflict_handler="resolve", **more)
        self._theirs = dict(theirs._option_string_actions)
        self.warnings: list[str] = []

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parses the command line, for the questions after single values."""
        self.given = self.parse_args(argv)
        for action in self._actions:
            if action.option_strings and getattr(self.given, action.dest, None) == "" != action.default:
                option = action.option_strings[0]  # torchrun takes its own ones empty
                say = self.warn if option in self._theirs else self.error
                say(f"{option} '': is empty; give it a value, or leave it out")
        return self.given

    def error(self, message: str) -> NoReturn:
        """Ends with one line, and without the usage text that would bury it."""
        self.exit(2, f"ftrun: error: {without_secrets(message)}\n")

    def contradict(self, one: str, other: str, why: str) -> NoReturn:
        """Ends for two options that cannot both be meant; says what to do."""
        self.error(f"{one} and {other} contradict each other: {why}")

    def warn(self, message: str) -> None:
        """Notes a warning, which names the option, its value and the consequence."""
        self.warnings.append(without_secrets(message))

    def unknown(self) -> list[argparse.Action]:
        """Options of the installed torchrun that this version of ours does not know."""
        theirs = self._theirs.values()
        return [
            action for action in self._actions if action in theirs and action.dest not in READ_AS_TORCHRUNS
        ]

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for: if it does for an option of torchrun's, only for that."""
        found = super()._get_option_tuples(option_string)
        # An option's two spellings are one option, which not every version of argparse knows.
        matches: dict[int, Any] = {}
        for match in [match for match in found if match[1] in self._theirs] or found:
            matches.setdefault(id(match[0]), match)
        return list(matches.values())

    # Single values -------------------------------------------------------------------------------------

    def nproc(self) -> int:
        """Number of ranks of this node."""
        value = self.given.nproc_per_node
        try:
            found: int = determine_local_world_size(value)
        except ValueError as error:
            self.error(f"--nproc-per-node {value}: use a number above 0, cpu, gpu, xpu or auto ({error})")
        if not 1 <= found <= _MOST_RANKS:
            self.error(f"--nproc-per-node {value}: use a number of at least one and at most {_MOST_RANKS}")
        return found

    def nodes(self) -> tuple[int, int]:
        """The least and the most nodes."""
        value = self.given.nnodes
        numbers = [_number(part) for part in value.split(":")]
        least, most = numbers[0], numbers[-1]
        if least is None or most is None or len(numbers) > 2:
            self.error(f"--nnodes {value}: use a number up to {_MOST}, or the least and the most: 2:4")
        if least < 1:
            self.error(f"--nnodes {value}: at least one node is needed")
        if least > most:
            self.error(f"--nnodes {value}: the least, {least}, is more than the most, {most}; swap them")
        return least, most

    def count(self, option: str, default: int = 0, most: int = _MOST) -> int:
        """A number from 0 to the most; the default if there is no value."""
        value = getattr(self.given, name(option))
        if not value:  # a variable PET_… may be empty
            return default
        number = _number(value)
        if number is None or not 0 <= number <= most:
            self.error(f"{option} {value}: use a number of at least 0 and at most {most}")
        return number

    def seconds(self, option: str, least: float = 0.0) -> float:
        """A duration that is not less."""
        value = getattr(self.given, name(option))
        try:
            found = float(value)
        except ValueError:
            self.error(f"{option} {value}: is not a number of seconds")
        if not least <= found <= LONGEST:
            self.error(f"{option} {value}: must be at least {least:g} and finite, at most {LONGEST} seconds")
        return found

    def streams(self, option: str, nproc: int) -> Std | dict[int, Std]:
        """Which streams go elsewhere, for all ranks or by local rank."""
        value = getattr(self.given, name(option))
        try:
            found: Std | dict[int, Std] = Std.from_str(value)
        except ValueError:
            self.error(f"{option} {value}: use 0, 1, 2 or 3, or local ranks with one each, as in 0:3,1:2")
        if isinstance(found, dict):
            self._warn_of_ranks(option, value, found, nproc)
            return {rank: std for rank, std in found.items() if rank < nproc}
        return found

    def local_ranks(self, nproc: int) -> set[int] | None:
        """Those of the local ranks that may write to the console; None if none were named."""
        option, value = "--local-ranks-filter", self.given.local_ranks_filter
        if not value:
            return None
        try:
            ranks = {int(rank) for rank in value.split(",")}
        except ValueError:
            self.error(f"{option} {value}: use local ranks with commas between them, as in 0,1,2")
        self._warn_of_ranks(option, value, ranks, nproc)
        return ranks

    def _warn_of_ranks(self, option: str, value: str, ranks: Iterable[int], nproc: int) -> None:
        missing = sorted(rank for rank in ranks if not 0 <= rank < nproc)
        if missing:
            which = ", ".join(map(str, missing))
            there = f"there is no local rank {which} with --nproc-per-node {nproc}"
            self.warn(f"{option} {value}: {there}; that part has no effect")

    def signals(self) -> tuple[signal.Signals, ...]:
        """Signals by their names."""
        value, found = self.given.signals_to_handle, []
        option = f"--signals-to-handle {value}"
        for text in map(str.strip, value.split(",")):
            try:
                signum = signal.Signals[text]
            except KeyError:
                self.warn(f"{option}: no signal is named {text!r}, left out; names are as in SIGTERM,SIGUSR1")
                continue
            if signum in (signal.SIGKILL, signal.SIGSTOP):
                self.error(f"{option}: {text} cannot be handled by any program")
            if signum == signal.SIGCHLD:
                self.error(f"{option}: ftrun needs SIGCHLD to hear of its ranks")
            found.append(signum)
        return tuple(found)

    def logs_specs(self) -> type[LogsSpecs]:
        """What decides where log files go, by the name of an entry point."""
        chosen = self.given.logs_specs
        if chosen is None:
            return DefaultLogsSpecs
        found = importlib.metadata.entry_points(group="torchrun.logs_specs", name=chosen)
        if not found:
            self.error(f"--logs-specs {chosen}: no package has such an entry point in torchrun.logs_specs")
        try:
            specs: type[LogsSpecs] = next(iter(found)).load()
        except (ImportError, AttributeError) as error:
            self.error(f"--logs-specs {chosen}: cannot be imported: {error}")
        return specs


def _number(value: str) -> int | None:
    """A whole number as torchrun takes it, with spaces around it and a sign; None if it is none, or huge."""
    try:
        return number if abs(number := int(value)) <= _MOST else None
    except ValueError:
        return None


# The options -----------------------------------------------------------------------------------------------


Group: TypeAlias = argparse._ActionsContainer


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
        usage="ftrun [options] script ...\n       ftrun status | report | drain | restart | stop ...",
        description="Starts the ranks of a job on this machine, which may be one of several, and hosts the "
        "store that they agree on. If a rank of a wrapped job dies, only that rank is restarted.",
        epilog="As under torchrun, options may be abbreviated, written with underscores, and set by a "
        "variable: PET_NPROC_PER_NODE=2. The commands have their own help: 'ftrun status --help'.",
    )
    _add_what_differs(parser)
    _add_what_torch_may_lack(parser)
    _add_own(parser)
    for option, why in EXPLAINED.items():
        parser._option_string_actions[option].help = why
    for action in parser._actions:
        variable = f"PET_{action.dest.upper()}"
        if isinstance(action, check_env) and os.environ.get(variable, "0") not in ("0", "1"):
            raise ValueError(f"{variable}={os.environ[variable]}")
    script, arguments = parser._get_positional_actions()
    script.metavar, script.help = "script", "what each rank runs"
    arguments.metavar, arguments.help = "...", "its arguments"
    return parser


def _add(parser: Parser, group: Group, option: str, help: str, default: str | None = None) -> None:
    """Adds an option and its value's name, or a flag; it takes the place of torchrun's in all spellings."""
    option, _, metavar = option.partition(" ")
    theirs = parser._option_string_actions.get(option)
    names = _spellings(option) if theirs is None else theirs.option_strings[:]
    if metavar:
        group.add_argument(*names, help=help, action=env, metavar=metavar, default=default)
    else:
        group.add_argument(*names, help=help, action=check_env)


def _spellings(option: str) -> tuple[str, ...]:
    return (option, f"--{name(option)}") if "-" in option[2:] else (option,)


def _add_what_differs(parser: Parser) -> None:
    group = parser.add_argument_group("options whose default or meaning is not torchrun's")
    add = functools.partial(_add, parser, group)
    add(
        "--rdzv-backend NAME",
        f"how the nodes find each other: {NAME}, which static is another name for; {ETCD_NAMES[0]}; or "
        f"one of torch's, c10d for instance (default: {NAME})",
        default=NAME,
    )
    add(
        "--rdzv-endpoint HOST:PORT",
        f"where they find each other: with {NAME} and c10d the node of that name hosts the store (default "
        f"port: {DEFAULT_PORT}); with {ETCD_NAMES[0]} all its members: HOST:PORT,HOST:PORT",
        default="",
    )
    add("--standalone", "this node alone: the options of the rendezvous have no effect")
    add(
        "--node-rank N",
        "which node this is, from 0, and its --node-id: nodes are ranked in this order; with "
        "--master-addr, node 0 hosts the rendezvous store; not with torch's rendezvous",
    )
    add(
        "--master-addr HOST",
        "with --master-port another way to write --rdzv-endpoint HOST:PORT, which comes first "
        f"(default: {DEFAULT_MASTER_ADDR}); on one node, where the ranks' store listens",
    )
    add(
        "--master-port PORT",
        f"see --master-addr (default: {DEFAULT_MASTER_PORT}); on one node, the port of the ranks' store "
        "(default: a free one)",
    )
    add(
        "--monitor-interval SECONDS",
        f"how often to look whether nodes wait, with torch's rendezvous; {NAME} and {ETCD_NAMES[0]} "
        f"tell, and the end of a rank is seen at once (default: {DEFAULT_MONITOR_INTERVAL:g})",
        default=str(DEFAULT_MONITOR_INTERVAL),
    )
    add("--max-restarts N", "how often all ranks may be restarted, counted for all nodes (default: 0)")
    add(
        "--shutdown-timeout SECONDS",
        "from a forwarded signal, or the end of a group, to SIGKILL (default: "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else {SHUTDOWN_TIMEOUT:g})",
        default=os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT)),
    )
    group.add_argument(
        *_spellings("--print-completion"),
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print what the shell needs to complete the options of ftrun, and exit; takes the package shtab",
    )


def _add_what_torch_may_lack(parser: Parser) -> None:
    """Options of newer torchruns, for older ones; as they are in those that have them."""
    lacking = (
        (
            "--signals-to-handle SIGNALS",
            "signals that are forwarded to the ranks and end the job (default: %(default)s)",
            ",".join(signum.name for signum in SIGNALS),
        ),
        (
            "--virtual-local-rank",
            "each rank sees its own GPU only: CUDA_VISIBLE_DEVICES names it, and LOCAL_RANK is 0",
            None,
        ),
        (
            "--log-line-prefix-template TEMPLATE",
            "what --tee puts before each line, with ${role_name}, ${rank}, ${local_rank} and "
            "${hostname} in it (default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else role and rank)",
            None,
        ),
        *((f"{option} VALUE", "", None) for option in NO_EFFECT),
    )
    for option, help, default in lacking:
        if option.split()[0] not in parser._option_string_actions:
            _add(parser, parser, option, help, default)


def _add_own(parser: Parser) -> None:
    group = parser.add_argument_group(OWN)
    add = functools.partial(_add, parser, group)
    group.add_argument(
        "--version",
        action="version",
        version=f"ftrun {__version__}, torch {torch.__version__}",
        help="print the versions of ftrun and torch",
    )
    add(
        "--check",
        "start nothing: check what may go wrong with this command on this machine, and say what to do; exits "
        "with 1 if there are findings",
    )
    add(
        "--restart-policy POLICY",
        "when a rank fails: rank: only that rank is restarted; group: all ranks are stopped and restarted; "
        "auto: group, and rank once a wrapped job has formed (default: auto)",
        default=Policy.AUTO.value,
    )
    add(
        "--max-rank-restarts N",
        f"how often each single rank may be restarted within an hour of running (default: {RANK_RESTARTS})",
    )
    add(
        "--active-world-size N",
        "how many ranks call the function of a wrapped job; the others are hot spares (default: all)",
    )
    add(
        "--devices-per-node N",
        "with more ranks, some of them spares, active ones get one each; 0: never (default: auto: its GPUs)",
        default="auto",
    )
    add("--spare-nodes K", "how many nodes beyond --nnodes take part, for hot spares (default: 0)")
    add(
        "--node-id ID",
        "which node this is; restarted with the same id it takes its old place (default: --node-rank, "
        "else the number that SLURM or Kubernetes gave it, else a new one)",
    )
    _add_node_checks(add)
    add(
        "--drain-timeout SECONDS",
        "SIGTERM drains this node if the others can continue without it: its ranks leave the job when their "
        "next step begins, or are terminated after this long (default: 0: the job ends)",
        default="0",
    )
    add("--drained-exit-code N", "exit code of a node that was drained (default: 0)", default="0")
    add(
        "--job-secret-file PATH",
        "the job's secret, the same on all nodes, by which its processes know each other in the store; "
        f"(default: {SECRET_ENV}; else on one node, and on etcd with a login, the job makes one)",
    )
    add("--result-file PATH", "write how the job ended to this file, as JSON (default: no file)")
    add(
        "--exit-barrier-timeout SECONDS",
        f"how long a node whose ranks are done waits for the others (default: {EXIT_BARRIER_TIMEOUT:g})",
        default=str(EXIT_BARRIER_TIMEOUT),
    )
    add(
        "--log-format FORMAT",
        "format of the log lines, including those of the ranks' wrappers: text, or json: one object per line "
        f"(default: {FORMAT_ENV}, else text)",
        default=os.environ.get(FORMAT_ENV, TEXT),
    )
    add(
        "--no-standby",
        "start each rank separately, instead of forking it from a process that has imported torch (always so "
        "with --no-python and PYTHON_EXEC)",
    )


def _add_node_checks(add: Callable[..., Any]) -> None:
    add(
        "--node-check CMD",
        "a shell command that must exit with 0 before this node takes a seat; otherwise the node is kept out "
        "and tries again; the last line of the command's output is the reason",
    )
    add(
        "--node-check-timeout SECONDS",
        f"how long the command may take (default: {TIMEOUT:g})",
        default=f"{TIMEOUT:g}",
    )
    add(
        "--node-check-retries N",
        "how often a node that is kept out tries again before it gives up (default: no limit; 0 on one node)",
    )
    add("--node-checks NAMES", argparse.SUPPRESS)  # of an earlier version: the error says what to use
