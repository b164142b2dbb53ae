"""Neighbouring nodes that are lost together are out after one timeout, however many they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from lost_rack import CASES, lose

from ft_wrapper.rendezvous.record import RoundPolicy

WITHIN = 30.5
"""A timeout of 15 s, two looks in which one stands still, 5 s each, and a look of what time it is."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings of so many simulated nodes would take longer than the nodes."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.mark.parametrize("policy", [RoundPolicy.GROUP, RoundPolicy.RANK])
@pytest.mark.parametrize("case", list(CASES))
def test_one_timeout_for_all(case: str, policy: str) -> None:
    seated, spares, lost = CASES[case]
    if case != next(iter(CASES)):  # as many as that take their time
        first = lost.start // 4
        seated, spares, lost = seated // 4, spares // 4, range(first, first + max(2, len(lost) // 4))
    got = lose(seated, spares, lost, policy)
    print(case, policy, got.seconds, got.round_after, got.changes)
    assert got.seconds <= WITHIN
    assert got.round_after is None or got.round_after <= WITHIN + 5.0
    assert got.changes <= 6, "they were taken out one by one"
    # Two looks of an interval that begin in 5 s, each at two nodes, and at the spares that are between.
    assert got.healthy_reads <= 2 * (2 + spares)
    assert max(got.reads.values()) <= 8 * (seated + spares), "looks at all nodes again and again"
