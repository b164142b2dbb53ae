"""A plugin of pytest for torch's tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from ft_wrapper.store import TCPStoreServer


@pytest.fixture(autouse=True)
def own_store() -> Iterator[None]:
    """Each test finds a TCPStore server of its own: an endpoint of ours serves one job."""
    server = TCPStoreServer(0)
    os.environ["FT_WRAPPER_OUTSIDE_TCP"] = f"localhost:{server.port}"
    yield
    server.close()


def pytest_sessionfinish() -> None:
    """Ends agents that a failed test has left behind: this process would wait for them."""
    for agent in multiprocessing.active_children():
        agent.kill()
