"""Cases of a test that run at night alone, beside those that always do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_night(why: str, cases: Iterable[Any]) -> list[Any]:
    """Marks cases of a ``parametrize`` as nightly.

    Args:
        why: what of the same runs always.
        cases: values, or tuples of them where there are several arguments.
    """
    mark = pytest.mark.nightly(why)
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases]
