"""The options of ``ftrun``: torchrun's, as the installed torch has them, with our own.

argparse reads single values (`_value`). What is checked after that is what options mean together.
"""

import argparse
import contextlib
import copy
import dataclasses
import importlib
import os
import re
import shutil
import signal
import socket
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint
from torch.distributed.run import _get_logs_specs_class, determine_local_world_size, get_args_parser

from .. import __version__, events
from .._text import without_secrets
from ..log_lines import FORMAT_ENV, FORMATS, TEXT
from ..protocol.notice import GRACE_ENV
from ..rendezvous.backends import DEFAULT_PORT
from ..rendezvous.node_ids import NODE_ID_ENV, node_id_from_environment
from ..rendezvous.settings import ETCD_NAMES, NAME, read_parameters, unknown_options
from ..settings import LONGEST
from ..store import secret
from ..store.address import why_unknown, without_brackets
from .agent import Launch
from .health import ADDRESS_ENV
from .node_bench import SLOWER_THAN, NodeBench
from .node_check import TIMEOUT, NodeCheck
from .nodes import EXIT_BARRIER_TIMEOUT
from .outputs import ERROR_FILE_ENV, PREFIX_ENV, PREFIX_WORDS
from .policy import RANK_RESTARTS, Policy
from .process import Job, Program, python_program
from .signals import SHUTDOWN_TIMEOUT, SIGNALS

T = TypeVar("T")

# torchrun's
DEFAULT_MONITOR_INTERVAL = 0.1
DEFAULT_RDZV_ID = "none"
DEFAULT_MASTER_ADDR = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
NO_HANDLER = "null"  # for events
#: The default of torchrun's ``--rdzv-backend``: here another name of ours.
STATIC = "static"
OURS = (NAME, *ETCD_NAMES)

_MOST = 2**31 - 1  # of anything that is counted
_MOST_RANKS = 4096  # of one node: each is a process, with files and memory of its own here

#: Options of torchrun's that do nothing here, though they ask for something: what to do instead.
NO_EFFECT = {
    "--event-log-handler": "--events DIR writes events, as JSON lines",
    "--numa-binding": "bind ranks in the script, with os.sched_setaffinity, or with numactl and --no-python",
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


#: What is taken unchanged from torchrun's parser, by its name in the result of parsing.
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

# The options: what they are called, with their value, and their help. Readers and defaults follow. ---------

DIFFERENT = {
    "--rdzv-backend NAME": f"how the nodes find each other: {NAME}, also called static; "
    f"{ETCD_NAMES[0]}; or one of torch's, c10d for instance (default: {NAME})",
    "--rdzv-endpoint HOST:PORT": f"where they find each other: with {NAME} and c10d the node of that name "
    f"hosts the store (default port: {DEFAULT_PORT}); with {ETCD_NAMES[0]} all its members: "
    "HOST:PORT,HOST:PORT",
    "--standalone": "this node alone: the options of the rendezvous have no effect",
    "--node-rank N": "which node this is, from 0, and its --node-id: nodes are ranked in this order; with "
    "--master-addr, node 0 hosts the rendezvous store; not with torch's rendezvous",
    "--master-addr HOST": "with --master-port another way to write --rdzv-endpoint HOST:PORT, which comes "
    f"first (default: {DEFAULT_MASTER_ADDR}); on one node, where the ranks' store listens",
    "--master-port PORT": f"see --master-addr (default: {DEFAULT_MASTER_PORT}); on one node, the port of the "
    "ranks' store (default: a free one)",
    "--monitor-interval SECONDS": f"how often to look whether nodes wait, with torch's rendezvous; {NAME} "
    f"and {ETCD_NAMES[0]} notify, and the end of a rank is seen at once (default: "
    f"{DEFAULT_MONITOR_INTERVAL:g})",
    "--max-restarts N": "how often all ranks may be restarted, counted for all nodes (default: 0)",
    "--shutdown-timeout SECONDS": "from a forwarded signal, or the end of a group, to SIGKILL (default: "
    f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else {SHUTDOWN_TIMEOUT:g})",
}
#: Options of newer torchruns, for older ones, as newer ones have them.
LACKING = {
    "--signals-to-handle SIGNALS": "signals that are forwarded to the ranks and end the job (default: "
    "%(default)s)",
    "--virtual-local-rank": "each rank sees only its own GPU: CUDA_VISIBLE_DEVICES names it, and LOCAL_RANK "
    "is 0",
    "--log-line-prefix-template TEMPLATE": "what --tee puts before each line, with ${role_name}, ${rank}, "
    "${local_rank} and ${hostname} in it (default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else role and "
    "rank)",
    **{f"{option} VALUE": "" for option in NO_EFFECT},
}
OWN_OPTIONS = {
    "--check": "start nothing: check what may go wrong with this command on this machine, and say what to "
    "do; exits with 1 if there are findings",
    "--restart-policy POLICY": "when a rank fails: rank: only that rank is restarted; group: all ranks are "
    "stopped and restarted; auto: group, and rank once a wrapped job has formed (default: auto)",
    "--max-rank-restarts N": "how often each single rank may be restarted within an hour of running "
    f"(default: {RANK_RESTARTS})",
    "--active-world-size N": "how many ranks call the function of a wrapped job; the others are hot spares "
    "(default: all)",
    "--devices-per-node N": "with more ranks, some of them spares, active ones get one each; 0: never "
    "(default: auto: its GPUs)",
    "--spare-nodes K": "how many nodes beyond --nnodes take part, for hot spares (default: 0)",
    "--node-id ID": "which node this is; restarted with the same id it takes its old place (default: "
    "--node-rank, else the number that SLURM or Kubernetes gave it, else a new one)",
    "--supervise": "start this node's ftrun again if a signal kills it, twice within ten minutes at most; it "
    "takes its old place",
    "--node-check CMD": "a shell command that must exit with 0 before this node takes a seat; otherwise the "
    "node is kept out and tries again; the last line of the command's output is the reason",
    "--node-check-timeout SECONDS": f"how long the command may take (default: {TIMEOUT:g})",
    "--node-check-retries N": "how often a node that is kept out tries again before it gives up (default: no "
    "limit; 0 on one node)",
    "--node-bench": "before ranks are first started, measure all nodes: a matrix product, and an all-gather "
    "with two other nodes; a node that fails is kept out, and a slow one named",
    "--node-bench-slower-than FACTOR": "a node is slow if it takes this many times the median of the other "
    f"nodes (default: {SLOWER_THAN:g})",
    "--node-bench-keep-out-slow": "keep a slow node out, too",
    "--notice-grace SECONDS": "how long the scheduler waits from SIGTERM to SIGKILL: ranks get a notice, to "
    "write a checkpoint in this time (default: 0: that is not known)",
    "--drain-timeout SECONDS": "SIGTERM drains this node if other nodes can continue without it: its ranks "
    "leave the job when their next step begins, or are terminated after this long (default: --notice-grace "
    "less --shutdown-timeout; 0: the job ends)",
    "--drained-exit-code N": "exit code of a node that was drained (default: 0)",
    "--job-secret-file PATH": "the job's secret, the same on all nodes, by which its processes recognize "
    f"each other in the store (default: {secret.SECRET_ENV}; else on one node, and on etcd with a login, the "
    "job makes one)",
    "--result-file PATH": "write how the job ended to this file, as JSON (default: no file)",
    "--exit-barrier-timeout SECONDS": "how long a finished node waits for the other nodes (default: "
    f"{EXIT_BARRIER_TIMEOUT:g})",
    "--log-format FORMAT": "format of the log lines, including those of the ranks' wrappers: text, or json: "
    f"one object per line (default: {FORMAT_ENV}, else text)",
    "--events DIR": "write what happens on this node to DIR/events-HOST.jsonl, for ftrun report (default: "
    f"the file that {events.ENV} names, else --log-dir, if it is given)",
    "--metrics PORT": f"answer health checks and Prometheus here; HOST:PORT too (default: {ADDRESS_ENV})",
    "--no-fork": "start each rank separately, instead of forking it from a process that has imported "
    "torch (always so with --no-python and PYTHON_EXEC)",
}


def _defaults() -> dict[str, str]:
    """As text, which a variable ``PET_…`` overrides."""
    return {
        "--rdzv-backend": NAME,
        "--rdzv-endpoint": "",
        "--monitor-interval": f"{DEFAULT_MONITOR_INTERVAL:g}",
        "--signals-to-handle": ",".join(signum.name for signum in SIGNALS),
        "--shutdown-timeout": os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{SHUTDOWN_TIMEOUT:g}"),
        "--restart-policy": Policy.AUTO.value,
        "--devices-per-node": "auto",
        "--node-check-timeout": f"{TIMEOUT:g}",
        "--node-bench-slower-than": f"{SLOWER_THAN:g}",
        "--notice-grace": "0",
        "--drained-exit-code": "0",
        "--exit-barrier-timeout": f"{EXIT_BARRIER_TIMEOUT:g}",
        "--log-format": os.environ.get(FORMAT_ENV, TEXT),
    }


# Single values ----------------------------------------------------------------------------------------------


def _value(
    convert: Callable[[str], T],
    why: str = "",
    fits: Callable[[T], bool] = lambda _: True,
    needed: bool = False,
) -> Callable[[str], T | str]:
    """Makes the function by which argparse reads a value. It leaves an empty one to `Parser.read`.

    Args:
        convert: makes a value from a text; raises an error if it cannot.
        why: what to use instead, for the error; the error of ``convert`` when empty.
        fits: whether the value is allowed.
        needed: whether a value is required, even if a variable ``PET_…`` is empty.
    """

    def read(text: str) -> T | str:
        if not text and not needed:
            return text
        said = text or "''"
        try:
            if fits(value := convert(text)):
                return value
        except (ValueError, OSError, ImportError, AttributeError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(f"{said}: {why or error}") from error
        raise argparse.ArgumentTypeError(f"{said}: {why}")

    return read


def _count(most: int = _MOST) -> Callable[[str], int | str]:
    """A count from 0; as for torchrun, spaces around it and a sign are allowed."""
    return _value(int, f"use a number of at least 0 and at most {most}", lambda count: 0 <= count <= most)


def _seconds(least: float) -> Callable[[str], float | str]:
    why = f"must be at least {least:g} and finite, at most {LONGEST} seconds"
    return _value(float, why, lambda seconds: least <= seconds <= LONGEST, needed=True)


def _one_of(*choices: str) -> Callable[[str], str]:
    """One of some words; also checks a variable, for which argparse ignores ``choices``."""
    return _value(str, f"use {', '.join(choices[:-1])} or {choices[-1]}", choices.__contains__, needed=True)


def _least_and_most(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*\+?(\d{1,9})\s*(?::\s*\+?(\d{1,9})\s*)?", text)
    if found is None or (least := int(found[1])) < 1:
        raise ValueError("use a number of at least one, or the least and the most: 2:4")
    most = int(found[2] or least)
    if least > most:
        raise ValueError(f"the least, {least}, is more than the most, {most}; swap them")
    return least, most


def _signals(text: str) -> list[signal.Signals | str]:
    """Signals by their names; an unknown name stays text."""
    return [signal.Signals.__members__.get(each.strip(), each.strip()) for each in text.split(",")]


def _is_replaced(path: str) -> bool:
    is_other = os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path))
    return not is_other and os.path.isdir(os.path.dirname(os.path.abspath(path)))


_STREAMS = _value(Std.from_str, "use 0, 1, 2 or 3, or local ranks with one each, as in 0:3,1:2", needed=True)
_READERS: dict[str, Callable[[str], Any]] = {
    "--nnodes": _value(_least_and_most, needed=True),
    "--nproc-per-node": _value(
        determine_local_world_size,
        f"use a number of at least one and at most {_MOST_RANKS}, cpu, gpu, xpu or auto, of what is here",
        lambda count: 1 <= count <= _MOST_RANKS,
        needed=True,
    ),
    "--redirects": _STREAMS,
    "--tee": _STREAMS,
    "--local-ranks-filter": _value(
        lambda text: list(map(int, text.split(","))),
        "use local ranks with commas between them, as in 0,1,2",
    ),
    "--log-dir": _value(str, "is a file; name a directory", lambda path: not os.path.isfile(path)),
    "--logs-specs": _value(_get_logs_specs_class),
    "--signals-to-handle": _value(
        _signals,
        "no program can handle SIGKILL and SIGSTOP, and ftrun needs SIGCHLD to hear of its ranks",
        {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}.isdisjoint,
    ),
    "--master-port": _count(65535),
    "--active-world-size": _value(
        int, "use a number: at least one rank has to call the function", lambda n: 0 < n <= _MOST
    ),
    "--drained-exit-code": _count(255),
    "--monitor-interval": _seconds(1e-3),
    "--node-check-timeout": _seconds(1e-3),
    "--node-bench-slower-than": _value(float, "use a number from 1 to 1000", lambda n: 1 <= n <= 1000, True),
    "--devices-per-node": _value(lambda text: text if text == "auto" else int(_count()(text))),
    "--restart-policy": _one_of(*(policy.value for policy in Policy)),
    "--log-format": _one_of(*FORMATS),
    "--result-file": _value(str, "name a file in an existing folder; it is replaced", _is_replaced),
    "--job-secret-file": _value(lambda path: secret.checked(path, Path(path).read_bytes())),
}
_BY_METAVAR = {"N": _count(), "K": _count(), "SECONDS": _seconds(0)}

# The parser ------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Takes over torchrun's options. An error is one line, and ends the program with 2.

    An error names the option, its value and the way out.

    Attributes:
        warnings: what the user should know, though the command line is valid; a line each.
    """

    def __init__(self, theirs: argparse.ArgumentParser, **more: Any) -> None:
        super().__init__(parents=[theirs], add_help=False, conflict_handler="resolve", **more)
        self._theirs = dict(theirs._option_string_actions)
        self.warnings: list[str] = []

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parses the command line. Empty values become None, unless an empty text is valid."""
        given = self.parse_args(argv)
        for action in self._actions:
            if not action.option_strings or getattr(given, action.dest, None) != "":
                continue
            option = action.option_strings[0]
            if action.default != "":  # torchrun accepts its own options empty
                say = self.warn if option in self._theirs else self.error
                say(f"{option} '': is empty; give it a value, or leave it out")
            if action.type not in (None, str):
                setattr(given, action.dest, None)
        return given

    def error(self, message: str) -> NoReturn:
        """Ends with one line, and without the usage text that would bury it."""
        message = re.sub(r"^argument (-\S+): ", _option_of, message)
        self.exit(2, f"ftrun: error: {without_secrets(message)}\n")

    def contradict(self, one: str, other: str, why: str) -> NoReturn:
        """Ends because two options contradict each other; says what to do."""
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
        """What an abbreviation may stand for: only torchrun's options, if it fits any of those."""
        found = super()._get_option_tuples(option_string)
        # An option's two spellings are one option, which not every version of argparse knows.
        matches: dict[int, Any] = {}
        for match in [match for match in found if match[1] in self._theirs] or found:
            matches.setdefault(id(match[0]), match)
        return list(matches.values())


def _option_of(found: re.Match[str]) -> str:
    """The option in an error of argparse, which lists all its spellings."""
    return f"{max(found[1].split('/'), key=lambda text: (text.count('-'), len(text)))} "


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
        ValueError: such a variable of an option without a value is not a number.
    """
    parser = Parser(
        get_args_parser(),
        prog="ftrun",
        formatter_class=_Help,
        usage="ftrun [options] script ...\n       ftrun status|report|notice|drain|restart|stop ...",
        description="Starts the ranks of a job on this machine, which may be one of several, and hosts the "
        "store that they agree on. If a rank of a wrapped job dies, only that rank is restarted.",
        epilog="As under torchrun, options may be abbreviated, written with underscores, and set by a "
        "variable: PET_NPROC_PER_NODE=2. The commands have their own help: 'ftrun status --help'.",
    )
    differs = parser.add_argument_group("options whose default or meaning is not torchrun's")
    _add(parser, differs, DIFFERENT)
    differs.add_argument(
        *_spellings("--print-completion"),
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print what the shell needs to complete the options of ftrun, and exit; needs the package shtab",
    )
    lacking = {said: help for said, help in LACKING.items() if said.split()[0] not in parser._theirs}
    _add(parser, parser, lacking)
    own = parser.add_argument_group(OWN)
    version = f"ftrun {__version__}, torch {torch.__version__}"
    own.add_argument(
        "--version", action="version", version=version, help="print the versions of ftrun and torch"
    )
    _add(parser, own, OWN_OPTIONS)
    for option, reader in _READERS.items():
        parser._option_string_actions[option].type = reader
    for option, why in EXPLAINED.items():
        parser._option_string_actions[option].help = why
    script, arguments = parser._get_positional_actions()
    script.metavar, script.help = "script", "what each rank runs"
    arguments.metavar, arguments.help = "...", "its arguments"
    return parser


def _add(parser: Parser, group: argparse._ActionsContainer, options: Mapping[str, str]) -> None:
    """Adds options with the name of their value, or flags; each replaces torchrun's in all spellings."""
    for said, help in options.items():
        option, _, metavar = said.partition(" ")
        theirs = parser._theirs.get(option)
        names = _spellings(option) if theirs is None else theirs.option_strings[:]
        if metavar:
            reader: Callable[[str], Any] = _BY_METAVAR.get(metavar, str)
            default = _defaults().get(option)
            group.add_argument(*names, help=help, action=env, metavar=metavar, default=default, type=reader)
        else:
            group.add_argument(*names, help=help, action=check_env)


def _spellings(option: str) -> tuple[str, ...]:
    return (option, f"--{name(option)}") if "-" in option[2:] else (option,)


# The result ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Launch):
    """What the command line asked for, checked.

    Args:
        script: what the command line calls the program.
        log_dir: where log files go; a temporary directory when None.
        redirects: which streams go to files instead of the console.
        tee: which streams go to files and to the console.
        local_ranks_filter: the ranks that may write to the console; all when None.
        logs_specs: what decides where log files go.
        spare_nodes: how many of the nodes have only hot spares.
        monitor_interval: seconds between two looks for waiting nodes, with handlers that do not notify.
        exit_barrier_timeout: seconds for which a node whose ranks are done waits for the other nodes.
        rendezvous: how this node finds the other nodes; None if there are none.
        address: what the user calls this node if there are no others; empty if nothing.
        port: where the ranks' store is if there are no others; 0 for a free port.
        warnings: about the command line, a line each.
        check: whether to look for what may go wrong, and to start nothing.
        log_format: format of log lines, including those of the ranks' wrappers: ``text`` or ``json``.
        node_check: what this node has to pass before it takes a seat; None: nothing.
        node_bench: how nodes are measured before their ranks are first started; None: not at all.
        result_file: where to write how the job has ended; empty for nowhere.
        drained_exit_code: of this process once its node was drained.
        secret: of the job, if the user gives it.
        variables: environment variables that options stand for.
    """

    script: str
    log_dir: str | None = None
    redirects: Std | dict[int, Std]
    tee: Std | dict[int, Std]
    local_ranks_filter: set[int] | None = None
    monitor_interval: float
    exit_barrier_timeout: float
    logs_specs: type[LogsSpecs] = DefaultLogsSpecs
    spare_nodes: int = 0
    rendezvous: RendezvousParameters | None = None
    address: str = ""
    port: int = 0
    warnings: tuple[str, ...] = ()
    check: bool = False
    log_format: str = TEXT
    node_check: NodeCheck | None = None
    node_bench: NodeBench | None = None
    result_file: str = ""
    drained_exit_code: int = 0
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Sets `variables` within the context, and makes the folder of the events."""
        before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)
        try:
            if file := self.variables.get(events.ENV):
                os.makedirs(os.path.dirname(file), 0o700, exist_ok=True)
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def logs(self, log_dir: str) -> LogsSpecs:
        """Where the streams of the ranks go; files are in this folder."""
        streams = {name: getattr(self, name) for name in ("redirects", "tee", "local_ranks_filter")}
        return self.logs_specs(log_dir=log_dir, **streams)


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Reads and checks the command line.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Raises:
        SystemExit: an argument is wrong (2; one line on stderr names it and the way out), or help was
            asked for (0).
    """
    try:
        parser = make_parser()
    except ValueError as error:  # torchrun's own parser says no more than this
        print(f"ftrun: error: PET_* of an option without a value must be 0 or 1: {error}", file=sys.stderr)
        sys.exit(2)
    args = parser.read(argv)
    args.supervised_id = os.environ.pop(NODE_ID_ENV, None)
    if args.supervise and not args.supervised_id:
        if argv is not None and [*argv] != sys.argv[1:]:
            parser.error("--supervise: main runs the job in this process; use the command ftrun")
        os.environ[NODE_ID_ENV] = ""
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # without torch
    args.rdzv_id = args.rdzv_id or DEFAULT_RDZV_ID  # torchrun's static rendezvous needs no name
    _warn_of_what_has_no_effect(parser, args)
    _warn_of_ranks(parser, args)
    try:
        from_variable = secret.given()  # which is not left in the environment
    except ValueError as error:
        parser.error(str(error))
    policy = _policy(parser, args)
    nodes = _nodes(parser, args, policy)
    backend = nodes["rendezvous"].backend if "rendezvous" in nodes else ""
    is_named = backend or not (args.standalone or args.rdzv_id == DEFAULT_RDZV_ID)
    run_id = args.rdzv_id if is_named else ""
    nproc, active, virtual = args.nproc_per_node, nodes["active_world_size"], args.virtual_local_rank
    signals, devices = _known_signals(parser, args), nodes["devices"]
    found = {
        **vars(args),
        "job": Job(nproc, args.role, run_id, args.max_restarts or 0, active, virtual, signals, devices),
        "program": _program(parser, args),
        "script": args.training_script,
        "drain_timeout": _drain_timeout(parser, args, backend),
        "policy": policy,
        "forks": not args.no_fork,
        "variables": _variables(args),
        "log_line_prefix": _log_line_prefix(parser, args),
        "node_check": _node_check(parser, args, backend),
        "node_bench": _node_bench(parser, args, backend),
        "secret": args.job_secret_file or from_variable,
        **nodes,
        "warnings": tuple(parser.warnings),
    }
    fields = {field.name for field in dataclasses.fields(Options)}
    return Options(**{key: value for key, value in found.items() if key in fields and value is not None})


def _variables(args: argparse.Namespace) -> dict[str, str]:
    """What options stand for, for this process and the ranks."""
    found = {ADDRESS_ENV: args.metrics} if args.metrics else {}
    if args.notice_grace:
        found[GRACE_ENV] = f"{args.notice_grace:g}"
    folder = args.events or ("" if os.environ.get(events.ENV) else args.log_dir)
    if folder and folder != os.devnull:
        found[events.ENV] = os.path.abspath(os.path.join(folder, f"events-{socket.gethostname()}.jsonl"))
    return found


def _warn_of_what_has_no_effect(parser: Parser, args: argparse.Namespace) -> None:
    for option, instead in NO_EFFECT.items():
        value = getattr(args, name(option))
        if value and value != NO_HANDLER:
            shown = ",".join(value) if isinstance(value, list) else value
            parser.warn(f"{option} {shown}: has no effect here; {instead}")
    unknown = parser.unknown()
    defaults = parser.parse_args([args.training_script]) if unknown else args
    for action in unknown:
        value = getattr(args, action.dest)
        if value != getattr(defaults, action.dest) or f"PET_{action.dest.upper()}" in os.environ:
            given = action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]} {value}"
            parser.warn(f"{given}: has no effect here: this version of ftrun does not know that option")
    error_file = os.environ.get(ERROR_FILE_ENV, "")
    if error_file and not os.path.isdir(os.path.dirname(os.path.abspath(error_file))):
        parser.warn(f"{ERROR_FILE_ENV}={error_file}: no effect: there is no such folder")


def _warn_of_ranks(parser: Parser, args: argparse.Namespace) -> None:
    """Leaves out local ranks that do not exist."""
    nproc = args.nproc_per_node
    for option in ("--redirects", "--tee", "--local-ranks-filter"):
        ranks = getattr(args, name(option))
        if not isinstance(ranks, dict | list):
            continue
        if missing := sorted(set(ranks).difference(range(nproc))):
            each = ranks.items() if isinstance(ranks, dict) else [(rank,) for rank in ranks]
            given = ",".join(":".join(f"{part:d}" for part in parts) for parts in each)
            there = f"there is no local rank {', '.join(map(str, missing))} with --nproc-per-node {nproc}"
            parser.warn(f"{option} {given}: {there}; that part has no effect")
        if isinstance(ranks, dict):
            setattr(args, name(option), {rank: std for rank, std in ranks.items() if rank < nproc})
        else:
            args.local_ranks_filter = set(ranks)


def _known_signals(parser: Parser, args: argparse.Namespace) -> tuple[signal.Signals, ...]:
    given = args.signals_to_handle or ()
    said = f"--signals-to-handle {','.join(each if isinstance(each, str) else each.name for each in given)}"
    for each in filter(lambda each: isinstance(each, str), given):
        parser.warn(f"{said}: no signal is named {each!r}, left out; names are as in SIGTERM,SIGUSR1")
    return tuple(each for each in given if not isinstance(each, str))


def _log_line_prefix(parser: Parser, args: argparse.Namespace) -> str | None:
    given = args.log_line_prefix_template or os.environ.get(PREFIX_ENV) or None
    template = string.Template(given or "")
    if not template.is_valid() or not PREFIX_WORDS.issuperset(template.get_identifiers()):
        names = ", ".join(f"${{{word}}}" for word in sorted(PREFIX_WORDS))
        parser.warn(f"--log-line-prefix-template {given}: only {names} are filled in")
    return given


def _program(parser: Parser, args: argparse.Namespace) -> Program:
    script, arguments = str(args.training_script), tuple(args.training_script_args)
    python = os.environ.get("PYTHON_EXEC")
    if args.run_path:  # by this Python, as under torchrun
        if superfluous := [each for each in ("--no-python", "--module") if getattr(args, name(each))]:
            parser.warn(f"--run-path: makes {' and '.join(superfluous)} superfluous: python runs {script}")
        args.no_python, args.module, python = False, False, None
    if args.no_python and args.module:
        parser.contradict("--no-python", "--module", "a module needs python; drop one of them")
    if args.no_python:
        if (path := shutil.which(script)) is None:
            parser.error(f"script {script}: no such program, or not executable (--no-python: without python)")
        return Program((path, *arguments))
    if args.module:
        # Another Python has other modules, and reports itself what it lacks.
        if python is None and not _module_exists(script):
            parser.error(f"module {script}: not found, or without __main__; install it or set PYTHONPATH")
    elif not os.path.exists(script):
        parser.error(f"script {script}: no such file in {os.getcwd()}; for a module's name give -m")
    program = python_program(script, arguments, is_module=args.module, python=python)
    # Another Python may have another torch, or none; and compiled files are left to Python itself.
    return Program(program.command) if python is not None or script.endswith(".pyc") else program


def _policy(parser: Parser, args: argparse.Namespace) -> Policy:
    policy = Policy(args.restart_policy)
    option = {Policy.RANK: "--max-restarts", Policy.GROUP: "--max-rank-restarts"}.get(policy, "")
    if option and (value := getattr(args, name(option))) is not None:
        why = f"{option} limits what this policy never does; drop one of them"
        parser.contradict(f"{option} {value}", f"--restart-policy {policy.value}", why)
    return policy


def _module_exists(name: str) -> bool:
    """Whether ``python -m name`` would find it, without importing anything: its packages may do a lot."""
    parts, where = [*name.split("."), "__main__"], None
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]  # Python skips others, too
    sys.path.insert(0, os.getcwd())
    try:
        for end in range(1, len(parts) + 1):
            found = (finder.find_spec(".".join(parts[:end]), where) for finder in finders)
            if (spec := next(filter(None, found), None)) is None:
                return False
            if spec.submodule_search_locations is None:  # not a package
                return end >= len(parts) - 1
            where = list(spec.submodule_search_locations)
    except (KeyError, ImportError):
        pass  # the path of a namespace package in another one is not known before the outer one's import
    finally:
        sys.path.pop(0)
    return True


# Nodes -----------------------------------------------------------------------------------------------------


def _nodes(parser: Parser, args: argparse.Namespace, policy: Policy) -> dict[str, Any]:
    """How many nodes the job has, and how they find each other, as fields of `Options`."""
    (least, most), nproc = args.nnodes, args.nproc_per_node
    spares = _spare_nodes(parser, args, policy)
    if args.standalone:
        if least > 1 or spares:  # torchrun waits in vain for other nodes then
            other = f"--nnodes {_shown(args.nnodes)}" if least > 1 else f"--spare-nodes {spares}"
            parser.contradict("--standalone", other, "this node is alone, or it is not; drop one of them")
        most = 1
    active = _active_world_size(parser, args, most, nproc, spares)
    found = {"active_world_size": active, "devices": _devices(parser, args, most, spares, active)}
    is_alone = args.standalone or (most + spares == 1 and not args.rdzv_endpoint)
    if not args.standalone:
        known = {STATIC, *OURS, *rendezvous_handler_registry._registry}
        if args.rdzv_backend not in known:
            names = ", ".join(sorted(known))
            parser.error(f"--rdzv-backend {args.rdzv_backend}: there is no such backend; use {names}")
        _check_node_rank(parser, args, most + spares, is_alone)
    port = DEFAULT_MASTER_PORT if args.master_port is None else args.master_port
    if is_alone:
        _warn_of_what_is_superfluous(parser, args)
        # As torchrun, which has a free one with --standalone; a script may name it: init_method="tcp://…".
        own = 0 if args.standalone else args.master_port or 0
        return {**found, "address": without_brackets(args.master_addr or ""), "port": own}
    endpoint = _endpoint(parser, args, port, spares)
    if args.rdzv_backend in ETCD_NAMES and args.rdzv_id == DEFAULT_RDZV_ID:
        parser.error(f"--rdzv-backend {args.rdzv_backend} needs --rdzv-id ID: it tells the jobs there apart")
    parameters = _parameters(parser, args, endpoint, least, most + spares, nproc)
    return {**found, "spare_nodes": spares, "rendezvous": parameters}


def _spare_nodes(parser: Parser, args: argparse.Namespace, policy: Policy) -> int:
    spares: int = args.spare_nodes or 0
    if spares == 0:
        return 0
    said = f"--spare-nodes {spares}"
    if args.active_world_size is not None:
        other = f"--active-world-size {args.active_world_size}"
        parser.contradict(said, other, "both say how many ranks are active; drop one of them")
    if policy is Policy.GROUP:
        why = "all ranks are restarted, spare or not; drop one (nodes beyond the most of --nnodes wait)"
        parser.contradict(said, "--restart-policy group", why)
    if args.rdzv_backend not in (*OURS, STATIC):
        why = f"there, each lost node ends all ranks; use --rdzv-backend {NAME}"
        parser.contradict(said, f"--rdzv-backend {args.rdzv_backend}", why)
    return spares


def _active_world_size(
    parser: Parser, args: argparse.Namespace, most: int, nproc: int, spares: int
) -> int | None:
    if spares:
        return most * nproc
    active: int | None = args.active_world_size
    if active is not None and active > most * nproc:
        parser.error(
            f"--active-world-size {active}: is more than the {most * nproc} ranks of a job with "
            f"--nnodes {_shown(args.nnodes)} and --nproc-per-node {nproc}; start more of them, or lower it"
        )
    return active


def _devices(parser: Parser, args: argparse.Namespace, most: int, spares: int, active: int | None) -> int:
    """Finds `Job.devices`; ends the program if there are too few."""
    nproc, is_auto = args.nproc_per_node, args.devices_per_node == "auto"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if args.virtual_local_rank and visible is not None and len(visible.split(",")) < nproc:
        parser.error(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={visible} has fewer GPUs than there are ranks with "
            f"--nproc-per-node {nproc}; start as many ranks as GPUs"
        )
    if active is None or active >= (most + spares) * nproc:
        return 0
    # Asking for GPUs asks NVML, and makes no context.
    count = torch.cuda.device_count() if is_auto else args.devices_per_node or 0
    if not 2 <= count < nproc:  # ranks that share a single one are assumed to do so on purpose
        return 0
    given = f"--spare-nodes {spares}" if spares else f"--active-world-size {active}"
    given = f"--nproc-per-node {nproc} {given}"
    ways = f"start {count} ranks a node, with --spare-nodes; or give --devices-per-node 0 if they may share"
    if args.virtual_local_rank:
        parser.contradict(given, "--virtual-local-rank", f"a spare sees no lost rank's device; {ways}")
    if active > most * count:
        ways = ways if spares else f"lower --active-world-size to {most * count}; or {ways}"
        parser.error(f"{given}: there are {most} x {count} devices for {active} active ranks; {ways}")
    if most > 1:
        parser.warn(f"{given}: only spares that stay on their node have a device there: see Tree; or {ways}")
    return count


def _check_node_rank(parser: Parser, args: argparse.Namespace, most: int, is_alone: bool) -> None:
    rank: int | None = args.node_rank
    if rank is None or args.rdzv_backend not in (STATIC, *OURS):
        return  # a platform sets it in any case; torchrun does not use it then, either
    # torchrun looks for the other nodes of this one node, in vain, if there is a port to look at.
    if rank >= most and (args.master_port is not None or not is_alone):
        parser.error(
            f"--node-rank {rank}: with {most} {'nodes' if most > 1 else 'node'} the last one is {most - 1}; "
            "set their number with --nnodes; a node that is to wait for a free place takes --node-id "
            "ID instead"
        )
    if args.node_id not in (None, str(rank)):
        why = "nodes are ranked by their ids; drop one of them"
        parser.contradict(f"--node-rank {rank}", f"--node-id {args.node_id}", why)


def _warn_of_what_is_superfluous(parser: Parser, args: argparse.Namespace) -> None:
    """Says which options have no effect on a node that meets no other."""
    options = [
        ("--rdzv-backend", args.rdzv_backend, (NAME, STATIC)),
        ("--rdzv-conf", args.rdzv_conf, ()),
        ("--node-rank", args.node_rank, (0,)),
        ("--node-id", args.node_id, ()),
    ]
    if args.standalone:
        options += [
            ("--nnodes", _shown(args.nnodes), ("1",)),
            ("--rdzv-endpoint", args.rdzv_endpoint, ()),
            ("--rdzv-id", args.rdzv_id, (DEFAULT_RDZV_ID,)),
            ("--master-port", args.master_port, ()),
        ]
    nothing = (None, "")
    given = ", ".join(f"{option} {one}" for option, one, usual in options if one not in (*nothing, *usual))
    if given:
        why = "with --standalone" if args.standalone else "on one node without --rdzv-endpoint"
        parser.warn(f"{given}: no effect {why}, as this node meets no other")


def _endpoint(parser: Parser, args: argparse.Namespace, port: int, spares: int) -> str:
    """Where the nodes meet; by default, where torchrun's do."""
    if args.rdzv_endpoint:
        return str(args.rdzv_endpoint)
    what = f"--nnodes {_shown(args.nnodes)}" + (f" with --spare-nodes {spares}" if spares else "")
    if args.rdzv_backend in ETCD_NAMES:
        parser.error(f"{what} needs --rdzv-endpoint HOST:PORT: etcd's members, the same on all")
    if args.master_addr or args.master_port is not None:  # as torchrun's static rendezvous has it
        return f"{args.master_addr or DEFAULT_MASTER_ADDR}:{port}"
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
    if args.local_addr and (why := why_unknown(args.local_addr)):
        # No error: a pod's own name is known a little after the pod begins.
        parser.warn(f"--local-addr {args.local_addr}: others reach this node by it; here it is {why}")
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
    for key, hint in unknown_options(backend, config).items():
        parser.warn(f"--rdzv-conf {key}={config.pop(key)}: no effect: there is no such option; {hint}")
    if config.get("store_type", "tcp").lower() != "tcp":
        parser.warn(f"--rdzv-conf store_type={config.pop('store_type')}: no effect: the store is tcp here")
    rank = None if args.node_rank is None else str(args.node_rank)
    for key, option, value in (
        ("node_id", "--node-id" if args.node_id else "--node-rank", args.node_id or rank),
        ("nproc", "--nproc-per-node", str(nproc)),
        ("role", "--role", args.role),
    ):
        if config.get(key, value) != value and value is not None:
            parser.warn(f"--rdzv-conf {key}={config[key]}: no effect: {option} says {value}")
        if value is not None:
            config[key] = value
    if args.supervised_id and node_id_from_environment() is None:  # an index takes no living node's place
        config.setdefault("node_id", args.supervised_id)
    if rank and backend == NAME and (args.rdzv_backend == STATIC or not args.rdzv_endpoint):
        # As in torch's static rendezvous, whatever the name of the endpoint leads to: a proxy, a service.
        config.setdefault("is_host", str(rank == "0").lower())
    return config


def _shown(nnodes: tuple[int, int]) -> str:
    """The least and the most nodes, as the command line has them."""
    return ":".join(map(str, sorted(set(nnodes))))


# What a node has to pass before it takes a seat; how it leaves ----------------------------------------------


def _node_check(parser: Parser, args: argparse.Namespace, backend: str) -> NodeCheck | None:
    """What this node has to pass; ``backend`` is how the nodes meet, empty if this one is alone."""
    command = args.node_check or ""
    if backend and backend not in OURS and command:
        why = f"there, the other nodes wait for a node that stays out; use --rdzv-backend {NAME}"
        parser.contradict(f"--node-check {command}", f"--rdzv-backend {backend}", why)
    retries = args.node_check_retries if backend else args.node_check_retries or 0
    # poll waits for at most about 25 days
    return NodeCheck(command, min(args.node_check_timeout, 1e6), retries) if command else None


def _node_bench(parser: Parser, args: argparse.Namespace, backend: str) -> NodeBench | None:
    """How the nodes are measured; ``backend`` is how they meet, empty if this one is alone."""
    if not args.node_bench:
        return None
    if not backend:
        parser.warn("--node-bench: no effect on one node, which can be compared with no other")
    elif backend not in OURS:
        why = f"there, the other nodes wait for a node that stays out; use --rdzv-backend {NAME}"
        parser.contradict("--node-bench", f"--rdzv-backend {backend}", why)
    slow = {"slower_than": args.node_bench_slower_than, "keeps_out_slow": bool(args.node_bench_keep_out_slow)}
    return NodeBench(retries=args.node_check_retries, **slow)


def _drain_timeout(parser: Parser, args: argparse.Namespace, backend: str) -> float:
    """For how long SIGTERM drains this node; warns if it cannot."""
    grace: float = args.notice_grace
    if 0 < grace <= args.shutdown_timeout:
        end = f"--shutdown-timeout {args.shutdown_timeout:g}"
        parser.contradict(f"--notice-grace {grace:g}", end, "ranks need time before it; give more grace")
    given = args.drain_timeout is not None
    seconds: float = args.drain_timeout if given else max(0.0, grace - args.shutdown_timeout)
    if backend in OURS or not seconds or (grace and not backend):
        return seconds
    option = f"--drain-timeout {seconds:g}" if given else f"--notice-grace {grace:g}"
    where = f"with --rdzv-backend {backend}; use {NAME} or etcd" if backend else "on one node"
    parser.warn(f"{option}: no effect {where}")
    return 0.0
