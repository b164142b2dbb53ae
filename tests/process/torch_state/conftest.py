from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def frozen_again() -> Iterator[None]:
    """What the test unfreezes is frozen in the end: or later collections would look at all imports."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()
