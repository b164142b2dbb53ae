"""``ftrun --supervise``: a small process that starts ``ftrun``, and starts it again if a signal kills it.

It imports no torch. Its ``ftrun``, the agent, is in the same process group, and is killed when it dies.
"""

import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence

from ..agent.signals import FORWARDED, SIGNALS, SignalQueue, die_with, original, queued, signal_name
from ..log_lines import install
from ..rendezvous.node_ids import NODE_ID_ENV, new_node_id, node_id_from_environment

# The name of the public module.
log = logging.getLogger("ft_wrapper.run")

VARIABLE = "PET_SUPERVISE"
#: Options without a value: where the script begins has to be known without torch, and so without the parser.
FLAGS = (
    *("-h", "-m", "--help", "--module", "--no-python", "--run-path", "--standalone", "--virtual-local-rank"),
    *("--check", "--no-fork", "--no-standby", "--supervise", "--version"),
)
_MOST, _WITHIN = 3, 600.0  # deaths, seconds


def supervised_arguments(words: Sequence[str]) -> list[str]:
    """The arguments of the agent; none if it is not to be supervised.

    Args:
        words: those of this process. ``--supervise`` after the script is the script's.
    """
    rest, position = [*words], 0
    is_wanted = os.environ.get(VARIABLE) == "1" and bool(os.environ.pop(VARIABLE))  # an agent refuses it
    while position < len(rest) and rest[position].startswith("-") and rest[position].strip("-"):
        option = rest[position].replace("_", "-")
        if len(option) > 3 and "--supervise".startswith(option):
            is_wanted = bool(rest.pop(position))
            continue
        has_value = "=" in option or (option[1] != "-" and len(option) > 2)  # --nnodes=2, -t3
        position += 1 if has_value or any(flag.startswith(option) for flag in FLAGS) else 2
    return rest if is_wanted else []


def supervise(arguments: Sequence[str]) -> int:
    """Runs an agent, and another one in its place if a signal kills it. Main thread only.

    After a signal that ends the job, which is forwarded, no other agent is started.

    Args:
        arguments: of the agent.

    Returns:
        The exit code of the last agent; 128 and the number of the signal if one has killed it.
    """
    install()  # as an agent's are with FT_WRAPPER_LOG_FORMAT alone: its options are not known here
    command = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1], *arguments]
    if node_id_from_environment() is None:  # a scheduler's index is the next agent's, too
        os.environ[NODE_ID_ENV] = new_node_id()
    pid, deaths = os.getpid(), list[tuple[float, str]]()
    with queued(SIGNALS) as signals:
        while True:
            began = time.monotonic()
            agent = subprocess.Popen(command, close_fds=False, preexec_fn=lambda: die_with(pid))
            agent.returncode, was_killed = _await_end(agent.pid, signals)
            if not was_killed:
                return agent.returncode
            now, how = time.monotonic(), signal_name(agent.returncode - 128)
            deaths = [death for death in deaths if now - death[0] < _WITHIN] + [(now, how)]
            words = f"ftrun (pid {agent.pid}) was killed by {how} after {now - began:.0f} s; "
            if len(deaths) == _MOST:
                ago = ", ".join(f"{how} {now - when:.0f} s ago" for when, how in deaths)
                log.error("%sit is not started again: %d deaths within 10 min, by %s", words, _MOST, ago)
                return agent.returncode
            log.warning("%sstarting it again (%d of %d within 10 min)", words, len(deaths), _MOST - 1)


def _await_end(pid: int, signals: SignalQueue) -> tuple[int, bool]:
    """Waits for a child; forwards signals to it, and reaps the orphans that PID 1 of a container gets.

    Returns:
        The exit code, 128 and its number for a signal; and whether a signal has killed it, and none that ends
        the job was forwarded.
    """
    is_over = False
    while True:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            if ended.si_pid == pid:
                was_killed = ended.si_code != os.CLD_EXITED
                code = 128 + original(ended.si_status) if was_killed else ended.si_status
                return code, was_killed and not is_over
        select.select([signals.fd], [], [])
        for signum in signals.read():
            if signum in FORWARDED:
                is_over |= signum in signals.ending
                os.kill(pid, FORWARDED[signum])
