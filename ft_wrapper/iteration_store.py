"""Where ``torch.distributed`` meets in one iteration: a store of its own, and the variables that lead there.

With it a plain ``init_process_group(backend)`` works in every iteration, and no key of an earlier one is ever
seen. The monitor of the iteration's active rank 0 opens it before anyone enters: clients that come before
their server back off for half a second and more.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from .store import HoldingStore, PrefixStore

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
_TIMEOUT = timedelta(seconds=300)


class Environment:
    """The environment variables that the wrapper changes, as they were."""

    def __init__(self) -> None:
        self._saved = {name: os.environ.get(name) for name in VARIABLES}

    def restore(self) -> None:
        """Puts them back."""
        for name, value in self._saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def point_to(host: str, port: int) -> None:
    """Sets the variables so that ``init_process_group`` finds the iteration's store."""
    os.environ["MASTER_ADDR"] = host
    os.environ["MASTER_PORT"] = str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def connect(n: int) -> PrefixStore:
    """A client of the iteration's store, for the function's own use.

    On that store, so that aborting the iteration frees anyone who waits there; and without trying again.

    Args:
        n: the iteration.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    return PrefixStore(n, HoldingStore(client))
