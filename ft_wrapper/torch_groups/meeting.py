"""Where the groups of an iteration meet: each iteration has a store, which torch's variables point to.

So a plain ``init_process_group(backend)`` starts afresh in each iteration, and sees no key of an earlier one.
The monitor of the iteration's active rank 0 opens the store before any rank enters. A client that connects
before its server is there would back off for half a second and more.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ..store.base import HoldingStore, PrefixStore

_OF_THE_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_VARIABLES = (*_OF_THE_RANK, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
_STORE_TIMEOUT = timedelta(seconds=300)


@contextlib.contextmanager
def variables_restored() -> Iterator[None]:
    """At its end, restores the environment variables that the wrapper changes."""
    saved = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(saved)


def point_to(host: str, port: int) -> None:
    """Sets the variables so that ``init_process_group`` finds the iteration's store."""
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def connect_to_store(n: int) -> PrefixStore:
    """Connects to the iteration's store, for the function's own use.

    On this store the abort of the iteration frees every waiting thread. The client does not retry.

    Args:
        n: number of the iteration.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    return PrefixStore(n, HoldingStore(client))
