"""What a forward pass may change in modules: kept as it was when the last step was committed.

Each use looks the tensors up again, since a forward pass may also assign or register them. Identity,
version and value tell which have changed: batch norm's kernels leave no trace in a tensor's version, nor does
anything that writes through ``.data``.
"""

from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced

from .form import Objects, Tensors, attributes_of, buffers_of, parts, put_attributes, put_buffers
from .tree import Flat, flatten, unflatten

_SMALL = 1 << 18  # elements; these are copied at each commit, others where they have changed
_BUCKET = 1 << 20  # bytes in one broadcast
_COUNTER = "num_batches_tracked"


class Buffers:
    """Copies of all buffers, and of tensors that are attributes: those are each rank's own.

    Attributes:
        have_changed: whether a forward pass has changed buffers since they were copied, as `look` has found.
        new: names of buffers that were registered since then.
    """

    def __init__(self) -> None:
        self.have_changed = False
        self._changed: set[str] = set()
        self._kept: Tensors | None = None
        self._common: set[str] = set()  # names of the buffers among them
        self._seen: dict[str, tuple[torch.Tensor | None, int]] = {}

    def forget(self) -> None:
        """Forgets the copies: the state that they belong to is replaced."""
        self._kept = None

    def keep(self, objects: Objects) -> None:
        """Copies all of them."""
        (buffers, live), kept = _find(objects), self._kept or {}
        touched = self._touched(live) | self._changed
        self._kept, self._common, self._changed = {}, {*buffers}, set()
        targets, sources = [], []
        for name, tensor in live.items():
            old = kept.get(name)
            if tensor is None or old is None or _form_of(tensor) != _form_of(old):
                old = None if tensor is None else tensor.detach().clone()
            elif tensor.numel() <= _SMALL or name in touched:
                targets.append(old)
                sources.append(tensor.detach())
            self._kept[name] = old
        if targets:
            torch._foreach_copy_(targets, sources)
        self._note(live)

    def look(self, objects: Objects) -> None:
        """Finds out which tensors have changed since they were copied."""
        (buffers, live), kept = _find(objects), self._kept or {}
        changed = self._touched(live)
        for name in [name for name in changed if name.endswith(_COUNTER)]:
            prefix = name.removesuffix(_COUNTER)
            changed |= {f"{prefix}running_mean", f"{prefix}running_var"} & live.keys()
        for name in live.keys() - changed:
            tensor, old = live[name], kept.get(name)
            if tensor is not None and (old is None or not _equal(tensor, old)):
                changed.add(name)
        self._changed = changed
        self.new = buffers.keys() - self._common
        self.have_changed = not changed.isdisjoint(self._common | buffers.keys())

    def put_back(self, objects: Objects, owners: Container[str] = ()) -> None:
        """Restores the values that were copied.

        Args:
            objects: whose they are.
            owners: names of modules; what has been registered in them since is removed.
        """
        if self._kept is None:
            return
        self.look(objects)
        buffers, live = _find(objects)
        values = {name: each for name, each in live.items() if name.rpartition(".")[0] not in owners}
        for name, old in self._kept.items():
            values[name] = live[name] if name not in self._changed else None if old is None else old.clone()
        common = self._common | (values.keys() & buffers.keys() - self._kept.keys())
        put_buffers(objects, {name: values[name] for name in common})
        put_attributes(objects, {name: values[name] for name in values.keys() - common})
        self._note(_find(objects)[1])

    def share(self, objects: Objects, group: Any) -> None:
        """Gives all active ranks rank 0's values of the buffers that changed on any rank; collective.

        ``DistributedDataParallel`` does so before the next forward pass, which is too late if rank 0 is lost.

        Args:
            objects: whose they are.
            group: of all active ranks, for host memory.
        """
        live, kept, names = buffers_of(parts(objects)), self._kept or {}, sorted(self._common)
        is_other = live.keys() != self._common or any(
            _form_of(live[name]) != _form_of(kept[name]) for name in names
        )
        mask = torch.tensor([*(name in self._changed for name in names), is_other], dtype=torch.uint8)
        dist.all_reduce(mask, dist.ReduceOp.MAX, group)
        if mask[-1]:
            _take_rank_0s(objects, live, group)
            return
        chosen = [live[name] for name, bit in zip(names, mask.tolist(), strict=False) if bit]
        world: Any = dist.group.WORLD
        for where, is_host in ((group, True), (world, False)):
            there = [each.detach() for each in chosen if each is not None and each.is_cpu == is_host]
            if there:
                _broadcast_coalesced(where, there, _BUCKET, 0)

    def _touched(self, live: Tensors) -> set[str]:
        """Names the tensors that were written to, assigned, registered or deleted."""
        seen = self._seen
        return (live.keys() ^ seen.keys()) | {
            name
            for name in live.keys() & seen.keys()
            if live[name] is not seen[name][0] or _version_of(live[name]) != seen[name][1]
        }

    def _note(self, live: Tensors) -> None:
        self._seen = {name: (tensor, _version_of(tensor)) for name, tensor in live.items()}


def _find(objects: Objects) -> tuple[Tensors, Tensors]:
    """The buffers; and all tensors that are watched."""
    modules = parts(objects)
    buffers = buffers_of(modules)
    return buffers, {**buffers, **attributes_of(modules)}


def _take_rank_0s(objects: Objects, live: Tensors, group: Any) -> None:
    """Shares where a forward pass has made new buffers, or some of another shape."""
    said: list[Flat | None] = [None]
    if dist.get_rank() == 0:
        flat = flatten(live)
        said = [Flat(flat.skeleton, [tensor.cpu() for tensor in flat.tensors])]
    dist.broadcast_object_list(said, 0, group, torch.device("cpu"))
    if dist.get_rank() != 0 and said[0] is not None:
        put_buffers(objects, unflatten(said[0]))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares words where they are in order: for a mask of bool that is eight times as fast."""
    if all(each.is_contiguous() and each.nbytes % 8 == each.storage_offset() == 0 for each in (one, other)):
        one, other = (each.detach().view(-1).view(torch.int64) for each in (one, other))
    return torch.equal(one, other)


def _form_of(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _version_of(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
