"""How often the kernel has killed for lack of memory. It says so to no one, but it counts.

It counts before it sends the SIGKILL, by cgroup: the one that this process and its ranks are in, and those
below it.
"""

import functools
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def count_kernel_kills(events: Path | None = None) -> int:
    """How many processes the kernel has killed here for lack of memory; 0 where it does not tell.

    Args:
        events: the cgroup's file ``memory.events``; that of this process when None.
    """
    events = events or _own_events()
    try:
        fields = dict(line.split() for line in events.read_text().splitlines()) if events else {}
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):  # cgroups of version 1, or a machine without a cgroup of ours
        return 0


@functools.cache
def _own_events() -> Path | None:
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in groups if line.startswith("0::")), None)
    return None if path is None else _CGROUPS / path.lstrip("/") / "memory.events"
