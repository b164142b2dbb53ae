"""Pickles from other ranks: what runs code is refused, and what states are made of is not."""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import functools
import io
import pathlib
import pickle
import re
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from ft_wrapper.live import tree
from ft_wrapper.live.tree import Flat, empty_like, flatten, from_bytes, to_bytes, unflatten

REFUSED = "which a rank does not load from others; if it may, call torch.serialization.add_safe_globals"


@pytest.fixture(autouse=True)
def names_stay() -> Iterator[None]:
    """What one test has in its states is not known in the next one."""
    before = {*tree._names}
    yield
    tree._names.clear()
    tree._names.update(before)


def text(word: str) -> bytes:
    return b"\x8c" + struct.pack("B", len(word)) + word.encode()


def by_stack(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def by_line(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


# Of the standard library each name is tried below.
HOSTILE = [
    ("os", "system"),
    ("subprocess", "os.system"),
    ("builtins", "object.__subclasses__"),
    ("__builtin__", "eval"),
    ("torch", "load"),
    ("torch", "float32.__class__.__base__.__subclasses__"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("numpy.testing._private.utils", "runstring"),
    ("collections", "OrderedDict.__init__.__globals__"),
]


def calls(named: bytes, argument: str) -> bytes:
    """A pickle that calls something, as `pickle` writes it."""
    return b"\x80\x04" + named + text(argument) + b"\x85R."


def in_a_state(pickled: bytes) -> list[Callable[[], object]]:
    """The places of what a rank receives where a pickle may be."""
    skeleton = pickle.dumps(([], pickled))
    whole = len(skeleton).to_bytes(8) + skeleton
    return [
        lambda: tree.loads(pickled),
        lambda: empty_like(pickled),
        lambda: unflatten(Flat(skeleton, [])),
        lambda: unflatten(from_bytes(whole)),
    ]


@pytest.mark.parametrize(("module", "name"), HOSTILE)
def test_what_calls_others_is_refused(module: str, name: str, tmp_path: pathlib.Path) -> None:
    sign = tmp_path / "it ran"
    for way in (by_stack, by_line):
        for read in in_a_state(calls(way(module, name), f"touch '{sign}'")):
            with pytest.raises(TypeError, match=REFUSED) as caught:
                read()
            assert f"{module}.{name}" in str(caught.value)
    assert not sign.exists()


FOUND = sorted(
    {
        (module, name)
        for module in sys.stdlib_module_names & sys.modules.keys()
        for name, value in vars(sys.modules[module]).items()
        if callable(value)
    }
)


def test_of_the_standard_library_only_containers_are_loaded() -> None:
    for module, name in [*FOUND, ("no such module", "x"), ("x", "")]:
        if f"{module}.{name}" in tree._names:
            assert isinstance(getattr(sys.modules[module], name), type)
            assert module in ("builtins", "collections")
        else:
            with pytest.raises(TypeError, match=REFUSED):
                tree.Unpickler(io.BytesIO()).find_class(module, name)


def test_nothing_is_imported_for_a_name() -> None:
    assert "antigravity" not in sys.modules
    with pytest.raises(TypeError, match=REFUSED):
        tree.loads(by_line("antigravity", "geohash") + b".")
    assert "antigravity" not in sys.modules


def test_what_a_state_has_is_no_way_to_more() -> None:
    """A class of the user's is on the list, and what hangs on it is not."""
    flatten({"extra": Own(1)})
    for name in ("Own.__init__", "Own.__init__.__globals__", "Own.__subclasshook__", "sys", "torch.load"):
        with pytest.raises(TypeError, match=REFUSED):
            tree.loads(b"\x80\x04" + by_stack(__name__, name) + b".")


# ---- what states are made of


class Own:
    """What a user's module may return as its extra state."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def __eq__(self, other: object) -> bool:
        return type(other) is Own and other.seen == self.seen

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    """Another one."""

    __slots__ = ("seen",)

    def __reduce__(self) -> Any:
        return made_slotted, (self.seen,)

    def __eq__(self, other: object) -> bool:
        return type(other) is Slotted and other.seen == self.seen

    __hash__ = None  # type: ignore[assignment]


def made_slotted(seen: int) -> Slotted:
    made = Slotted()
    made.seen = seen  # type: ignore[attr-defined]
    return made


class Named(collections.OrderedDict[str, int]):
    """A container of the user's."""


class Kind(enum.Enum):
    """A choice."""

    ONE = 1


Pair = collections.namedtuple("Pair", "first second")

WITHOUT_A_WORD = [
    {1, 2},
    frozenset([3]),
    1 + 2j,
    bytearray(b"x"),
    range(3),
    slice(1, 2),
    b"bytes",
    collections.OrderedDict(a=1),
    collections.defaultdict(list, a=[1]),
    collections.defaultdict(dict, a={}),
    collections.Counter("aab"),
    collections.deque([1, 2], 2),
    torch.Size([2, 3]),
    torch.device("cpu"),
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    (Shard(0), Replicate(), Partial()),
    np.float64(0.5),
    np.int32(3),
    np.bool_(True),
    np.arange(6.0),
    np.arange(6).reshape(2, 3).T[::2],
    np.zeros(0),
    np.array(["2026-01-01"], dtype="datetime64[D]"),
]
OF_THIS_PROCESS = [
    Own(3),
    made_slotted(4),
    Named(a=1),
    Kind.ONE,
    Pair(1, (2,)),
    datetime.datetime(2026, 1, 1),
    pathlib.PurePosixPath("/a"),
    fractions.Fraction(1, 3),
    types.SimpleNamespace(a=1),
    collections.defaultdict(Own),
    made_slotted,
    functools.partial(made_slotted, 3).func,
]


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(
        np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    )


@pytest.mark.parametrize("value", WITHOUT_A_WORD, ids=lambda value: type(value).__name__)
def test_plain_values_need_no_word(value: Any) -> None:
    for protocol in (4, 5):
        assert same(tree.loads(pickle.dumps(value, protocol)), value)


@pytest.mark.parametrize("value", OF_THIS_PROCESS, ids=lambda value: type(value).__name__)
def test_what_this_process_has_itself_needs_no_word(value: Any) -> None:
    before, flat = {*tree._names}, flatten({"a": value})
    tree._names.intersection_update(before)
    with pytest.raises(TypeError, match=REFUSED):
        unflatten(flat)
    flatten({"b": [value]})
    assert same(unflatten(flat)["a"], value)


def test_what_the_user_calls_safe_is_loaded() -> None:
    pickled = pickle.dumps(([], pickle.dumps(Own(3))))
    with pytest.raises(TypeError, match=r"test_pickles\.Own, which .*add_safe_globals\(\[.*Own\]\)"):
        unflatten(Flat(pickled, []))
    with torch.serialization.safe_globals([Own]):
        assert unflatten(Flat(pickled, [])) == Own(3)
    with torch.serialization.safe_globals([(Own, f"{__name__}.Own")]):
        assert unflatten(Flat(pickled, [])) == Own(3)


@pytest.mark.parametrize(
    "value", [Own(1).__eq__, re.compile("a"), len, {"a": [eval]}], ids=lambda value: type(value).__name__
)
def test_what_no_rank_would_load_is_told_when_the_state_is_built(value: Any) -> None:
    with pytest.raises(TypeError, match=REFUSED):
        flatten({"extra": value})


def test_with_the_users_word_such_a_state_can_be_sent() -> None:
    with torch.serialization.safe_globals([re._compile]):  # type: ignore[attr-defined]
        assert unflatten(flatten(re.compile("a"))) == re.compile("a")


@given(st.lists(st.integers(1, 5), max_size=3), st.sampled_from([torch.bool, torch.float16, torch.complex64]))
def test_a_state_with_its_contents_as_bytes(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    state = {"a": tensor, "same": tensor, "t": tensor.mT if tensor.dim() > 1 else tensor, "n": None}
    got = unflatten(from_bytes(to_bytes(flatten(state))))
    assert got["a"] is got["same"] and got["n"] is None
    assert all(torch.equal(got[name], state[name]) and got[name].dtype == dtype for name in "at")
