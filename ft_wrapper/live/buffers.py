"""What a forward pass may change in modules: kept as it was when the last step was committed.

Batch norm's kernels write without a trace in a tensor's version. So small buffers are always copied; only
large ones, such as masks and caches, are compared by version.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced

from .form import Objects, modules

_LARGE = 1 << 18  # elements
_BUCKET = 1 << 20  # bytes in one broadcast
_BatchNorm = torch.nn.modules.batchnorm._NormBase


class Buffers:
    """The buffers of all modules, and copies of them."""

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._have_statistics = False

    def watch(self, objects: Objects) -> None:
        """Takes these objects' buffers for the live ones; copies that were kept stay.

        Args:
            objects: as they are used from now on.
        """
        self._live = {
            f"{name}.{inner}": buffer.detach()
            for name, module in modules(objects)
            for inner, buffer in module.named_buffers()
        }
        self._have_statistics = any(
            isinstance(part, _BatchNorm) and part.track_running_stats
            for _, module in modules(objects)
            for part in module.modules()
        )

    def forget(self) -> None:
        """Forgets the copies: the state that they belong to is replaced."""
        self._kept, self._versions = {}, {}

    def keep(self) -> None:
        """Copies the buffers."""
        targets, sources = [], []
        for name, buffer in self._live.items():
            kept = self._kept.get(name)
            if kept is None or kept.shape != buffer.shape or kept.dtype != buffer.dtype:
                self._kept[name] = buffer.clone()
            elif self._may_differ(name, buffer):
                targets.append(kept)
                sources.append(buffer)
            self._versions[name] = buffer._version
        if targets:
            torch._foreach_copy_(targets, sources)

    def put_back(self) -> None:
        """Gives the buffers the values that were kept."""
        for name, buffer in self._live.items():
            kept = self._kept.get(name)
            if kept is not None and self._may_differ(name, buffer):
                buffer.copy_(kept)
                self._versions[name] = buffer._version

    def share(self) -> None:
        """Gives all active ranks rank 0's, if there are running statistics: each rank has its own batch's.

        ``DistributedDataParallel`` does so before the next forward pass, which is too late if rank 0 is lost.
        """
        if self._have_statistics and dist.get_world_size() > 1:
            group: Any = dist.group.WORLD
            _broadcast_coalesced(group, list(self._live.values()), _BUCKET, 0)

    def _may_differ(self, name: str, buffer: torch.Tensor) -> bool:
        return buffer.numel() <= _LARGE or self._versions.get(name) != buffer._version
