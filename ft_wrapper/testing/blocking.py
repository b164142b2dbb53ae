"""A backend for ``torch.distributed`` whose collectives block until they are aborted, as NCCL's do."""

import enum
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore

_LIMIT = timedelta(seconds=600)


class OnAbort(enum.Enum):
    """What the ``abort`` of a group does."""

    RETURNS = "returns"
    """It frees what blocks, and returns at once."""
    IS_SLOW = "is-slow"
    """The same, a second later."""
    HANGS = "hangs"
    """It neither frees anything nor returns."""
    RAISES = "raises"
    """It frees what blocks, and raises a ``RuntimeError``."""
    DEPENDS = "depends"
    """It returns once all such groups of the process are being aborted. So aborts in sequence hang, as with
    NCCL's communicators on one device."""


def blocking_backend(on_abort: OnAbort = OnAbort.RETURNS, passes: int = 0) -> str:
    """Registers such a backend, once in a process.

    Its collectives never succeed, except for the first ``passes``. They wait without the GIL, where no signal
    ends the wait, and raise a ``RuntimeError`` once their group is aborted. So only an abort frees a program
    from them::

        torch.distributed.init_process_group(blocking_backend())
        torch.distributed.barrier()

    Args:
        on_abort: what ``abort`` does.
        passes: how many operations of each group succeed at once, and do nothing, before one blocks. It may
            differ between ranks.

    Returns:
        Its name, for ``init_process_group`` and ``new_group``.
    """
    name = f"blocking-{on_abort.value}" + (f"-{passes}" if passes else "")
    if name.upper() not in dist.Backend._plugins:

        def make(store: Any, rank: int, size: int, timeout: timedelta) -> BlockingGroup:
            return BlockingGroup(rank, size, name, on_abort, passes)

        dist.Backend.register_backend(name, make, devices=["cpu"])
    return name


class BlockingGroup(dist.ProcessGroup):
    """A process group of this backend.

    Args:
        rank: in the group.
        size: of the group.
        name: of the backend.
        on_abort: what ``abort`` does.
        passes: how many operations succeed.

    Attributes:
        is_blocked: set once a collective was called.
        is_aborted: set once ``abort`` was called.
    """

    _begun = threading.Condition()
    _living: "weakref.WeakSet[BlockingGroup]" = weakref.WeakSet()  # that depend, and are not being aborted

    def __init__(self, rank: int, size: int, name: str, on_abort: OnAbort, passes: int) -> None:
        init: Any = super().__init__  # torch's stubs know only the one with a store
        init(rank, size)
        self.is_blocked = threading.Event()
        self.is_aborted = threading.Event()
        self._backend_name = name
        self._on_abort = on_abort
        self._passes = passes
        self._collectives = 0
        self._ends = HashStore()
        if on_abort is OnAbort.DEPENDS:
            with self._begun:
                self._living.add(self)

    def getBackendName(self) -> str:
        """The backend's name."""
        return self._backend_name

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives it has begun, as torch's own groups say by this name."""
        return self._collectives

    def _collective(self, *_arguments: Any, **_more: Any) -> Any:
        self._collectives += 1
        return self._block()

    def _block(self, *_arguments: Any, **_more: Any) -> Any:
        if self._passes > 0:
            self._passes -= 1
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result([])
            create: Any = _distributed_c10d  # torch's stubs do not know it
            return create._create_work_from_future(done)
        self.is_blocked.set()
        self._ends.wait(["end"], _LIMIT)
        raise RuntimeError(f"a collective of {self._backend_name!r} was aborted")

    def abort(self) -> None:
        """Frees what blocks, or does what `OnAbort` says; the second time nothing, unless it waits.

        Raises:
            RuntimeError: `OnAbort` says so.
        """
        was_aborted = self.is_aborted.is_set()
        self.is_aborted.set()
        if self._on_abort is OnAbort.HANGS:
            HashStore().wait(["never"], _LIMIT)
        if self._on_abort is OnAbort.DEPENDS:
            with self._begun:
                self._living.discard(self)
                self._begun.notify_all()
                self._begun.wait_for(lambda: not self._living, _LIMIT.total_seconds())
        if was_aborted and self._on_abort is not OnAbort.DEPENDS:  # its first wait may have been cut short
            return
        if self._on_abort is OnAbort.IS_SLOW:
            threading.Event().wait(1.0)
        self._ends.set("end", "")
        if self._on_abort is OnAbort.RAISES:
            raise RuntimeError(f"abort of {self._backend_name!r} raises")


for _name in (
    *("allgather", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base"),
    *("barrier", "broadcast", "gather", "reduce", "reduce_scatter", "_reduce_scatter_base", "scatter"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    # Since torch 2.15.
    *("all_gather_single", "all_to_all_single", "gather_single", "reduce_scatter_single"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
):
    setattr(BlockingGroup, _name, BlockingGroup._collective)
for _name in ("recv", "recv_anysource", "send"):
    setattr(BlockingGroup, _name, BlockingGroup._block)
