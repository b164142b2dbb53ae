"""A state as bytes: a skeleton with a list of tensors, in pieces with a checksum."""

import ctypes
import dataclasses
import enum
import functools
import io
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

PIECE = 1 << 20
"""Bytes that are sent, received and summed up at once: a tensor's alone, or those of small ones together."""

_LARGE = PIECE // 4  # bytes that are worth a call of their own, and are too many to copy
_WORD = 8
_FACTOR = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class Flat:
    """A state taken apart.

    Args:
        skeleton: all but the tensors' contents, pickled.
        tensors: what the skeleton refers to by number, not copied.
    """

    skeleton: bytes
    tensors: list[torch.Tensor]


# Taking apart and putting together -------------------------------------------------------------------------


def flatten(
    tree: Any, local: Callable[[torch.Tensor], tuple[torch.Tensor, Any]] = lambda tensor: (tensor, None)
) -> Flat:
    """Takes a state apart. Tensors that are the same view of the same memory are taken once.

    Args:
        tree: dictionaries, lists, tuples and whatever else can be pickled, with tensors in it.
        local: gives this rank's memory of a tensor, and what else `unflatten` needs to make it.

    Raises:
        TypeError: a tensor's contents are not plain memory (a DTensor, a sparse one); names it by its path.
            Or another rank would not load the state, see `pickles.admit`.
    """
    tensors: list[torch.Tensor] = []
    numbers: dict[tuple[Any, ...], int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> tuple[int, Any] | None:
            if not isinstance(value, torch.Tensor):
                admit(value)
                return None
            tensor, layout = local(value)
            if not is_plain(tensor):
                path = next((path for path, each in named(tree) if each is value), "a tensor of the state")
                raise TypeError(
                    f"{path} cannot be sent: it is a {type(tensor).__name__} ({tensor.layout}, "
                    f"{tensor.device}), and not plain memory; DTensors need mesh="
                )
            key = _identity(tensor) if tensor.numel() else (len(tensors),)
            number = numbers.setdefault(key, len(tensors))
            if number == len(tensors):
                tensors.append(tensor.detach())  # it keeps the memory, so its identity stays its own
            return number, layout

        def reducer_override(self, value: Any) -> Any:
            # Python 3.11.2, which is Debian's, would have it looked up by getattr, which is on no list.
            return (type(value), (value._value_,)) if isinstance(value, enum.Enum) else NotImplemented

    out = io.BytesIO()
    Pickler(out, pickle.HIGHEST_PROTOCOL).dump(tree)
    forms = [(tuple(t.shape), t.stride() if is_dense(t) else None, t.dtype, t.device.type) for t in tensors]
    return Flat(pickle.dumps((forms, out.getvalue()), pickle.HIGHEST_PROTOCOL), tensors)


def empty_like(skeleton: bytes) -> Flat:
    """Allocates host memory for a state's tensors, to be filled.

    Dense tensors have the strides that they had, all others are contiguous.
    """
    forms, _ = loads(skeleton)
    tensors = [
        torch.empty(shape, dtype=dtype, device="cpu")
        if stride is None
        else torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        for shape, stride, dtype, _ in forms
    ]
    return Flat(skeleton, tensors)


def unflatten(
    flat: Flat, together: Callable[[torch.Tensor, Any], torch.Tensor] = lambda tensor, layout: tensor
) -> Any:
    """Puts a state together; its tensors are those of the list, on the kind of device where they were.

    Args:
        flat: what `flatten` returned, here or on another rank.
        together: makes a tensor of what ``local`` gave.

    Raises:
        TypeError: the skeleton has a class or function that is not to be loaded.
    """
    forms, tree = loads(flat.skeleton)
    there = [
        tensor if tensor.device.type == device else tensor.to(device)
        for tensor, (_, _, _, device) in zip(flat.tensors, forms, strict=True)
    ]

    class Reader(Unpickler):
        def persistent_load(self, one: Any) -> torch.Tensor:
            number, layout = one
            return together(there[number], layout)

    return Reader(io.BytesIO(tree)).load()


def named(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in dictionaries, lists and tuples, with their paths: ``optimizer.state.3.exp_avg``."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named(value, f"{path}.{key}" if path else str(key))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's contents are plain memory, which can be sent."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    lazy = tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, lazy)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one range of memory, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


# Bytes -----------------------------------------------------------------------------------------------------


def layout(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The number of bytes, and a number that differs if the bytes of tensors are in another order."""
    numbers: list[int] = []
    for tensor in tensors:
        is_in_order = tensor.is_contiguous() or not is_dense(tensor)
        numbers += (tensor.nbytes, *(() if is_in_order else tensor.stride()))
    return sum(tensor.nbytes for tensor in tensors), _chain(0, numbers)


def share(tensors: Sequence[torch.Tensor], index: int, count: int) -> tuple[int, int]:
    """Where the part ``index`` of ``count`` equal ones begins and ends, for `pieces`."""
    size = sum(map(_room, tensors))
    return size * index // count // _WORD * _WORD, size * (index + 1) // count // _WORD * _WORD


def pieces(tensors: Iterable[torch.Tensor], begin: int, end: int) -> Iterator[list[memoryview]]:
    """Cuts a part of all bytes into pieces of `PIECE` bytes at most.

    A piece is one view on a large tensor, or views on several small ones: so one call of the kernel serves
    many of them. How it cuts depends on the tensors' sizes alone, so both ends do the same. Tensors whose
    bytes cannot be viewed as they are (on a device, not dense) are copied when it is their turn.

    Args:
        tensors: all of them; each counts as a multiple of 8 bytes.
        begin: from `share`.
        end: from `share`.
    """
    small: list[memoryview] = []
    room, at = PIECE, 0
    for tensor in tensors:
        first, last = max(begin - at, 0), min(end - at, tensor.nbytes)
        at += _room(tensor)
        if first >= last:
            continue
        memory = _memory(tensor)
        for start in range(first, last, PIECE):
            view = memory[start : min(start + PIECE, last)]
            if len(view) >= _LARGE:
                yield [view]
                continue
            if len(view) > room:
                yield small
                small, room = [], PIECE
            small.append(view)
            room -= len(view)
    if small:
        yield small


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _WORD) * _WORD


def _memory(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, in their order in memory; the view keeps the tensor."""
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    tensor = tensor.resolve_conj().resolve_neg().cpu()
    block = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    block.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


# Checksum --------------------------------------------------------------------------------------------------


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A number for the values of tensors, in their order; how they lie in memory does not count."""
    total = 0
    for views in pieces((tensor.contiguous() for tensor in tensors), 0, sys.maxsize):
        total = extend(total, joined(views))
    return total


def extend(total: int, piece: memoryview | bytearray) -> int:
    """The checksum of what has the checksum ``total`` and one more piece.

    Words are weighted by odd numbers and pieces chained by an odd factor, modulo 2**64: if any bit differs,
    so does the sum. zlib.crc32 would cost a third of a transfer's time.
    """
    count = len(piece) // _WORD
    rest = int.from_bytes(piece[count * _WORD :], "little")
    if not count:
        return _chain(total, (0, rest))
    data = torch.frombuffer(piece, dtype=torch.uint8, count=count * _WORD)
    if data.data_ptr() % _WORD:
        data = data.clone()  # torch reads words at multiples of their size
    return _chain(total, (int(data.view(torch.int64).dot(_weights()[:count])), rest))


@functools.cache  # not when this is imported: torch starts threads for it, and ftrun's template may have none
def _weights() -> torch.Tensor:
    return torch.arange(1, 2 * PIECE // _WORD, 2, dtype=torch.int64, device="cpu")


def _chain(total: int, values: Iterable[int]) -> int:
    for value in values:
        total = (total * _FACTOR + value) % 2**64
    return total


def joined(views: list[memoryview]) -> memoryview | bytearray:
    """A piece's bytes in a row: as they are if they are one view, else a copy."""
    return views[0] if len(views) == 1 else bytearray().join(views)


def to_bytes(flat: Flat) -> bytes:
    """A state with its contents, in a row."""
    views = itertools.chain.from_iterable(pieces(flat.tensors, 0, sys.maxsize))
    return b"".join([len(flat.skeleton).to_bytes(_WORD), flat.skeleton, *views])


def from_bytes(said: bytes) -> Flat:
    """A state from `to_bytes`, in host memory."""
    end = _WORD + int.from_bytes(said[:_WORD])
    flat = empty_like(said[_WORD:end])
    spread(said[end:], itertools.chain.from_iterable(pieces(flat.tensors, 0, sys.maxsize)))
    return flat


def spread(piece: memoryview | bytes | bytearray, views: Iterable[memoryview]) -> None:
    """Copies a piece's bytes to where they belong."""
    at = 0
    for view in views:
        view[:] = memoryview(piece)[at : at + len(view)]
        at += len(view)


# Names that a pickle may have -------------------------------------------------------------------------------
#
# A name stands for a class or a function, which a pickle may call with anything. Only what is on this list is
# imported or called: containers, torch's and numpy's values, what the user has passed to
# ``torch.serialization.add_safe_globals``, and the classes in the states of this process itself: so a user's
# class needs no entry.

_PLAIN = """
builtins bool bytearray bytes complex dict float frozenset int list range set slice str tuple
collections Counter OrderedDict defaultdict deque
numpy dtype ndarray _core.multiarray._reconstruct _core.multiarray.scalar _core.numeric._frombuffer
torch Size device
torch.distributed.tensor.placement_types Partial Replicate Shard _StridedShard
"""
_CALLING = ("builtins", "operator")
_names = {f"{line.split()[0]}.{name}" for line in _PLAIN.strip().splitlines() for name in line.split()[1:]}
_names |= {f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def admit(value: object) -> None:
    """Puts a class or a function that is in a state of this process on the list.

    Not the functions of the standard library, nor what calls and looks up: by ``getattr`` a pickle would
    reach everything.

    Raises:
        TypeError: it cannot be on the list.
    """
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        top = str(value.__module__).partition(".")[0]
        if top not in sys.stdlib_module_names or (isinstance(value, type) and top not in _CALLING):
            _names.add(_name_of(value))
        _check(_name_of(value))


def _name_of(value: Any) -> str:
    return value[1] if isinstance(value, tuple) else f"{value.__module__}.{value.__qualname__}"


def _check(name: str) -> None:
    name = name.replace("numpy.core.", "numpy._core.")  # numpy 1
    if name not in _names and name not in map(_name_of, torch.serialization.get_safe_globals()):
        raise TypeError(
            f"the state is pickled with {name}, which a rank does not load from others; if it may, call "
            f"torch.serialization.add_safe_globals([{name}]) on all ranks, before LiveState"
        )


class Unpickler(pickle.Unpickler):
    """Reads a pickle that came from another rank.

    Raises:
        TypeError: it has a name that is not on the list.
    """

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        _check(f"{module}.{name}")
        return super().find_class(module, name)


def loads(pickled: bytes) -> Any:
    """Reads a pickle that came from another rank, as `Unpickler`."""
    return Unpickler(io.BytesIO(pickled)).load()
