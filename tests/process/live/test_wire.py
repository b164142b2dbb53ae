"""Votes over connections of their own: a stranger that sends no hello delays no vote."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import resource
import secrets
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from ft_wrapper.live import wire
from ft_wrapper.live.wire import Ballot, Lines, Sign, hello, unsigned
from ft_wrapper.protocol.seal import Seal

HOST, LIMIT = "127.0.0.1", 60.0
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.timeout(120)


def sealed(what: str, said: bytes) -> bytes:
    return Seal(b"the job's").sign(what, said)


SIGNS = pytest.mark.parametrize("sign", [sealed, unsigned], ids=["secret", "open"])


@contextlib.contextmanager
def ballots(size: int, sign: Sign = sealed, timeout: float = LIMIT) -> Iterator[list[Ballot]]:
    with contextlib.ExitStack() as stack:
        made = [Ballot(rank, HOST, timeout, sign) for rank in range(size)]
        for one in made:
            stack.callback(one.close)
        yield made


def open_all(made: Sequence[Ballot], threads: ThreadPoolExecutor) -> None:
    addresses = [one.address for one in made]
    for done in [threads.submit(one.open, addresses) for one in made]:
        done.result(LIMIT)


@contextlib.contextmanager
def opened(size: int, timeout: float = LIMIT) -> Iterator[tuple[list[Ballot], ThreadPoolExecutor]]:
    """Ballots of so many ranks, and a thread for each."""
    with ballots(size, timeout=timeout) as made, ThreadPoolExecutor(size) as threads:
        open_all(made, threads)
        yield made, threads


class Strangers(contextlib.ExitStack):
    """Connections of who is no rank."""

    def connect(self, one: Lines, said: bytes = b"") -> socket.socket:
        line: socket.socket = self.enter_context(socket.create_connection(one.address.name[:2], LIMIT))
        line.sendall(said)
        return line


def is_closed(line: socket.socket) -> bool:
    """Waits for the end of a connection, on which nothing is said."""
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


# ---- many of them


KINDS = (
    b"",
    secrets.token_bytes(7),
    secrets.token_bytes(16),
    secrets.token_bytes(4000),
    b"GET / HTTP/1.1\r\n\r\n",
)


@SIGNS
def test_strangers_do_not_delay_a_vote(sign: Sign) -> None:
    """They come first, and to all ranks; and are gone afterwards."""
    with Strangers() as strangers, ballots(3, sign) as made, ThreadPoolExecutor(3) as threads:
        lines = [strangers.connect(made[number % 3], KINDS[number % 5]) for number in range(200)]
        open_all(made, threads)
        votes = [threads.submit(one.vote, (rank + 5, -rank, 7, 0)) for rank, one in enumerate(made)]
        assert [one.result(LIMIT) for one in votes] == [(5, -2, 7, 0)] * 3
        assert all(map(is_closed, lines))


def test_who_is_silent_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_STRANGERS", 4)
    with Strangers() as strangers, ballots(2) as made, ThreadPoolExecutor(1) as threads:
        lines = [strangers.connect(made[0]) for _ in range(10)]
        opens = threads.submit(made[0].open, [one.address for one in made])
        assert all(map(is_closed, lines[:5])), "while it waits for rank 1: four may stay, and that one"
        for each in lines[5:]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        made[1].open([one.address for one in made])
        opens.result(LIMIT)


def test_strangers_do_not_use_up_the_files_of_a_process() -> None:
    """A rank may open ten files more, and 40 strangers are there before the other rank."""
    with Strangers() as strangers, ballots(2) as made:
        for _ in range(40):
            strangers.connect(made[0])

        def rank_0() -> None:
            used = {*map(int, os.listdir("/proc/self/fd"))}
            free = [number for number in range(1000) if number not in used]
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[10], 1000))
            made[0].open([one.address for one in made])
            os._exit(made[0].vote((5, 5, 5, 5)) != (3, 3, 3, 3))

        process = FORK.Process(target=rank_0)
        process.start()
        try:
            made[1].open([one.address for one in made])
            assert made[1].vote((3, 3, 3, 3)) == (3, 3, 3, 3)
            process.join(LIMIT)
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join(LIMIT)


def test_a_flood_does_not_keep_a_rank_waiting_for_one_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is always one more that wants to be accepted."""
    with Strangers() as strangers, ballots(2, timeout=0.2) as made:
        monkeypatch.setattr(Lines, "_welcome", lambda *_: None)
        strangers.connect(made[0])
        with pytest.raises(TimeoutError, match=r"active rank 1 has not come to a vote in 0\.2 s"):
            made[0].open([one.address for one in made])


# ---- hellos


def test_a_hello_may_come_in_parts() -> None:
    with Strangers() as strangers, ballots(2) as made, ThreadPoolExecutor(1) as threads:
        said = hello(sealed, "vote", [one.address.nonce for one in made], 1, 0)
        opens = threads.submit(made[0].connect, [one.address for one in made], [1], [])
        line = strangers.connect(made[0], said[:7])
        assert is_closed(strangers.connect(made[0], bytes(16))), "it came later, so the part has been read"
        line.sendall(said[7:])
        opens.result(LIMIT)
        made[0].to[1].sendall(b"x")
        assert line.recv(1) == b"x"


@SIGNS
def test_a_hello_is_for_one_connection_of_one_pair(sign: Sign) -> None:
    """Of all purposes, moves, speakers, hearers: none is that of another, nor has it a nonce in it."""
    seen = set()
    for nonces in ([letter * 32 for letter in letters] for letters in ("abc", "dbc", "aef")):
        for purpose, hearer, speaker in itertools.product(("vote", "transfer"), range(3), range(3)):
            said = hello(sign, purpose, nonces, hearer, speaker)
            assert len(said) == 16
            assert all(bytes.fromhex(one) != said and one.encode()[:16] != said for one in nonces)
            seen.add((said, purpose, nonces[speaker], nonces[0] if sign is unsigned else "", hearer, speaker))
    assert len({said for said, *_ in seen}) == len(seen)


@SIGNS
def test_who_does_not_know_the_secret_does_not_know_a_hello(sign: Sign) -> None:
    """All that goes through a process group is not enough; in an open job rank 0's nonce is."""
    with Strangers() as strangers, ballots(2, sign) as made, ThreadPoolExecutor(1) as threads:
        addresses = [one.address for one in made]
        nonces = [one.nonce for one in addresses]
        opens = threads.submit(made[0].connect, addresses, [1], [])
        forged = [
            strangers.connect(made[0], hello(unsigned, "vote", ["0" * 32, nonces[0]], 1, 1)),
            strangers.connect(made[0], hello(sealed, "transfer", nonces, 1, 0)),
            strangers.connect(made[0], hello(sign, "vote", nonces, 0, 1)),
            *(strangers.connect(made[0], bytes.fromhex(one)) for one in nonces),
        ]
        if sign is sealed:
            forged.append(strangers.connect(made[0], hello(unsigned, "vote", nonces, 1, 0)))
        assert all(map(is_closed, forged))
        line = strangers.connect(made[0], hello(sign, "vote", nonces, 1, 0))
        opens.result(LIMIT)
        made[0].to[1].sendall(b"x")
        assert line.recv(1) == b"x"


def test_a_hello_is_taken_once() -> None:
    with Strangers() as strangers, ballots(3) as made, ThreadPoolExecutor(1) as threads:
        addresses = [one.address for one in made]
        said = [hello(sealed, "vote", [one.nonce for one in addresses], rank, 0) for rank in range(3)]
        opens = threads.submit(made[0].connect, addresses, [1, 2], [])
        lines = [strangers.connect(made[0], said[1]) for _ in range(5)]
        assert all(map(is_closed, lines[1:]))
        strangers.connect(made[0], said[2])
        opens.result(LIMIT)
        made[0].to[1].sendall(b"x")
        assert lines[0].recv(1) == b"x"


@SIGNS
def test_a_hello_of_before_opens_nothing(sign: Sign) -> None:
    """The next move, or iteration, has other listeners."""
    with Strangers() as strangers, ballots(2, sign) as before, ballots(2, sign, 0.2) as made:
        old = hello(sign, "vote", [one.address.nonce for one in before], 1, 0)
        line = strangers.connect(made[0], old)
        with pytest.raises(TimeoutError, match=r"rank 1 has not come to a vote in 0\.2 s; strangers came: 1"):
            made[0].connect([one.address for one in made], [1], [])
        assert is_closed(line)


# ---- votes


def vote(threads: ThreadPoolExecutor, one: Ballot, *values: int) -> Future[wire.Values]:
    return threads.submit(one.vote, (values[0], values[1], values[2], values[3]))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_least_of_each_value(size: int) -> None:
    choose = random.Random(size)
    with opened(size) as (made, threads):
        for _ in range(50):
            said = [[choose.randint(-(1 << 62), 1 << 62) for _ in range(4)] for _ in made]
            votes = [vote(threads, one, *values) for one, values in zip(made, said, strict=True)]
            least = tuple(min(values) for values in zip(*said, strict=True))
            assert [one.result(LIMIT) for one in votes] == [least] * size


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
            assert not has_vote or one.vote((number, rank, -rank, 0)) == (number, 0, 1 - size, 0)
        return heard

    with opened(size) as (made, threads):
        heard = [threads.submit(take_part, one, rank) for rank, one in enumerate(made)]
        assert all(each.result(LIMIT) == said for each in heard)


def test_rank_0_waits_for_none() -> None:
    with opened(3) as (made, _):
        assert made[0].tell(b"says it") == b"says it"
        assert made[2].tell(b"") == b"says it"


def test_a_vote_ends_nowhere_without_one() -> None:
    size = 5

    def votes_and_leaves(one: Ballot) -> None:
        with contextlib.closing(one):
            one.vote((0, 0, 0, 0))

    for silent in range(size):
        with opened(size) as (made, threads):
            votes = [threads.submit(votes_and_leaves, one) for one in made if one is not made[silent]]
            made[silent].close()
            for one in votes:
                with pytest.raises(ConnectionError, match=r"active rank \d is gone"):
                    one.result(LIMIT)


def test_who_does_not_vote_is_named() -> None:
    with (
        opened(3, timeout=0.1) as (made, _),
        pytest.raises(TimeoutError, match=r"active rank 2 has not come to a vote in 0\.1 s"),
    ):
        made[0].vote((0, 0, 0, 0))


def test_a_rank_that_closed_before_it_opened_is_named() -> None:
    with ballots(2) as made:
        made[1].close()
        with pytest.raises(ConnectionError, match="active rank 1 is gone"):
            made[0].open([one.address for one in made])


def test_an_abort_frees_this_rank_and_no_other() -> None:
    with opened(2) as (made, threads):
        first = vote(threads, made[0], 0, 0, 0, 0)
        made[0].abort()
        with pytest.raises(ConnectionError, match="active rank 1 is gone"):
            first.result(LIMIT)
        assert made[1].vote((3, 3, 3, 3)) == (0, 0, 0, 0)  # rank 0 had said its own
        for _ in range(3):
            made[1].to[0].sendall(b"nor does it later")


def test_an_abort_frees_who_waits_for_a_connection() -> None:
    with ballots(2) as made, ThreadPoolExecutor(1) as threads:
        waits = threads.submit(made[0].open, [one.address for one in made])
        while not waits.done():  # before it waits, an abort does nothing yet: so does the wrapper
            made[0].abort()
            with contextlib.suppress(TimeoutError, ConnectionError):
                waits.result(0.01)
        with pytest.raises(ConnectionError, match="active rank 1 is gone"):
            waits.result(0)


def test_nothing_stays_open() -> None:
    before = len(psutil.Process().net_connections("tcp"))
    with opened(5) as (made, threads):
        for one in [vote(threads, one, 0, 0, 0, 0) for one in made]:
            one.result(LIMIT)
        assert len(psutil.Process().net_connections("tcp")) == before + 5 * 2 * 3
    assert len(psutil.Process().net_connections("tcp")) == before
