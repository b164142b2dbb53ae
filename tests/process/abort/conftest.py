from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver as forkservers
from multiprocessing import resource_tracker as trackers
from typing import Any

import pytest


@pytest.fixture(scope="package", autouse=True)
def forkserver() -> Iterator[None]:
    """One process imports torch, and all ranks are forked from it."""
    server: Any = vars(forkservers)["_forkserver"]  # its _stop is for tests
    tracker: Any = vars(trackers)["_resource_tracker"]
    tracked = tracker._fd is not None
    server._stop()
    # Beside torch, what DDP and DeviceMesh import when they are first used.
    multiprocessing.set_forkserver_preload(["ft_wrapper.abort", "torch._dynamo", "torch.distributed.tensor"])
    yield
    server._stop()
    multiprocessing.set_forkserver_preload([])
    if not tracked:
        tracker._stop()
