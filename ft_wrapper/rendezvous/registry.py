"""How stock ``torchrun --rdzv-backend=ft`` finds the handler: the entry point group ``torchrun.handlers``.

torch loads this while its own rendezvous package is being imported, so nothing of that is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point names: returns what makes a handler."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Makes a handler, see `ft_wrapper.rendezvous.handler.create_handler`."""
    from .handler import create_handler as create

    return create(parameters)
