"""Which nodes take part in a job: they meet, agree on the members, and notice lost nodes.

Agents use `handler`, configured by `settings`, on one of the `backends`. Below: `record` (what the nodes
agree on), `moves` and `operations` (all decisions, pure), `executor` and `register` (carry out decisions on a
store), `presence` (heartbeats and watching). Separate: `drains`.

Stock ``torchrun --rdzv-backend=ft`` finds `get_handler` by the entry point group ``torchrun.handlers``. It
loads this file while torch's own rendezvous is half imported, so it imports nothing from torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """The entry point: returns a function that makes a handler; see `handler.create_handler`."""

    def create(parameters: "RendezvousParameters") -> "RendezvousHandler":
        from .handler import create_handler

        return create_handler(parameters)

    return create
