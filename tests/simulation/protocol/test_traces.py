"""Code that moves to another place leaves the order of store operations as it was."""

from __future__ import annotations

import pytest
from traces import expected, groups, hash_of

NIGHTLY = pytest.mark.nightly("every tenth group runs always")


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[NIGHTLY] if number % 10 else []) for number, first in enumerate(groups())],
)
def test_the_same_operations_in_the_same_order(first: int) -> None:
    assert hash_of(first) == expected()[str(first)], (
        f"seeds from {first} on: see tests/simulation/protocol/traces.py"
    )
