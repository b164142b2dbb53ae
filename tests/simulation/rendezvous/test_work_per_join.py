"""How much a join costs: a constant number of store operations a node, however many come at once."""

from __future__ import annotations

import collections

import pytest
from simulated_nodes import StoreBoard

from ft_wrapper.rendezvous.executor import Executor
from ft_wrapper.rendezvous.record import Node, RendezvousRecord
from ft_wrapper.rendezvous.register import Board, RecordRegister
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import Scheduler
from tests.explorer.stores import SimulatedStore


def join_at_once(size: int, seed: int, rounds: int) -> tuple[list[float], collections.Counter[str]]:
    """All nodes join at once, so many times in a row: operations a node in each round, and all by kind."""
    scheduler = Scheduler(seed, max_steps=1_000_000)
    settings = RendezvousSettings("job", size, size)
    initial = RendezvousRecord(size, size, settings.options())
    store = SimulatedStore(scheduler)
    operations: collections.Counter[int] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    rounds_of: dict[str, int] = {}

    def count(client: str, operation: str, args: object) -> None:
        if operation != "sleep":
            operations[rounds_of[client]] += 1
            kinds[operation] += 1

    store.on_operation(count)

    def node(number: int) -> None:
        client = store.clone(str(number))
        rounds_of[client.client] = 0
        register = RecordRegister(client, initial)
        register.board = StoreBoard(register, Board())
        executor = Executor(Node(str(number)), register, settings)
        leaving = None
        for this in range(rounds):
            rounds_of[client.client] = this
            leaving = executor.join(leaving).round
            assert leaving == this

    for number in range(size):
        scheduler.spawn(str(number), node, number)
    scheduler.run()
    return [operations[this] / size for this in range(rounds)], kinds


@pytest.mark.parametrize("size", [16, 256])
def test_join_takes_five_operations(size: int) -> None:
    """Read the record, append to the log, count, wait, read; a few more for the one that writes."""
    (first,), kinds = join_at_once(size, seed=1, rounds=1)
    print(f"{first:.3f} operations a node for {size} nodes: {dict(kinds)}")
    assert first <= 5 + 8 / size
    assert kinds["multi_set"] == 1, "the record was written more than once"


def test_coming_again_takes_no_more() -> None:
    """A restart of all: the record is known; one more change says that somebody waits, and is read."""
    (_, again), kinds = join_at_once(64, seed=3, rounds=2)
    print(f"{again:.3f} operations a node: {dict(kinds)}")
    assert again <= 5.5
