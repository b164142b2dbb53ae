"""What an executor remembers from one action to the next, and what the agent is notified of."""

from __future__ import annotations

import dataclasses

import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from ft_wrapper.exception import StoreError
from ft_wrapper.rendezvous.executor import Executor, _missing
from ft_wrapper.rendezvous.moves import close, fold
from ft_wrapper.rendezvous.operations import Context
from ft_wrapper.rendezvous.record import Admission, Node, RendezvousRecord, Waiting, digest
from ft_wrapper.rendezvous.register import Board, RecordRegister
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import FakeStore

ME, OTHER = Node("0"), Node("1")
SETTINGS = RendezvousSettings("job", 2, 3)
TIMEOUT = 10.0


def executor(store: FakeStore) -> Executor:
    return Executor(ME, RecordRegister(store, RendezvousRecord(2, 3)), SETTINGS)


def test_the_time_of_a_spare_begins_once_it_is_called() -> None:
    store = FakeStore()
    spare = RendezvousRecord(1, 1, complete=True, spares=(ME,))
    called = dataclasses.replace(spare, spares=(), waiting=(Waiting(ME),))
    made, before = executor(store), Context(ME, spare, store.now(), store.now() + TIMEOUT)
    store.clock.advance(100.0)
    assert made._next(before, spare, TIMEOUT).deadline == before.deadline
    after = made._next(before, called, TIMEOUT)
    assert after.deadline == store.now() + TIMEOUT
    store.clock.advance(1.0)
    assert made._next(after, called, TIMEOUT).deadline == after.deadline


def test_the_last_call_begins_once_there_are_enough_and_anew_in_each_round() -> None:
    store = FakeStore()
    empty = RendezvousRecord(2, 3)
    enough = fold(empty, [Admission(node, None, digest({})) for node in (ME, OTHER)])
    made, began = executor(store), store.now()
    context = made._next(Context(ME, empty, began), empty, TIMEOUT)
    assert context.enough_since is None
    context = made._next(context, enough, TIMEOUT)
    assert context.enough_since == began
    store.clock.advance(1.0)
    context = made._next(context, enough, TIMEOUT)
    assert context.enough_since == began
    assert made._next(context, empty, TIMEOUT).enough_since is None
    following = dataclasses.replace(enough, round=enough.round + 1)
    assert made._next(context, following, TIMEOUT).enough_since == began + 1.0


def test_a_node_that_was_a_spare_once_is_none_for_ever() -> None:
    made = executor(FakeStore())
    made.was_spare = True
    made.exit()
    assert not made.was_spare


def test_a_change_that_loses_to_others_again_and_again_comes_to_an_end() -> None:
    store, tries = FakeStore(), list[int]()
    made, other = (RecordRegister(store.clone(), RendezvousRecord(2, 3)) for _ in range(2))

    def too_late(record: RendezvousRecord) -> RendezvousRecord:
        assert len(tries) < 100, "it is tried for ever"
        tries.append(record.version)
        store.clock.advance(1.0)
        other.touch()
        return close(record)

    with pytest.raises(RendezvousTimeoutError, match=f"first for {TIMEOUT:g} s"):
        made.change(too_late, TIMEOUT)
    assert tries == list(range(len(tries)))
    assert not made.read().closed
    assert made.change(close, TIMEOUT).closed


def test_missing_nodes_are_named_where_ids_are_numbers() -> None:
    record = RendezvousRecord(2, 3)
    assert _missing(record, [ME]) == "; missing: 1, 2"
    assert _missing(record, [ME, Node("a")]) == ""
    assert _missing(record, [Node("3")]) == ""


def test_an_error_in_a_callback_of_the_agents_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(argument: object) -> None:
        raise OSError(f"cannot take {argument}")

    board = Board(fail, fail, fail)
    board.on_evicted(())
    board.on_change(RendezvousRecord(1, 1))
    board.lose(StoreError("gone"))
    names = ("on_evicted", "on_change", "on_lost")
    assert [record.message for record in caplog.records] == [
        f"{name} of the rendezvous failed" for name in names
    ]
