"""Votes over connections of their own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ft_wrapper.live import wire
from ft_wrapper.live.wire import Ballot

HOST = "127.0.0.1"


@contextlib.contextmanager
def opened(size: int, timeout: float = 30.0) -> Iterator[tuple[list[Ballot], ThreadPoolExecutor]]:
    """Ballots of so many ranks, and a thread for each."""
    with contextlib.ExitStack() as stack:
        ballots = [Ballot(rank, HOST, timeout) for rank in range(size)]
        for one in ballots:
            stack.callback(one.close)
        threads = stack.enter_context(ThreadPoolExecutor(size))
        addresses = [one.address for one in ballots]
        for done in [threads.submit(one.open, addresses) for one in ballots]:
            done.result(30)
        yield ballots, threads


def vote(threads: ThreadPoolExecutor, one: Ballot, *values: int) -> Future[wire.Values]:
    return threads.submit(one.vote, (values[0], values[1], values[2]))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_least_of_each_value(size: int) -> None:
    choose = random.Random(size)
    with opened(size) as (ballots, threads):
        for _ in range(50):
            said = [[choose.randint(-(1 << 62), 1 << 62) for _ in range(3)] for _ in ballots]
            votes = [vote(threads, one, *values) for one, values in zip(ballots, said, strict=True)]
            least = tuple(min(values) for values in zip(*said, strict=True))
            assert [one.result(30) for one in votes] == [least] * size


@pytest.mark.parametrize("size", [1, 2, 7, 17])
def test_all_hear_what_rank_0_tells(size: int) -> None:
    choose = random.Random(size)
    sizes = [0, 1, 4096, *([3 << 20] if size < 10 else [])]
    said = [choose.randbytes(choose.choice(sizes)) for _ in range(8)]
    votes = [choose.random() < 0.5 for _ in said]  # both go through the same connections

    def take_part(one: Ballot, rank: int) -> list[bytes]:
        heard = []
        for number, (each, has_vote) in enumerate(zip(said, votes, strict=True)):
            heard.append(one.tell(b"not mine" if rank else each))
            assert not has_vote or one.vote((number, rank, -rank)) == (number, 0, 1 - size)
        return heard

    with opened(size) as (ballots, threads):
        heard = [threads.submit(take_part, one, rank) for rank, one in enumerate(ballots)]
        assert all(each.result(30) == said for each in heard)


def test_rank_0_waits_for_none() -> None:
    with opened(3) as (ballots, _):
        assert ballots[0].tell(b"says it") == b"says it"
        assert ballots[2].tell(b"") == b"says it"


def test_a_vote_ends_nowhere_without_one() -> None:
    size = 5

    def votes_and_leaves(one: Ballot) -> None:
        with contextlib.closing(one):
            one.vote((0, 0, 0))

    for silent in range(size):
        with opened(size) as (ballots, threads):
            votes = [threads.submit(votes_and_leaves, one) for one in ballots if one is not ballots[silent]]
            ballots[silent].close()
            for one in votes:
                with pytest.raises(ConnectionError, match=r"active rank \d is gone"):
                    one.result(30)


def test_who_is_gone_is_named() -> None:
    with opened(2) as (ballots, threads):
        waits = vote(threads, ballots[0], 0, 0, 0)
        ballots[1].close()
        with pytest.raises(ConnectionError, match="active rank 1 is gone: no connection for a vote"):
            waits.result(30)


def test_who_does_not_vote_is_named() -> None:
    with (
        opened(3, timeout=0.1) as (ballots, _),
        pytest.raises(TimeoutError, match=r"active rank 2 has not come to a vote in 0\.1 s"),
    ):
        ballots[0].vote((0, 0, 0))


def test_who_does_not_open_is_named() -> None:
    ballots = [Ballot(rank, HOST, 0.1) for rank in range(2)]
    try:
        with pytest.raises(TimeoutError, match=r"active rank 1 has not come to a vote in 0\.1 s"):
            ballots[0].open([one.address for one in ballots])
    finally:
        for one in ballots:
            one.close()


def test_a_rank_that_closed_before_it_opened_is_named() -> None:
    ballots = [Ballot(rank, HOST, 5.0) for rank in range(2)]
    ballots[1].close()
    try:
        with pytest.raises(ConnectionError, match="active rank 1 is gone"):
            ballots[0].open([one.address for one in ballots])
    finally:
        ballots[0].close()


def test_an_abort_frees_this_rank_and_no_other() -> None:
    with opened(2) as (ballots, threads):
        first = vote(threads, ballots[0], 0, 0, 0)
        ballots[0].abort()
        with pytest.raises(ConnectionError, match="active rank 1 is gone"):
            first.result(30)
        assert ballots[1].vote((3, 3, 3)) == (0, 0, 0)  # rank 0 had said its own
        for _ in range(3):
            ballots[1].to[0].sendall(b"nor does it later")


def test_an_abort_frees_who_waits_for_a_connection() -> None:
    ballots = [Ballot(rank, HOST, 30.0) for rank in range(2)]
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(ballots[0].open, [one.address for one in ballots])
        try:
            while not waits.done():  # before it waits, an abort does nothing yet: so does the wrapper
                ballots[0].abort()
                with contextlib.suppress(TimeoutError, ConnectionError):
                    waits.result(0.01)
            with pytest.raises(ConnectionError, match="active rank 1 is gone"):
                waits.result(0)
        finally:
            for one in ballots:
                one.close()


def test_nothing_stays_open() -> None:
    before = open_sockets()
    with opened(5) as (ballots, threads):
        for one in [vote(threads, one, 0, 0, 0) for one in ballots]:
            one.result(30)
        assert open_sockets() == before + 5 * 2 * 3
    assert open_sockets() == before


def open_sockets() -> int:
    import psutil

    return len(psutil.Process().net_connections("tcp"))
