"""What a forward pass may change in modules: kept as it was when the last step was committed.

Each use looks the tensors up again, since a forward pass may also assign or register them. Identity,
version and value tell which have changed: batch norm's kernels leave no trace in a tensor's version, nor does
anything that writes through ``.data``.
"""

import ctypes
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced

from .state import Objects, Tensors, attributes_of, buffers_of, parts, put_attributes, put_buffers
from .tree import flatten, from_bytes, is_dense, is_plain, to_bytes, unflatten
from .wire import Sign, unsigned, verified

_BUCKET = 1 << 20  # bytes in one broadcast
_COUNTER = "num_batches_tracked"
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t

# (name, tensor, version); tensors compare by identity.
_Versions = set[tuple[str, torch.Tensor | None, int]]


class Buffers:
    """Copies of all buffers, and of tensors that are attributes: those are each rank's own.

    Attributes:
        odd: names of buffers that were registered or dropped since they were copied, as `look` has found.
    """

    def __init__(self) -> None:
        self.odd: set[str] = set()
        self._changed: set[str] = set()
        self._kept: Tensors | None = None
        self._common: set[str] = set()  # names of the buffers among them
        self._seen: _Versions = set()

    def keep(self, objects: Objects) -> None:
        """Copies changed tensors. Compares all: step hooks and fused optimizers may leave no trace."""
        (buffers, live), kept, now = _find(objects), self._kept or {}, Tensors()
        touched = self._touched(live) | self._changed
        targets, sources = [], []
        for name, tensor in live.items():
            old = kept.get(name)
            if tensor is None or old is None or _form_of(tensor) != _form_of(old):
                old = None if tensor is None else tensor.detach().clone()
            elif name in touched or not tensor.is_cpu or not _equal(tensor, old):
                targets.append(old)  # on a GPU without a comparison, which would block the host
                sources.append(tensor.detach())
            now[name] = old
        if targets:
            torch._foreach_copy_(targets, sources)
        # All at once: after an interruption the old copies are still whole.
        self._seen, self._common, self._changed, self._kept = _versions(live), {*buffers}, set(), now

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
        self._changed, self.odd = changed, buffers.keys() ^ self._common

    def put_back(self, objects: Objects, owners: Container[str] = ()) -> None:
        """Restores the values that were copied.

        Args:
            objects: whose they are.
            owners: names of modules; anything registered in them since is removed.
        """
        if self._kept is None:
            return
        self.look(objects)
        buffers, live = _find(objects)
        values = {name: each for name, each in live.items() if name.rpartition(".")[0] not in owners}
        values.update({name: self._before(name, live) for name in self._kept})
        common = self._common | (values.keys() & buffers.keys() - self._kept.keys())
        put_buffers(objects, {name: values[name] for name in common & values.keys()}, self._old)
        put_attributes(objects, {name: values[name] for name in values.keys() - common}, self._old)
        self._seen = _versions(_find(objects)[1])

    def share(
        self, objects: Objects, tell: Callable[[bytes], bytes], group: Any, sign: Sign = unsigned
    ) -> None:
        """Gives all active ranks the buffers of rank 0; collective, after `look`.

        The others undo their own changes, so only rank 0's are sent. ``DistributedDataParallel`` does this
        before the next forward pass, which is too late if rank 0 is lost.

        Args:
            objects: whose they are.
            tell: broadcasts bytes from rank 0, as `Ballot.tell`.
            group: of all active ranks, for host memory.
            sign: of the iteration.
        """
        live, kept, is_first = buffers_of(parts(objects)), self._kept or {}, dist.get_rank() == 0
        changed = self._changed & (live.keys() | self._common)
        has_others = self.odd or any(_form_of(live[name]) != _form_of(kept[name]) for name in changed)
        whole = to_bytes(flatten(live)) if is_first and has_others else b""
        mine = "\n".join(sorted(changed)).encode(), whole and whole + sign("buffers", whole)
        text, _, whole = tell(b"\0".join(mine) if changed else b"").partition(b"\0")
        names = text.decode().split("\n")
        if whole:
            put_buffers(objects, unflatten(from_bytes(verified(sign, 0, "buffers", whole))))
            return
        if not is_first and (has_others or not changed.issubset(names)):
            put_buffers(objects, {name: self._before(name, live) for name in self._common}, self._old)
            live = buffers_of(parts(objects))
        chosen = [each.detach() for each in map(live.get, names) if each is not None]
        world: Any = dist.group.WORLD
        for where, is_host in ((group, True), (world, False)):
            if there := [each for each in chosen if each.is_cpu == is_host]:
                _broadcast_coalesced(where, there, _BUCKET, 0)

    def _before(self, name: str, live: Tensors) -> torch.Tensor | None:
        """A tensor's committed value; a copy if it has changed."""
        old = (self._kept or {})[name]
        return live[name] if name not in self._changed else None if old is None else old.clone()

    @property
    def _old(self) -> Tensors:
        """The tensors at the last copy; a forward pass may have swapped some since."""
        return {name: tensor for name, tensor, _ in self._seen}

    def _touched(self, live: Tensors) -> set[str]:
        """Names the tensors that were written to, assigned, registered or deleted."""
        return {name for name, _, _ in _versions(live) ^ self._seen}


def _find(objects: Objects) -> tuple[Tensors, Tensors]:
    """The buffers; and all tensors that are watched."""
    modules = parts(objects)
    buffers = buffers_of(modules)
    return buffers, {**buffers, **attributes_of(modules)}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares memory on the host: for small ones seven times as fast as ``torch.equal``."""
    if _form_of(one) != _form_of(other):
        return False
    if one.is_cpu and is_plain(one) and one.stride() == other.stride() and is_dense(one):
        return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)
    return torch.equal(one, other)


def _form_of(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _versions(live: Tensors) -> _Versions:
    return {
        (name, each, -1 if each is None or each.is_inference() else each._version)
        for name, each in live.items()
    }
