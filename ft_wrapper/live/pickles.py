"""Pickles of a state, read with a list of names: nothing else that they name is imported, nor called.

A name stands for a class or a function, which a pickle may call with whatever it likes. On the list are
containers, torch's and numpy's values, what the user has passed to ``torch.serialization.add_safe_globals``,
and the classes in the states of this process itself: so a user's class needs no word.
"""

import io
import pickle
import sys
import types
from typing import Any

import torch

_PLAIN = """
builtins bool bytearray bytes complex dict float frozenset int list range set slice str tuple
collections Counter OrderedDict defaultdict deque
numpy dtype ndarray _core.multiarray._reconstruct _core.multiarray.scalar _core.numeric._frombuffer
torch Size device
torch.distributed.tensor.placement_types Partial Replicate Shard _StridedShard
"""
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
        is_class = isinstance(value, type) and top not in ("builtins", "operator")
        if is_class or top not in sys.stdlib_module_names:
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
