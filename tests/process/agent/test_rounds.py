"""What a node makes of the record, and of what the others have: decisions without processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import select
from collections.abc import Iterator
from datetime import timedelta

import pytest
from elastic_agents import Alone
from torch import distributed as dist

from ft_wrapper.agent.elastic import WorkerSpec
from ft_wrapper.agent.ft_nodes import log_deaths, round_of, what_follows, what_is_missing
from ft_wrapper.agent.nodes import Inbox
from ft_wrapper.agent.process import Job
from ft_wrapper.agent.rounds import News, What
from ft_wrapper.agent.torch_api.classic_nodes import await_all, exchange
from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.deaths import holders
from ft_wrapper.protocol.entering import Entered
from ft_wrapper.protocol.records import FAULT, Member
from ft_wrapper.rendezvous.moves import adopt_rank_policy, close, complete_round, fold, remove_nodes
from ft_wrapper.rendezvous.record import Admission, Node, RendezvousRecord, RoundPolicy, digest
from ft_wrapper.store import TCPStore, TCPStoreServer

TIMEOUT = 120.0


def node(name: str, nproc: int = 1, role: str = "default") -> Node:
    return Node(name, 0, "host", nproc, role)


def come(state: RendezvousRecord, *nodes: Node, leaves: int | None = None) -> RendezvousRecord:
    old = [Admission(node("old"))] * state.folded
    return fold(state, [*old, *(Admission(one, leaves, digest(state.options)) for one in nodes)])


def begun(*nodes: Node, high: int | None = None) -> RendezvousRecord:
    return complete_round(come(RendezvousRecord(1, high or len(nodes)), *nodes))


def test_nothing_follows_while_all_are_there() -> None:
    state = begun(node("a"), node("b"))
    assert what_follows(state, node("a"), 0) is None
    assert what_follows(adopt_rank_policy(state), node("a"), 0) is None


def test_a_lost_or_a_late_node_calls_all_together_unless_the_others_go_on() -> None:
    state = begun(node("a"), node("b"), high=3)
    for changed, what, word in (
        (remove_nodes(state, [node("b")])[0], What.GONE, "node b is lost"),
        (come(state, node("c")), What.COME, "meet again"),
        (come(state, node("b"), leaves=0), What.COME, "meet again"),
    ):
        news = what_follows(changed, node("a"), 0)
        assert news is not None
        assert news.what is what
        assert word in news.why
        kept = remove_nodes(adopt_rank_policy(state), [node("b")])[0] if word.endswith("lost") else None
        assert kept is None or what_follows(kept, node("a"), 0) is None


def test_who_was_taken_out_comes_again() -> None:
    state = remove_nodes(adopt_rank_policy(begun(node("a"), node("b"))), [node("b")])[0]
    assert state.policy is RoundPolicy.RANK
    news = what_follows(state, node("b"), 0)
    assert news is not None
    assert news.what is What.COME
    assert "taken out" in news.why


def test_the_loss_of_the_ranks_store_calls_all_together() -> None:
    state = remove_nodes(adopt_rank_policy(begun(node("a"), node("b"))), [node("a")])[0]
    news = what_follows(state, node("b"), 0)
    assert news is not None
    assert news.what is What.GONE


def test_the_end_says_whether_the_job_has_failed() -> None:
    state = begun(node("a"), node("b"))
    assert what_follows(close(state), node("a"), 0) == News(What.CLOSED)
    failed = what_follows(close(close(state, "rank 3: exit code 7"), "later"), node("a"), 0)
    assert failed == News(What.OVER, "the job was ended: rank 3: exit code 7")


def test_a_node_without_a_seat_says_what_it_waits_for_and_how_long() -> None:
    alone = come(RendezvousRecord(2, 3), node("a"))
    assert what_is_missing(alone, node("a"), 600.0) == "for 1 more of at least 2 nodes, at most 600 s"
    full = begun(node("a"), node("b"), high=2)
    assert what_is_missing(full, node("a"), 600.0) == ""
    late = come(full, node("c"))
    waits_for = what_is_missing(late, node("c"), 600.0)
    assert waits_for.startswith("all seats of the job are taken, by 2 of 2 nodes; until one of them is lost")
    assert what_is_missing(close(late), node("c"), 600.0) == "", "the job is over"


SIZES = [(2, "trainer"), (1, "reader"), (3, "trainer")]


def spec_of(nproc: int, role: str) -> WorkerSpec:
    return WorkerSpec(role, nproc, Alone(), entrypoint="true")


PLACES = [
    # base rank, role rank, role world size
    (0, 0, 5),
    (2, 0, 1),
    (3, 2, 5),
]


def test_places_from_the_record() -> None:
    nodes = [node(str(number), *size) for number, size in enumerate(SIZES)]
    state = begun(*nodes)
    for number, (one, (base, role_rank, role_size)) in enumerate(zip(nodes, PLACES, strict=True)):
        where = round_of(state, one, "host:1")
        assert (where.base_rank, where.role_rank, where.role_world_size) == (base, role_rank, role_size)
        assert (where.group_rank, where.group_world_size, where.world_size) == (number, 3, 6)
        environment = Job(one.nproc, one.role, "id", 0).environment(0, 0, where)
        assert environment["RANK"] == str(base)
        assert environment["ROLE_RANK"] == str(role_rank)
        assert environment["LOCAL_WORLD_SIZE"] == str(one.nproc)


def test_places_by_exchange_are_the_same() -> None:
    store = dist.HashStore()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        rounds = list(
            pool.map(
                lambda n: exchange(store, n, 3, spec_of(*SIZES[n]), "host:1" if n == 0 else ""), range(3)
            )
        )
    found = [(one.base_rank, one.role_rank, one.role_world_size) for one in rounds]
    assert found == PLACES
    assert {one.address for one in rounds} == {"host:1"}
    assert [one.group_rank for one in rounds] == [0, 1, 2]


def test_a_node_ends_once_all_know_that_all_are_done() -> None:
    """If the host of the store ended first, a node that still waits would lose it; later that is harmless."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with contextlib.closing(TCPStoreServer()) as server:
            at = ("127.0.0.1", server.port)
            ours, theirs = (dist.TCPStore(*at, timeout=timedelta(seconds=60)) for _ in range(2))
            assert await_all(ours, 0, 2, 0.01) == [1]
            ended = pool.submit(await_all, ours, 0, 2, 60.0)
            theirs.set("done/1", "")
            theirs.wait(["knows/0"])
            assert not ended.done()
        assert ended.result(TIMEOUT) == []


def test_news_of_another_round_do_not_count() -> None:
    inbox = Inbox()
    inbox.put(inbox.term, News(What.COME, "old"))
    inbox.begin_term()
    inbox.put(inbox.term, News(What.COME, "new"))
    assert select.select([inbox], [], [], 0)[0] == [inbox]
    assert inbox.take() == [News(What.COME, "new")]
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.close()
    inbox.put(inbox.term, News(What.COME, "too late"))


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with (
        contextlib.closing(TCPStoreServer()) as server,
        contextlib.closing(TCPStore("127.0.0.1", server.port)) as client,
    ):
        yield client


def test_exactly_those_are_declared_dead_that_held_the_slots(store: TCPStore) -> None:
    old = [Agreement(store).joining.register(slot) for slot in (0, 1)]
    dead = holders(Agreement(store), range(3))
    assert dead == old, "no one has held slot 2"
    Agreement(store).joining.register(1)  # a new one, started by the node that got the seat
    thread = log_deaths(store, dict.fromkeys(dead, "its node was lost"), return_=False)
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert Agreement(store).ends.deaths_of(-1) == set(old)
    assert {fault.message for fault in Agreement(store).ends.faults_of(-1)} == {"its node was lost"}


def test_the_loss_of_a_node_of_spares_ends_nothing(store: TCPStore) -> None:
    active, spare, _ = members = [Agreement(store).joining.register(slot) for slot in range(3)]
    for member in members:
        Agreement(store).joining.join_first(member, range(3))
    current = Agreement(store).iterations.read_current()
    assert current is not None
    view = current
    Agreement(store).entering.enter(view.n, Entered(active, 0), (3, 1), ("host", 1))

    def lose(member: Member) -> str | None:
        thread = log_deaths(store, {member: "its node was lost"}, return_=False)
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        return Agreement(store).ends.outcome_of(view.n)

    assert lose(spare) is None
    assert Agreement(store).ends.deaths_of(view.n) == {spare}
    assert lose(active) == FAULT


def test_formation_size_stays_when_the_job_grows() -> None:
    state = come(adopt_rank_policy(begun(node("a", 2), high=2)), node("b", 2))
    where = round_of(state, node("b", 2), "host:1")
    assert (where.world_size, where.formation_size, where.base_rank, where.formed) == (4, 2, 2, True)
