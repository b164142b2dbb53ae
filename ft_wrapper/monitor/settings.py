"""The times a monitor keeps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MonitorSettings:
    """What a monitor needs to know of the wrapper's settings. All in seconds.

    Args:
        soft_timeout: no progress for so long restarts everybody.
        hard_timeout: no progress for so long ends the process.
        termination_grace_time: from SIGTERM to SIGKILL.
        interval: how late a missed event is noticed at the most.
        watchdog_interval: how old an automatic stamp of progress may be.
        heartbeat_interval: between two requests of a heart, which beats and looks at others in turn.
        heartbeat_timeout: no heartbeat for so long, and a member is silent.
        barrier_timeout: how long to keep at telling the others.
        join_window: for how long joins are gathered.
        replaced: whether the rank's process is started again if it dies, and can join.
    """

    soft_timeout: float
    hard_timeout: float
    termination_grace_time: float
    interval: float
    watchdog_interval: float
    heartbeat_interval: float
    heartbeat_timeout: float
    barrier_timeout: float
    join_window: float = 1.0
    replaced: bool = False
