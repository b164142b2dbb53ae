"""A node that is kept out, by its handler: what the others see, and what it sees; on TCPStore and etcd."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
from memory_backend import MemoryBackend, RealClock
from test_handler import ON_BOTH, TIMEOUT, Nodes, wait_until
from test_handler import nodes as nodes
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from ft_wrapper.agent.rounds import JobResult
from ft_wrapper.rendezvous.backends import EtcdBackend
from ft_wrapper.rendezvous.handler import FtRendezvousHandler
from ft_wrapper.rendezvous.moves import close, quarantine, release
from ft_wrapper.rendezvous.record import Node, RendezvousRecord
from ft_wrapper.rendezvous.register import Board, RecordRegister
from ft_wrapper.rendezvous.settings import Identity, RendezvousSettings
from ft_wrapper.store.address import EtcdAddress
from ft_wrapper.testing import EtcdServer, FakeStore


def outside(nodes: Nodes) -> list[tuple[str, str]]:
    """Who is kept out, and why."""
    backend = nodes.make_backend()
    store = backend.connect()
    try:
        record = RecordRegister(store, RendezvousRecord(1, 1)).read()
        return [(one.node.name, one.reason) for one in record.quarantine]
    finally:
        store.close()
        backend.close()


def test_a_node_that_never_joined_is_told_of_until_it_joins(nodes: Nodes) -> None:
    a, bad = nodes.make("0", 1, 2), nodes.make("1", 1, 2)
    bad.begin().quarantine("no disk")
    assert outside(nodes) == [("1:0", "no disk")]
    (alone,) = nodes.all_join(a)
    assert (alone.rank, alone.world_size) == (0, 1), "the others do not wait for it"
    bad.begin().quarantine("no disk yet")
    assert outside(nodes) == [("1:0", "no disk yet")]
    assert a.num_nodes_waiting() == 0
    assert a.adopt_rank_policy()
    assert nodes.all_join(bad)[0].rank == 1
    assert outside(nodes) == []


def test_a_seat_that_is_given_up_goes_to_a_spare(nodes: Nodes) -> None:
    a, bad, spare = (nodes.make(name, 2, 2) for name in "012")
    nodes.all_join(a, bad)
    assert a.adopt_rank_policy()
    waiting = nodes.join(spare)
    wait_until(a, lambda state: len(state.spares) == 1)
    assert not bad.was_spare
    bad.begin().quarantine("no disk")
    assert waiting.result(TIMEOUT).rank == 1
    assert spare.was_spare
    again = nodes.join(bad)
    wait_until(a, lambda state: [node.id for node in state.spares] == ["1"])
    spare.begin().quarantine("no disk")
    assert again.result(TIMEOUT).rank == 1
    assert bad.was_spare
    assert outside(nodes) == [("2:0", "no disk")]
    assert a.num_nodes_waiting() == 0, "no one else was disturbed"


@ON_BOTH
def test_its_wait_ends_with_the_job(nodes: Nodes) -> None:
    a, bad = nodes.make("0", 1, 2), nodes.make("1", 1, 2)
    nodes.all_join(a)
    presence = bad.begin()
    presence.quarantine("no disk")
    presence.wait_in_quarantine(0.01)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(presence.wait_in_quarantine, TIMEOUT)
        a.set_closed("rank 0 failed")
        with pytest.raises(RendezvousGracefulExitError, match=r"rank 0 failed; node 1 .* was kept out"):
            waits.result(TIMEOUT)
    with pytest.raises(RendezvousClosedError):
        bad.next_rendezvous()


def test_a_node_that_leaves_is_not_told_of(nodes: Nodes) -> None:
    a, bad, other = nodes.make("0", 1, 2), nodes.make("1", 1, 2), nodes.make("2", 1, 2)
    nodes.all_join(a)
    for node in (bad, other):
        node.begin().quarantine("no disk")
    bad.leave()
    assert outside(nodes) == [("2:0", "no disk")]
    assert other.shutdown()
    assert outside(nodes) == []


def test_another_agent_of_its_id_takes_its_place_outside(nodes: Nodes) -> None:
    first, second, third = (nodes.make("1", 1, 2) for _ in range(3))
    first.begin().quarantine("no disk")
    second.begin().quarantine("no link")
    assert outside(nodes) == [("1:1", "no link")]
    nodes.all_join(third)  # it was never kept out
    assert outside(nodes) == []


def test_those_who_came_say_who_was_kept_out(nodes: Nodes) -> None:
    a, bad = nodes.make("0", 2, 2, join_timeout=0.3), nodes.make("1", 2, 2)
    bad.begin().quarantine("no disk")
    with pytest.raises(
        RendezvousTimeoutError, match=r"missing: 1; kept out: node 1 \(localhost\) \(no disk\)"
    ):
        a.next_rendezvous()
    assert a.shutdown() and not bad.is_closed(), "a node that came to nothing has closed the rendezvous"


def test_the_first_failure_is_what_counts() -> None:
    record = RendezvousRecord(1, 2)
    for now, reason in enumerate(("one", "two")):
        record = quarantine(record, Node("2", 3), reason, float(now))
        record = quarantine(record, Node("1"), reason, float(now))
    first, second = record.quarantine
    assert (first.node, first.reason, first.since) == (Node("1"), "two", 0.0)
    assert second.node.name == "2:3"
    record = release(record, Node("2", 2))  # an older agent, which does not know yet
    record = release(record, Node("1"))
    assert [one.node.name for one in record.quarantine] == ["2:3"]
    assert RendezvousRecord.from_json(record.to_json(), "key") == record
    over = close(record)
    assert quarantine(over, Node("1"), "one", 0.0) == release(over, Node("2", 3)) == over


def test_the_host_stays_until_those_outside_know_of_the_end() -> None:
    store, told, ended = FakeStore(RealClock()), threading.Event(), threading.Event()
    settings = RendezvousSettings("job", 1, 2, last_call_timeout=0.0)

    def hold(_: object) -> None:
        told.set()
        ended.wait(TIMEOUT)

    host = FtRendezvousHandler(settings, Identity("0"), MemoryBackend(store, is_host=True))
    bad = FtRendezvousHandler(settings, Identity("1"), MemoryBackend(store), Board(on_change=hold))
    bad.begin().quarantine("no disk")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            pool.submit(host.next_rendezvous).result(TIMEOUT)
            assert told.wait(TIMEOUT)
            ending = pool.submit(host.shutdown)
            with pytest.raises(concurrent.futures.TimeoutError):
                ending.result(0.2)
        finally:
            ended.set()
        assert ending.result(TIMEOUT)
        assert store.check(["ft_wrapper/rendezvous/1/goodbye/1:0"])
    assert bad.shutdown()


def test_the_last_one_outside_removes_what_is_in_etcd(etcd: EtcdServer, prefix: str) -> None:
    nodes = Nodes(lambda: EtcdBackend(EtcdAddress(etcd.endpoints, prefix)))
    a, bad = nodes.make("0", 1, 2), nodes.make("1", 1, 2)
    nodes.all_join(a)
    presence = bad.begin()
    presence.quarantine("no disk")
    assert a.shutdown()
    with pytest.raises(RendezvousGracefulExitError):
        presence.wait_in_quarantine(TIMEOUT)
    assert outside(nodes) == [("1:0", "no disk")], "it was taken away before all had seen the end"
    assert bad.shutdown()
    assert outside(nodes) == []
    nodes.close()


@pytest.mark.parametrize("code", [0, 75])
def test_a_lost_node_starts_a_job_over_only_if_it_is_to_be_tried_again(
    etcd: EtcdServer, prefix: str, code: int
) -> None:
    nodes = Nodes(lambda: EtcdBackend(EtcdAddress(etcd.endpoints, prefix)))
    a, lost = nodes.make("0", 1, 2), nodes.make("1", 1, 2)
    nodes.all_join(a, lost)
    assert a.adopt_rank_policy()
    lost.leave()
    wait_until(a, lambda state: None in [seat.occupant for seat in state.seats])
    assert a.shutdown(JobResult(code).to_text())
    again = nodes.join(nodes.make("1", 1, 2))
    if code == 75:
        assert again.result(TIMEOUT).world_size == 1
    else:
        with pytest.raises(RendezvousClosedError):
            again.result(TIMEOUT)
    nodes.close()
