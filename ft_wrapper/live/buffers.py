"""What a forward pass may change in modules: kept as it was when the last step was committed.

It is looked up anew each time, since a forward pass may also assign or register it. What has changed is
found by identity and version, and by value: batch norm's kernels write without a trace in a tensor's version,
and so does everything that writes through ``.data``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced

from .form import Objects, Tensors
from .tree import Flat, flatten, unflatten

_SMALL = 1 << 18  # elements; these are copied at each commit, others where they have changed
_BUCKET = 1 << 20  # bytes in one broadcast
_COUNTER = "num_batches_tracked"


class Buffers:
    """Tensors of the modules, and copies of them.

    Args:
        find: gives those that there are.
        put: makes them those that it is given.

    Attributes:
        changed: the names of those that changed since the last commit, as `look` has found them.
    """

    def __init__(self, find: Callable[[Objects], Tensors], put: Callable[[Objects, Tensors], None]) -> None:
        self._find = find
        self._put = put
        self.changed: frozenset[str] = frozenset()
        self._kept: Tensors | None = None
        self._seen: dict[str, tuple[torch.Tensor | None, int]] = {}

    def forget(self) -> None:
        """Forgets the copies: the state that they belong to is replaced."""
        self._kept = None

    def keep(self, objects: Objects) -> None:
        """Copies them."""
        live, kept = self._find(objects), self._kept or {}
        touched = self._touched(live) | self.changed
        self._kept = {}
        targets, sources = [], []
        for name, tensor in live.items():
            old = kept.get(name)
            if tensor is None or _form_of(tensor) != _form_of(old):
                old = None if tensor is None else tensor.detach().clone()
            elif old is not None and (tensor.numel() <= _SMALL or name in touched):
                targets.append(old)
                sources.append(tensor.detach())
            self._kept[name] = old
        if targets:
            torch._foreach_copy_(targets, sources)
        self._seen = {name: (tensor, _version(tensor)) for name, tensor in live.items()}
        self.changed = frozenset()

    def look(self, objects: Objects) -> None:
        """Finds those that have changed since they were copied."""
        live, kept = self._find(objects), self._kept or {}
        changed = self._touched(live)
        for name in [name for name in changed if name.endswith(_COUNTER)]:
            prefix = name.removesuffix(_COUNTER)
            changed |= {f"{prefix}running_mean", f"{prefix}running_var"} & live.keys()
        for name in live.keys() - changed:
            tensor, old = live[name], kept.get(name)
            if tensor is not None and (old is None or not torch.equal(tensor, old)):
                changed.add(name)
        self.changed = frozenset(changed)

    def put_back(self, objects: Objects) -> None:
        """Gives them the values that were kept; those that there were not are gone again."""
        if self._kept is None:
            return
        self.look(objects)
        if self.changed:
            live = self._find(objects)
            values = {
                name: live[name] if name not in self.changed else None if old is None else old.clone()
                for name, old in self._kept.items()
            }
            self._put(objects, values)
            self._seen |= {name: (each, _version(each)) for name, each in self._find(objects).items()}
            self.changed = frozenset()

    def share(self, objects: Objects, group: Any) -> None:
        """Gives all active ranks rank 0's of those that have changed on any of them; collective.

        ``DistributedDataParallel`` does so before the next forward pass, which is too late if rank 0 is lost.

        Args:
            objects: whose they are.
            group: of all active ranks, for host memory.
        """
        live, kept = self._find(objects), self._kept or {}
        names = sorted(kept)
        has_other_form = live.keys() != kept.keys() or any(
            _form_of(live[name]) != _form_of(kept[name]) for name in names
        )
        mask = torch.tensor([*(name in self.changed for name in names), has_other_form], dtype=torch.uint8)
        dist.all_reduce(mask, dist.ReduceOp.MAX, group)
        if mask[-1]:
            self._take_rank_0s(objects, live, group)
            return
        chosen = [live[name] for name, bit in zip(names, mask.tolist(), strict=False) if bit]
        tensors = [tensor.detach() for tensor in chosen if tensor is not None]
        world: Any = dist.group.WORLD
        for where, is_host in ((group, True), (world, False)):
            there = [tensor for tensor in tensors if (tensor.device.type == "cpu") == is_host]
            if there:
                _broadcast_coalesced(where, there, _BUCKET, 0)

    def _take_rank_0s(self, objects: Objects, live: Tensors, group: Any) -> None:
        """The same where a forward pass has made new ones, or of another shape."""
        said: list[Flat | None] = [None]
        if dist.get_rank() == 0:
            flat = flatten(live)
            said = [Flat(flat.skeleton, [tensor.cpu() for tensor in flat.tensors])]
        dist.broadcast_object_list(said, 0, group, torch.device("cpu"))
        if dist.get_rank() != 0 and said[0] is not None:
            self._put(objects, unflatten(said[0]))

    def _touched(self, live: Tensors) -> set[str]:
        """Those that were written to, assigned, registered or deleted."""
        seen = self._seen
        return {
            name
            for name in live.keys() | seen.keys()
            if name not in live
            or name not in seen
            or live[name] is not seen[name][0]
            or _version(live[name]) != seen[name][1]
        }


def _form_of(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
