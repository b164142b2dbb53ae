"""``ftrun --supervise``: a small process that starts ``ftrun``, and starts it again if a signal kills it.

It imports no torch: the ``ftrun`` that has read its options with torch becomes it, by exec. Its own
``ftrun``, the agent, is in the same process group, and is killed when it dies.
"""

import logging
import os
import select
import subprocess
import sys
import time

from ..agent.signals import FORWARDED, SIGNALS, SignalQueue, die_with, original, queued, signal_name
from ..log_lines import install
from ..rendezvous.node_ids import NODE_ID_ENV, new_node_id, node_id_from_environment

# The name of the public module.
log = logging.getLogger("ft_wrapper.run")

_MOST, _WITHIN = 3, 600.0  # deaths, seconds


def supervise() -> int:
    """Runs this command as an agent, and as another one if a signal kills that. Main thread only.

    After a signal that ends the job, which is forwarded, no other agent is started.

    Returns:
        The exit code of the last agent; 128 and the number of the signal if one has killed it.
    """
    install()  # as an agent's are with FT_WRAPPER_LOG_FORMAT alone: its options are not known here
    os.environ[NODE_ID_ENV] = node_id_from_environment() or new_node_id()
    command, pid, deaths = [sys.executable, *sys.orig_argv[1:]], os.getpid(), list[tuple[float, str]]()
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
