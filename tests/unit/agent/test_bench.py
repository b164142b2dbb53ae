"""Which nodes are measured together, and which are found to fail or to be slow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_wrapper.agent.bench import FAILS, GOOD, NOT_COMPARED, SLOW, Figures, node_table, rounds, verdict_on

SIZES = st.integers(3, 40)
NOISE = st.floats(1.0, 1.2)


def measured(
    size: int,
    noise: st.DataObject,
    products: Mapping[int, float] = MappingProxyType({}),
    links: Mapping[int, float] = MappingProxyType({}),
    pairs: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> list[Figures]:
    """What nodes find: other seconds for the product of some, for the link of some, or for some pairs."""
    gathers: dict[int, list[tuple[int, float]]] = {node: [] for node in range(size)}
    for pair in (pair for together in rounds(size) for pair in together):
        seconds = noise.draw(NOISE) * max(links.get(node, 0.01) for node in pair)
        for node in pair:
            gathers[node].append((sum(pair) - node, pairs.get(pair, seconds)))
    return [Figures("", noise.draw(NOISE) * products.get(node, 1.0), gathers[node]) for node in range(size)]


# The rounds ------------------------------------------------------------------------------------------------


@given(SIZES)
def test_each_node_is_measured_with_two_other_nodes_one_after_the_other(size: int) -> None:
    made = rounds(size)
    assert len(made) == 2 + size % 2
    for pairs in made:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes)), "a node has two partners at the same time"
    partners: dict[int, set[int]] = {node: set() for node in range(size)}
    for one, other in (pair for pairs in made for pair in pairs):
        assert 0 <= one < other < size
        partners[one].add(other)
        partners[other].add(one)
    assert {len(found) for found in partners.values()} == {2}


def test_fewer_nodes() -> None:
    assert rounds(1) == []
    assert rounds(2) == [[(0, 1)]]


# The verdicts ----------------------------------------------------------------------------------------------


def judged(found: list[Figures]) -> list[str]:
    return [verdict_on(found, node, 1.5) for node in range(len(found))]


def all_good(size: int, but: int | None = None, verdict: str = "") -> list[str]:
    return [verdict if node == but else GOOD for node in range(size)]


@given(SIZES, st.data())
def test_equal_nodes_are_good(size: int, data: st.DataObject) -> None:
    assert judged(measured(size, data)) == all_good(size)


@given(SIZES, st.data())
def test_the_slow_node_is_found_and_no_other(size: int, data: st.DataObject) -> None:
    bad, much = data.draw(st.integers(0, size - 1)), data.draw(st.floats(2.0, 100.0))
    in_product, in_link = data.draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    found = measured(size, data, {bad: much} if in_product else {}, {bad: 0.01 * much} if in_link else {})
    verdict = judged(found)[bad]
    assert judged(found) == all_good(size, bad, verdict)
    assert verdict.startswith(SLOW)
    assert ("product" in verdict, "all-gathers" in verdict) == (in_product, in_link)


@given(SIZES, st.data())
def test_a_node_without_a_link_fails_and_no_other(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, size - 1))
    found = measured(size, data, links={bad: math.inf})
    assert judged(found) == all_good(size, bad, f"{FAILS}both of its all-gathers failed")


@given(SIZES, st.data())
def test_one_slow_or_lost_link_blames_neither_node(size: int, data: st.DataObject) -> None:
    pair = data.draw(st.sampled_from([pair for pairs in rounds(size) for pair in pairs]))
    found = measured(size, data, pairs={pair: data.draw(st.sampled_from([1.0, math.inf]))})
    assert judged(found) == all_good(size)


@given(st.integers(5, 40), st.data())
def test_a_node_between_two_that_failed_is_not_blamed(size: int, data: st.DataObject) -> None:
    middle = data.draw(st.integers(0, size - 1))
    bad = [partner for partner, _ in measured(size, data)[middle].gathers]
    found = measured(size, data, links=dict.fromkeys(bad, math.inf))
    for node in bad:
        found[node] = Figures("a crash")
    assert judged(found) == [f"{FAILS}a crash" if node in bad else GOOD for node in range(size)]


@given(SIZES, st.data())
def test_if_no_pair_works_no_node_is_blamed(size: int, data: st.DataObject) -> None:
    found = measured(size, data, links=dict.fromkeys(range(size), math.inf))
    assert judged(found) == [f"{NOT_COMPARED}no all-gather works"] * size


@pytest.mark.parametrize("seconds", [0.01, math.inf])
def test_two_nodes_are_not_compared(seconds: float) -> None:
    found = [Figures("", 1.0, [(1, seconds)]), Figures("", 9.0, [(0, seconds)])]
    assert judged(found) == [f"{NOT_COMPARED}fewer than 3 nodes"] * 2
    # Nor are two that are left, nor one.
    assert judged([*found, Figures("a crash")])[:2] == judged(found)
    assert judged([Figures("", 1.0)]) == judged(found)[:1]


def test_the_table() -> None:
    ring = {(0, 1): 0.02, (1, 2): 0.4, (0, 2): 0.5}
    found = [
        Figures("", 0.2, [(1, ring[0, 1]), (2, ring[0, 2])]),
        Figures("", 0.21, [(0, ring[0, 1]), (2, ring[1, 2])]),
        Figures("", 0.22, [(1, ring[1, 2]), (0, ring[0, 2])]),
        Figures("no disk"),
    ]
    assert node_table(found, judged(found), [(id_, f"h{id_}") for id_ in "abcd"]).splitlines() == [
        "node  host  product  all-gather      all-gather     verdict",
        "a     ha    200 ms   20.0 ms with b  500 ms with c  good",
        "b     hb    210 ms   20.0 ms with a  400 ms with c  good",
        "c     hc    220 ms   400 ms with b   500 ms with a  slow: all-gathers 400 ms, 20.0 times the median",
        "d     hd    -        -               -              fails: no disk",
    ]
