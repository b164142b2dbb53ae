"""What tests of the protocol run on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from ranks import Simulated, Threads
from support.store_kinds import ON_REAL, REAL, real_store

from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import FakeStore


@pytest.fixture(autouse=True)
def no_logging() -> Iterator[None]:
    """The simulation logs a great deal: formatting that would take longer than its thousands of jobs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=["seed 0", "seed 1", *ON_REAL])
def run(request: pytest.FixtureRequest, etcd_if_any: object) -> Iterator[Simulated | Threads]:
    """What runs functions of several ranks on one store of each kind."""
    if request.param in REAL:
        with real_store(request.param, request) as connect:
            yield Threads(connect)
    else:
        yield Simulated(int(request.param.removeprefix("seed ")))


@pytest.fixture(params=["fake", *ON_REAL])
def store(request: pytest.FixtureRequest, etcd_if_any: object) -> Iterator[StoreMixin]:
    """A store of each kind, for steps that one after another takes."""
    if request.param in REAL:
        with real_store(request.param, request) as connect:
            yield connect()
    else:
        yield FakeStore()
