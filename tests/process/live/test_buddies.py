"""Copies on their way to buddies, over connections of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ft_wrapper.live.copies import Buddies, Copies, Packed, in_host_memory
from ft_wrapper.live.plan import Copy
from ft_wrapper.live.tree import flatten
from ft_wrapper.live.wire import Sign, Stream, carry
from ft_wrapper.protocol.seal import Seal

LARGE = 64 << 20  # bytes: more than the sockets take, which may be 36 MB


@contextlib.contextmanager
def opened(
    size: int, count: int, sign: list[Sign] | None = None
) -> Iterator[tuple[list[Buddies], list[Copies]]]:
    """Those of so many ranks, each on a node of its own."""
    with contextlib.ExitStack() as stack:
        copies = [Copies() for _ in range(size)]
        sign = sign or [signs(b"the job's")] * size
        ranks = [Buddies(copies[rank], rank, "127.0.0.1", 60.0, sign[rank]) for rank in range(size)]
        for one in ranks:
            stack.callback(one.close)
            stack.callback(one.end)
        addresses, nodes = [one.address for one in ranks], [str(rank) for rank in range(size)]
        with ThreadPoolExecutor(size) as threads:
            for done in [threads.submit(one.open, addresses, nodes, count) for one in ranks]:
                done.result(60)
        yield ranks, copies


def send(one: Buddies, rank: int, step: int) -> None:
    """Sends a copy that says whose it is."""
    state = {"weight": torch.full((1000,), rank, dtype=torch.uint8), "step": step, "empty": torch.zeros(0)}
    one.send(Packed(Copy(f"shard {rank}", step, frozenset()), in_host_memory(flatten(state))))


@pytest.mark.parametrize(("size", "count"), [(2, 1), (5, 2)])
def test_each_rank_gets_the_copies_of_those_whose_buddy_it_is(size: int, count: int) -> None:
    with opened(size, count) as (ranks, copies):
        for step in (2, 4):
            for rank, one in enumerate(ranks):
                send(one, rank, step)
        for one in ranks:
            one.await_sent()
        assert [one.stored for one in ranks] == [4] * size
        for each in copies:
            assert len(each.known()) == (count + 1) * 2
            for copy in each.known():
                weight = each.flat(copy.shard, copy.step).tensors[0]
                assert f"shard {int(weight[0])}" == copy.shard and torch.equal(
                    weight, weight[:1].expand(1000)
                )


def signs(secret: bytes) -> Sign:
    """Hellos with the job's secret, and copies with this one."""
    job, other = Seal(b"the job's"), Seal(secret)
    return lambda what, said: (other if what.startswith("copy") else job).sign(what, said)


def test_a_copy_that_is_not_signed_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    monkeypatch.setattr("ft_wrapper.live.copies.empty_like", read.append)
    with opened(2, 1, [signs(b"the job's"), signs(b"another")]) as (ranks, copies):
        for rank, one in enumerate(ranks):
            send(one, rank, 2)
        for rank, one in enumerate(ranks):
            with pytest.raises(RuntimeError) as caught:
                one.await_sent()
            assert f"active rank {1 - rank}'s is not signed with the job's secret" in str(
                caught.value.__cause__
            )
        assert not read and [len(each.known()) for each in copies] == [1, 1]


def test_an_abort_ends_what_is_on_its_way_and_no_other_rank_notices() -> None:
    with opened(2, 1) as (ranks, _):
        send(ranks[0], 0, 2)  # and the other one does not
        ranks[0].abort()
        with pytest.raises(RuntimeError, match="could not be exchanged with the buddies") as caught:
            ranks[0].await_sent()
        assert "rank 1 is gone" in str(caught.value.__cause__)
        ranks[0].end()
        assert not ranks[0]._thread.is_alive()
        ranks[1].await_sent()


def test_an_abort_ends_what_sends_to_a_rank_that_does_not_read() -> None:
    with opened(2, 1) as (ranks, _), ThreadPoolExecutor(1) as threads:
        stream = Stream(ranks[0], 1, True, [torch.zeros(LARGE, dtype=torch.uint8)])
        sends = threads.submit(carry, [stream], 10.0)
        while not sends.done():
            ranks[0].abort()
            with contextlib.suppress(TimeoutError, ConnectionError):
                sends.result(0.01)
        with pytest.raises(ConnectionError, match=r"rank 1 is gone: it had taken \d+\.\d of 67\.1 MB"):
            sends.result(0)


def test_the_end_does_not_wait_for_a_rank_that_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(2, 1) as (ranks, _):
        send(ranks[0], 0, 2)  # and the other one does not
        monkeypatch.setattr("ft_wrapper.live.copies._JOIN_PATIENCE", 0.1)
        ranks[0].end()
        monkeypatch.undo()
        ranks[0]._thread.join(60)
        assert not ranks[0]._thread.is_alive()
