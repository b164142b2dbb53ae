"""A kept process group: the default group outlives an iteration, and gets new peers instead of a new group.

torch >= 2.15 supports this (``enable_reconfigure``), with some backends. All peers of an iteration exchange
their handles through the iteration's store. So does the backend: the group's own store is a `_Switch`, which
forwards to the iteration's store. So nothing depends on a store that has ended with its host.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..store.base import HoldingStore, StoreMixin
from .release import release_process_groups

log = logging.getLogger(__name__)

_dist: Any = dist  # for functions that only a newer torch has
_OURS = ("store", "rank", "world_size", "init_method", "enable_reconfigure", "group_name")


class _Switch(HoldingStore, Store):
    """A torch store that forwards to the current iteration's store."""

    def __init__(self, store: StoreMixin) -> None:
        HoldingStore.__init__(self, store)
        Store.__init__(self)

    def turn_to(self, store: StoreMixin) -> None:
        """Forwards to another store from now on."""
        self._store = store


class KeptGroup:
    """The default process group of this process, over the iterations of a call.

    Args:
        enabled: whether to keep the group; otherwise each iteration makes a new one.

    Attributes:
        group: the kept group; None if there is none.
    """

    def __init__(self, enabled: bool) -> None:
        self.group: Any = None
        self._enabled = enabled
        self._switch: _Switch | None = None  # kept here, since torch's C++ does not keep its Python half
        self._arguments: tuple[str, dict[str, Any]] | None = None

    def enter(
        self, backend: str, options: dict[str, Any], *, n: int, rank: int, size: int, store: StoreMixin
    ) -> Any:
        """Makes the group, or gives it its new peers. All active ranks call it.

        Args:
            backend: the ``backend`` of ``init_process_group``.
            options: the other arguments of ``init_process_group``.
            n: unique number of the iteration.
            rank: rank of this process in the group.
            size: size of the group.
            store: the iteration's store.

        Returns:
            The default group.

        Raises:
            TypeError: the wrapper sets this option itself, or the options differ from the first call's.
            RuntimeError: a peer did not arrive.
        """
        wrong = sorted(set(options) & set(_OURS))
        if wrong:
            raise TypeError(
                f"process_group({wrong[0]}=…): the wrapper chooses {', '.join(_OURS)}; leave it out, or call "
                "torch.distributed.init_process_group yourself"
            )
        if not dist.is_initialized():
            self.group = None  # the function has destroyed it
        if dist.is_initialized() and self.group is None:
            log.warning(
                "process_group(): torch.distributed.init_process_group was called before; that group is "
                "used, and is not kept over a restart"
            )
            return dist.group.WORLD
        if self.group is not None and self._arguments != (backend, options):
            raise TypeError(
                f"process_group({backend!r}, {options}): the kept group was made with {self._arguments}; "
                "pass the same in each iteration"
            )
        if self.group is None and not self._make(backend, options, rank, size, store):
            dist.init_process_group(backend, **options)
            return dist.group.WORLD
        assert self._switch is not None
        self._switch.turn_to(store)
        self._meet(n, rank, size, store)
        return self.group

    def close(self) -> None:
        """Destroys the kept group after a call that failed; does nothing if there is none."""
        if self.group is not None:
            release_process_groups(aborted=True)
            self.group = None

    def _make(self, backend: str, options: dict[str, Any], rank: int, size: int, store: StoreMixin) -> bool:
        """Makes the group, without peers so far; returns whether it can be kept."""
        if not self._enabled:
            return False
        if not hasattr(_dist, "_reconfigure"):
            self._give_up(f"torch {torch.__version__} cannot give a group new peers; 2.15 can")
            return False
        self._switch = _Switch(store)
        _dist.init_process_group(
            backend, store=self._switch, rank=rank, world_size=size, enable_reconfigure=True, **options
        )
        if not _dist._supports_reconfigure():
            dist.destroy_process_group()
            self._give_up(f"backend {backend!r} cannot be given new peers")
            return False
        self.group, self._arguments = dist.group.WORLD, (backend, options)
        return True

    def _give_up(self, why: str) -> None:
        self._enabled = False
        log.warning("keep_groups: process groups are made again in each iteration: %s", why)

    def _meet(self, n: int, rank: int, size: int, store: StoreMixin) -> None:
        names = [f"handle/{each}" for each in range(size)]
        store.set(names[rank], _dist._get_reconfigure_handle())
        store.wait(names)
        handles = [handle.decode() for handle in store.multi_get(names)]
        _dist._reconfigure(uuid=n, handles=handles).wait()
        # `new_group` and similar functions take the job's ranks from this table.
        dist.distributed_c10d._world.pg_group_ranks[self.group] = {each: each for each in range(size)}
