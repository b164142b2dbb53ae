"""States are taken apart and put together with the same bits, shapes and strides."""

from __future__ import annotations

import collections
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_wrapper.live import tree
from ft_wrapper.live.tree import (
    checksum,
    empty_like,
    flatten,
    joined,
    layout,
    pieces,
    share,
    spread,
    unflatten,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.int8,
    torch.int64,
    torch.complex64,
]
Pair = collections.namedtuple("Pair", "first second")


def through(state: Any, parts: int = 1) -> Any:
    """A state as it comes out at a receiver with so many holders."""
    flat = flatten(state)
    received = empty_like(flat.skeleton)
    assert layout(received.tensors) == layout(flat.tensors)
    for index in range(parts):
        sent = pieces(flat.tensors, *share(flat.tensors, index, parts))
        into = pieces(received.tensors, *share(received.tensors, index, parts))
        for theirs, ours in zip(sent, into, strict=True):
            assert list(map(len, theirs)) == list(map(len, ours))
            spread(bytearray(joined(theirs)), ours)
    return unflatten(received)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(
        torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8).tolist()
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaNs among them."""
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed)
    )
    return data.to(torch.uint8).view(dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = random(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.sampled_from(["permute", "slice", "every second", "expand", "conj"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "slice" if tensor.dim() and tensor.shape[0]:
                tensor = tensor[1:]
            case "every second" if tensor.dim():
                tensor = tensor[..., ::2]
            case "expand":
                tensor = tensor.expand(2, *tensor.shape)
            case "conj":
                tensor = tensor.conj()
    return tensor


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
states = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=4)
        | st.builds(Pair, inner, inner)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert same(a, b)
        if tree.is_dense(a):
            assert a.stride() == b.stride()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


@settings(max_examples=50)
@given(states, st.integers(1, 4))
def test_what_comes_out_is_what_went_in(state: Any, parts: int) -> None:
    assert_equal(state, through(state, parts))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[3 << 20], [(1 << 20) + 3, 5, 1 << 19, 7, (2 << 20) + 1], [300_001] * 9])
def test_large_tensors_in_several_pieces(sizes: list[int], parts: int) -> None:
    state = [random((size,), torch.int8, size) for size in sizes]
    assert_equal(state, through(state, parts))


def test_what_is_negated_or_conjugated_only_when_it_is_read() -> None:
    conjugated = random((5,), torch.complex64).nan_to_num(1).conj()
    negated = conjugated.imag
    assert conjugated.is_conj() and negated.is_neg()
    assert_equal([conjugated, negated], through([conjugated, negated]))


def test_what_is_received_has_memory_of_its_own_and_is_no_larger_than_needed() -> None:
    whole = random((1000, 1000))
    state = [whole[:, :2], whole[:3]]
    got = through(state)
    assert [t.untyped_storage().nbytes() for t in got] == [8000, 12000]
    assert flatten(state).tensors[1].data_ptr() == whole.data_ptr(), "a copy was made"


def test_a_modules_state_dict_keeps_its_kind_and_metadata() -> None:
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    got = through(state)
    assert type(got) is collections.OrderedDict and got._metadata == state._metadata


def test_tied_weights_are_sent_once_and_stay_tied() -> None:
    weight = torch.nn.Parameter(random((8, 4)))
    state = {
        "a": weight,
        "b": weight.detach(),
        "t": weight.t(),
        "half": weight[:4],
        "empty": [weight[:0], weight[:0]],
    }
    flat = flatten(state)
    assert len(flat.tensors) == 5
    got = unflatten(flat)
    assert got["a"] is got["b"] and got["a"] is not got["half"]
    assert_equal(weight.detach().t(), through(state)["t"])


def test_equal_tensors_are_not_taken_for_tied_ones() -> None:
    assert len(flatten([torch.zeros(3), torch.zeros(3)]).tensors) == 2
    numbers = torch.zeros(8)
    assert len(flatten([numbers, numbers.view(torch.int32)]).tensors) == 2
    both = torch.zeros(4, dtype=torch.complex64)
    assert len(flatten([both, both.conj()]).tensors) == 2


class Strange(torch.Tensor):
    """A subclass that may keep its contents anywhere, as DTensor does."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2).as_subclass(Strange),
        torch.nn.Parameter(torch.zeros(2).as_subclass(Strange)),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["subclass", "parameter", "sparse", "meta"],
)
def test_what_cannot_be_sent_is_named_by_its_path(tensor: torch.Tensor) -> None:
    state = {"model": {}, "optimizer": {"state": {0: {}, 3: {"exp": [torch.zeros(1), tensor]}}}}
    with pytest.raises(TypeError, match=r"^optimizer\.state\.3\.exp\.1 "):
        flatten(state)
    with pytest.raises(TypeError, match=r"^a tensor of the state "):
        flatten({"x": collections.deque([tensor])})


def test_ten_thousand_small_tensors_are_few_pieces() -> None:
    state = [torch.zeros(10) for _ in range(10_000)]
    cut = list(pieces(state, *share(state, 0, 1)))
    assert len(cut) == 1 and len(cut[0]) == 10_000


def test_a_view_keeps_its_tensor() -> None:
    tensor = torch.zeros(10)
    gone = weakref.ref(tensor)
    ((view,),) = pieces([tensor], 0, 40)
    del tensor
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        got = empty_like(
            flatten([torch.zeros(3, device="cpu"), torch.zeros(3, 3, device="cpu")[:, 0]]).skeleton
        )
        assert [t.device.type for t in got.tensors] == ["cpu", "cpu"]
        assert checksum([torch.ones(3, device="cpu")])


# Checksum --------------------------------------------------------------------------------------------------

SIZES = [3, 8, 300_000, 2 * tree.PIECE + 5]


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_it_does_not_depend_on_where_the_memory_is(offset: int) -> None:
    tensor = random((1 << 19,), torch.uint8)
    moved = torch.empty(offset + tensor.numel(), dtype=torch.uint8)[offset:].copy_(tensor)
    assert checksum([moved]) == checksum([tensor])


@settings(max_examples=30)
@given(st.sampled_from(SIZES), st.data())
def test_it_finds_each_flipped_bit(size: int, data: st.DataObject) -> None:
    tensor = random((size,), torch.uint8)
    before = checksum([tensor])
    at = data.draw(st.integers(0, size - 1) | st.just(size - 1))
    tensor[at] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum([tensor]) != before


def test_it_finds_swaps() -> None:
    rows = random((6, tree.PIECE), torch.uint8)
    whole = checksum([rows])
    for a in range(6):
        for b in range(a):
            order = list(range(6))
            order[a], order[b] = b, a
            assert checksum([rows[order]]) != whole, "of pieces"
    small = [random((10,), seed=seed) for seed in range(3)]
    assert checksum(small) != checksum(small[::-1]), "within a piece"
    words = random((1000, 8), torch.uint8)
    assert checksum([words]) != checksum([words.flip(0)]), "of words"
