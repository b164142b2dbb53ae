"""The command line of ``ftrun``: which options there are, what they are called and what they mean."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

import torch
from torch.distributed.argparse_util import check_env, env

from .. import __version__
from ..rendezvous.backend import DEFAULT_PORT
from ..rendezvous.settings import ETCD_NAMES, NAME
from .defaults import EXIT_BARRIER_TIMEOUT, RANK_RESTARTS, SHUTDOWN_TIMEOUT, SIGNALS
from .policy import Policy

DEFAULT_MONITOR_INTERVAL = 0.1  # torchrun's
DEFAULT_RDZV_ID = "none"  # torchrun's
DEFAULT_MASTER_ADDR = "127.0.0.1"  # torchrun's
DEFAULT_MASTER_PORT = 29500  # torchrun's

NOT_THERE = {
    "--event-log-handler": "events are written as JSON lines to the file that FT_WRAPPER_EVENTS names",
    "--numa-binding": "bind ranks in the script, by os.sched_setaffinity, or by numactl and --no-python",
    "--duplicate-stdout-filters": "search the log files, with --tee 1 or --redirects 1",
    "--duplicate-stderr-filters": "search the log files, with --tee 2 or --redirects 2",
}
"""Options of torchrun's that would have a meaning, but are not there: what to do instead."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and end the program with 2."""

    def error(self, message: str) -> NoReturn:
        """Ends with one line, and without the usage text that would bury it."""
        self.exit(2, f"ftrun: error: {message}\n")


def make_parser() -> Parser:
    """All options of ``ftrun``, each also set by a variable ``PET_…`` as torchrun's are."""
    parser = Parser(
        prog="ftrun",
        usage="ftrun [options] script ...\n"
        "       ftrun status [ENDPOINT]       how a job stands\n"
        "       ftrun report EVENTS ...       what its restarts took",
        description="Starts the ranks of a job on this machine, which may be one of several, and hosts the "
        "store that they agree on. A rank of a wrapped job that dies is started again alone.",
        epilog="Options mean the same as torchrun's and can be set by the same PET_* environment variables. "
        "'ftrun status --help' and 'ftrun report --help' tell of these.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"ftrun {__version__}, torch {torch.__version__}"
    )
    parser.add_argument(
        *_spellings("--nproc-per-node"),
        action=env,
        default="1",
        metavar="N",
        help="number of ranks: a number, cpu, gpu, xpu or auto (default: 1)",
    )
    parser.add_argument(
        "--nnodes",
        action=env,
        default="1",
        metavar="MIN[:MAX]",
        help="number of machines, each with an ftrun of its own: a number, or the least and the most "
        "(default: 1)",
    )
    parser.add_argument(
        *_spellings("--rdzv-backend"),
        action=env,
        default=NAME,
        metavar="NAME",
        help=f"how the nodes find each other: {NAME}; {ETCD_NAMES[0]}; or one of torch's, c10d for instance "
        f"(default: {NAME})",
    )
    parser.add_argument(
        *_spellings("--rdzv-endpoint"),
        action=env,
        default="",
        metavar="HOST:PORT",
        help=f"where they do: with {NAME} and c10d the node of that name hosts the store (default port: "
        f"{DEFAULT_PORT}); with {ETCD_NAMES[0]} all its members: HOST:PORT,HOST:PORT",
    )
    parser.add_argument(
        *_spellings("--rdzv-id"),
        action=env,
        default=DEFAULT_RDZV_ID,
        metavar="ID",
        help=f"the job, the same on all nodes; {ETCD_NAMES[0]} needs one of the job's own "
        "(default: %(default)s)",
    )
    parser.add_argument(
        *_spellings("--rdzv-conf"),
        action=env,
        default="",
        metavar="NAME=VALUE,...",
        help="further options of the rendezvous: join_timeout=600,last_call_timeout=30",
    )
    parser.add_argument("--standalone", action=check_env, help="this node alone: no rendezvous option counts")
    parser.add_argument(
        *_spellings("--node-rank"),
        action=env,
        default="",
        metavar="N",
        help="which node this is, from 0: nodes are ranked in this order; with --master-addr, node 0 hosts "
        "the rendezvous store",
    )
    parser.add_argument(
        *_spellings("--master-addr"),
        action=env,
        default="",
        metavar="HOST",
        help="with --master-port another way to write --rdzv-endpoint HOST:PORT, which comes first "
        f"(default: {DEFAULT_MASTER_ADDR}, if there is a port)",
    )
    parser.add_argument(
        *_spellings("--master-port"),
        action=env,
        default="",
        metavar="PORT",
        help=f"see there (default: {DEFAULT_MASTER_PORT}, if there is an address); on one node, the port of "
        "the ranks' store (default: a free one)",
    )
    parser.add_argument(
        *_spellings("--local-addr"),
        action=env,
        default=None,
        metavar="ADDRESS",
        help="how the other nodes reach this one (default: found out)",
    )
    parser.add_argument(
        *_spellings("--node-id"),
        action=env,
        default=None,
        metavar="ID",
        help="which node this is; started again with the same id it takes its own place (default: "
        "--node-rank, else the number that SLURM or Kubernetes gave it, else a new one)",
    )
    parser.add_argument(
        *_spellings("--monitor-interval"),
        action=env,
        default=str(DEFAULT_MONITOR_INTERVAL),
        metavar="SECONDS",
        help=f"how often to look whether nodes wait; not with {NAME}, which tells (default: %(default)s)",
    )
    parser.add_argument(
        *_spellings("--exit-barrier-timeout"),
        action=env,
        default=str(EXIT_BARRIER_TIMEOUT),
        metavar="SECONDS",
        help="how long a node whose ranks are done waits for the other nodes (default: %(default)s)",
    )
    parser.add_argument(
        "--role", action=env, default="default", help="name of the ranks in log lines (default: default)"
    )
    parser.add_argument(
        "-m", "--module", action=check_env, help="script is a module's name, as for python -m"
    )
    parser.add_argument(
        *_spellings("--no-python"), action=check_env, help="script is a program: execute it without python"
    )
    parser.add_argument(
        *_spellings("--log-dir"),
        action=env,
        default=None,
        help="directory for log files; each run makes one of its own in it (default: a temporary one)",
    )
    parser.add_argument(
        "-r",
        "--redirects",
        action=env,
        default="0",
        help="streams that go to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both, "
        "for all ranks, or by local rank: 0:3,1:2 (default: 0)",
    )
    parser.add_argument(
        "-t",
        "--tee",
        action=env,
        default="0",
        help="streams that go to log files and to the console; as --redirects",
    )
    parser.add_argument(
        *_spellings("--local-ranks-filter"),
        action=env,
        default="",
        metavar="RANKS",
        help="only these local ranks write to the console: 0,1,2 (default: all)",
    )
    parser.add_argument(
        *_spellings("--signals-to-handle"),
        action=env,
        default=",".join(signum.name for signum in SIGNALS),
        metavar="SIGNALS",
        help="signals that are forwarded to the ranks and end the job (default: %(default)s)",
    )
    parser.add_argument(
        *_spellings("--shutdown-timeout"),
        action=env,
        default=os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT)),
        metavar="SECONDS",
        help="from a forwarded signal to SIGKILL (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else "
        f"{SHUTDOWN_TIMEOUT:g})",
    )
    parser.add_argument(
        *_spellings("--restart-policy"),
        action=env,
        default=Policy.AUTO.value,
        metavar="POLICY",
        help="when a rank fails: rank: it is started again alone; group: all are ended and restarted; "
        "auto: group, and rank once a wrapped job has formed (default: auto)",
    )
    parser.add_argument(
        *_spellings("--max-restarts"),
        action=env,
        default=None,
        metavar="N",
        help="how often all ranks may be restarted (default: 0)",
    )
    parser.add_argument(
        *_spellings("--max-rank-restarts"),
        action=env,
        default=None,
        metavar="N",
        help=f"how often each rank may be started again alone (default: {RANK_RESTARTS})",
    )
    parser.add_argument(
        *_spellings("--no-standby"),
        action=check_env,
        help="start each rank by itself, instead of forking it from a process that has imported torch "
        "(always so with --no-python and PYTHON_EXEC)",
    )
    parser.add_argument(
        *_spellings("--active-world-size"),
        action=env,
        default=None,
        metavar="N",
        help="so many ranks call the function of a wrapped job, the others are hot spares (default: all)",
    )
    parser.add_argument(
        *_spellings("--spare-nodes"),
        action=env,
        default="0",
        metavar="K",
        help="K nodes more than --nnodes says take part, and as many ranks as they have are hot spares "
        "(default: 0)",
    )
    parser.add_argument(
        *_spellings("--virtual-local-rank"),
        action=check_env,
        help="each rank sees its own GPU only: CUDA_VISIBLE_DEVICES names it, and LOCAL_RANK is 0",
    )
    parser.add_argument(
        *_spellings("--logs-specs"),
        default=None,
        metavar="NAME",
        help="where log files go is decided by an installed package: its entry point of this name in "
        "torchrun.logs_specs",
    )
    _add_what_is_not_there(parser)
    parser.add_argument("script", help="what each rank runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _add_what_is_not_there(parser: Parser) -> None:
    """Options of torchrun's that change nothing here; and those in `NOT_THERE`."""
    parser.add_argument(
        *_spellings("--start-method"),
        action=env,
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help="changes nothing: it is for functions, and ranks run scripts",
    )
    parser.add_argument(
        *_spellings("--run-path"),
        action=check_env,
        help="changes nothing: ranks that are forked run the script in this way in any case",
    )
    for option in NOT_THERE:
        parser.add_argument(*_spellings(option), action=env, default="", help=argparse.SUPPRESS)


def _spellings(option: str) -> tuple[str, str]:
    return option, "--" + option[2:].replace("-", "_")
