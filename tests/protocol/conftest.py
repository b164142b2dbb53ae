"""The simulation logs a great deal, none of which a test needs."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_logging() -> Iterator[None]:
    """Formatting the warnings of thousands of simulated jobs would take longer than the jobs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
