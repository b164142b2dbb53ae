"""What ranks say to each other: the same comes out on all ranks, or an error that names the rank."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_wrapper.live import wire
from ft_wrapper.live.plan import Copy, Held, Holding, holding_of
from ft_wrapper.live.wire import Gather, Sign, unsigned, verified
from ft_wrapper.protocol.seal import Seal

LIMIT = 30.0
SIZE = 16  # bytes of a signature
OUTSIDE = "is not signed with the job's secret, and was not used: somebody outside the job takes part"


def signs(secret: bytes = b"the job's", about: str = "live 3 state") -> Sign:
    seal = Seal(secret)
    return lambda what, said: seal.sign(f"{about} {what}", said)


class Group:
    """A process group whose ranks are threads, in the place of `torch.distributed`.

    Args:
        size: how many there are.

    Attributes:
        change: what becomes of a collective's texts on their way: takes its number and them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.change: Callable[[int, list[bytes]], list[bytes]] = lambda number, texts: texts
        self._rank = threading.local()
        self._there: list[Any] = [None] * size
        self._number = 0
        self._come, self._go = threading.Barrier(size, self._meet), threading.Barrier(size)

    def _meet(self) -> None:
        self._number += 1
        self._given = self.change(self._number, [*self._there])

    def get_world_size(self) -> int:
        return self.size

    def get_rank(self) -> int:
        return int(self._rank.number)

    def all_gather(self, into: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        self._there[self.get_rank()] = bytes(mine.tolist())
        self._come.wait(LIMIT)
        for one, text in zip(into, self._given, strict=True):
            one.copy_(torch.tensor(list(text), dtype=torch.uint8))
        self._go.wait(LIMIT)

    def run(self, said: list[list[Any]], sign: Sign | list[Sign]) -> list[Any]:
        """What each rank gets from its gathers, or the error of the last one."""

        def take_part(rank: int) -> Any:
            self._rank.number = rank
            gather = Gather(sign[rank] if isinstance(sign, list) else sign)
            try:
                return [gather(one) for one in said[rank]]
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(take_part, range(self.size), timeout=LIMIT))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Group]]:
    def made(size: int) -> Group:
        group = Group(size)
        monkeypatch.setattr(wire, "dist", group)
        return group

    return made  # type: ignore[return-value]


words = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([signs(), unsigned]))
def test_all_ranks_get_what_each_says(data: st.DataObject, sign: Sign) -> None:
    size = data.draw(st.integers(1, 4))
    said = [data.draw(st.lists(words, min_size=2, max_size=2)) for _ in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "dist", group := Group(size))
        assert group.run(said, sign) == [[list(one) for one in zip(*said, strict=True)]] * size


def test_sets_are_sorted_lists_and_tuples_are_lists(make: Any) -> None:
    assert make(2).run([[{3, 1}], [(2, frozenset([5, 4]))]], signs()) == [[[[1, 3], [2, [4, 5]]]]] * 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_who_changes_a_bit_is_noticed_by_all(data: st.DataObject) -> None:
    """In the sizes or in what is said, in the text or in its signature."""
    size, said = 3, [[{"rank": rank, "word": "x" * rank}, [rank]] for rank in range(3)]
    which, rank = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    place, bit = data.draw(st.floats(0, 1, exclude_max=True)), data.draw(st.integers(0, 7))

    def change(number: int, texts: list[bytes]) -> list[bytes]:
        if number == which:
            changed = bytearray(texts[rank])
            changed[int(place * len(changed))] ^= 1 << bit
            texts = [*texts[:rank], bytes(changed), *texts[rank + 1 :]]
        return texts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "dist", group := Group(size))
        group.change = change
        for error in group.run(said, signs()):
            assert isinstance(error, RuntimeError), error
            assert f"active rank {rank}'s {OUTSIDE}" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [3, 4])
def test_what_was_said_before_is_not_taken_again(make: Any, number: int, rank: int) -> None:
    seen: list[list[bytes]] = []

    def replay(at: int, texts: list[bytes]) -> list[bytes]:
        seen.append([*texts])
        if at == number:
            texts[rank] = seen[at - 3][rank]
        return texts

    group = make(2)
    group.change = replay
    for error in group.run([["a", "a"], ["b", "b"]], signs()):
        assert f"active rank {rank}'s {OUTSIDE}" in str(error)


def test_what_one_rank_said_is_not_taken_as_another_ones(make: Any) -> None:
    group = make(3)
    group.change = lambda number, texts: [texts[0], texts[2], texts[2]]
    for error in group.run([["a"], ["b"], ["b"]], signs()):
        assert f"active rank 1's {OUTSIDE}" in str(error)


@given(st.binary(max_size=40))
def test_no_other_bytes_are_signed(text: bytes) -> None:
    with pytest.raises(RuntimeError, match="active rank 7's is not signed"):
        verified(signs(), 7, "copy", text)
    assert verified(unsigned, 7, "copy", text) == text
    assert verified(signs(), 7, "copy", text + signs()("copy", text)) == text


numbers = st.integers()
held = st.builds(Held, st.text(max_size=9), numbers, st.booleans(), numbers, numbers, st.frozensets(numbers))
copies = st.builds(Copy, st.text(max_size=9), st.integers(0), st.frozensets(st.integers()))
holdings = st.builds(
    Holding,
    st.text(max_size=9),
    st.none() | held,
    st.lists(copies, max_size=3).map(tuple),
    st.integers(0),
    st.integers(0),
)


@given(holdings)
def test_a_holding_is_the_same_after_json(holding: Holding) -> None:
    assert holding_of(json.loads(json.dumps(dataclasses.asdict(holding), default=sorted))) == holding
