"""States go from rank to rank, whole or with an error that names the rank; nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import pytest
import torch
from support.apart import apart

from ft_wrapper.live import wire
from ft_wrapper.live.plan import Route
from ft_wrapper.live.tree import Flat, flatten, unflatten
from ft_wrapper.live.wire import Moved, move, unsigned

LIMIT = 60.0  # seconds for what takes well under one
SHORT = 1.0  # seconds until a peer counts as stalled, where one is
HOST = "127.0.0.1"
LARGE = 64 << 20  # bytes: more than the sockets take, which may be 36 MB
FORK = multiprocessing.get_context("fork")

Gather = Callable[[object], list[Any]]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def no_socket_left() -> Iterator[None]:
    before = sockets()
    yield
    gc.collect()
    assert sockets() <= before


def sockets() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(("socket:", "anon_inode:")):
                found.add(f"{entry} {target}")
    return found


def state_of(seed: int, size: int = 5 << 20) -> dict[str, Any]:
    """A state with large and small tensors; all of one size have equal layouts."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    small = [torch.full((n,), float(seed)) for n in range(20)]
    return {"model": {"weight": data, "small": small}, "step": seed}


def assert_equal(got: Any, state: Any) -> None:
    assert got["step"] == state["step"]
    assert torch.equal(got["model"]["weight"], state["model"]["weight"])
    for a, b in zip(got["model"]["small"], state["model"]["small"], strict=True):
        assert torch.equal(a, b)


def state_in(moved: Moved) -> Any:
    assert moved.flat is not None
    return unflatten(moved.flat)


def nothing(point: str) -> None:
    assert point == "transfer"


class Ranks:
    """The ranks of a move, each in a thread of this process.

    Args:
        routes: the transfers.
        states: what each rank holds.
        host: where all listen.
        timeout: for stalled peers, of the ranks that `timeouts` does not have.
    """

    def __init__(
        self, routes: Sequence[Route], states: Sequence[Any], host: str = HOST, timeout: float = LIMIT
    ) -> None:
        self.routes = routes
        self.states = states
        self.host = host
        self.timeout = timeout
        self.timeouts: dict[int, float] = {}
        self.barrier = threading.Barrier(len(states))
        self.said: list[Any] = [None] * len(states)
        self.exported: list[int] = []
        self.at: dict[int, Callable[[str], None]] = {}
        self.gathered: dict[int, Callable[[list[Any]], list[Any]]] = {}

    def move(self, rank: int, gather: Gather | None = None) -> Moved:
        def source() -> Flat:
            self.exported.append(rank)
            return flatten(self.states[rank])

        def with_threads(mine: object) -> list[Any]:
            self.said[rank] = json.dumps(mine)
            self.barrier.wait(LIMIT)
            said = [json.loads(one) for one in self.said]
            return self.gathered[rank](said) if rank in self.gathered else said

        return move(
            self.routes,
            rank,
            source,
            gather or with_threads,
            host=self.host,
            timeout=self.timeouts.get(rank, self.timeout),
            at=self.at.get(rank, nothing),
        )

    @contextlib.contextmanager
    def others(self, here: int | None = None) -> Iterator[list[Any]]:
        """Runs all ranks but one; then there are their results, or the errors."""

        def outcome(rank: int) -> Moved | Exception:
            try:
                return self.move(rank)
            except Exception as error:
                return error

        ranks = [rank for rank in range(len(self.states)) if rank != here]
        outcomes: list[Any] = [None] * len(self.states)
        with ThreadPoolExecutor(len(ranks)) as pool:
            futures = {rank: pool.submit(outcome, rank) for rank in ranks}
            yield outcomes
            for rank, future in futures.items():
                outcomes[rank] = future.result(LIMIT)

    def run(self) -> list[Any]:
        with self.others() as outcomes:
            pass
        return outcomes


# It arrives ------------------------------------------------------------------------------------------------


def test_without_routes_nothing_is_gathered() -> None:
    def never(*_: object) -> Any:
        raise AssertionError("called")

    assert move([], 0, never, never, host=HOST, timeout=LIMIT) == Moved(None, 0)


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_one_holder_and_one_receiver(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    ranks = Ranks([Route(1, (0,))], [state_of(1), None, None], host)
    sent, received, idle = ranks.run()
    assert_equal(state_in(received), state_of(1))
    assert received.bytes == sent.bytes == (5 << 20) + sum(range(20)) * 4
    assert sent.flat is None and idle == Moved(None, 0)
    assert ranks.exported == [0]
    pointers = {t.data_ptr() for t in ranks.states[0]["model"]["small"]}
    assert all(t.data_ptr() not in pointers for t in state_in(received)["model"]["small"] if t.numel())


def test_holders_send_equal_parts() -> None:
    states = [state_of(1), None, state_of(1), state_of(1)]
    outcomes = Ranks([Route(1, (3, 0, 2))], states).run()
    assert_equal(state_in(outcomes[1]), states[0])
    sent = [outcomes[rank].bytes for rank in (0, 2, 3)]
    assert sum(sent) == outcomes[1].bytes and max(sent) - min(sent) < 200


def test_ranks_that_send_and_receive() -> None:
    states = [state_of(rank, LARGE // 2 + rank) for rank in range(3)]
    outcomes = Ranks([Route((rank + 1) % 3, (rank,)) for rank in range(3)], states).run()
    for rank in range(3):
        assert_equal(state_in(outcomes[(rank + 1) % 3]), states[rank])


@pytest.mark.parametrize("state", [None, {"empty": torch.zeros(0, 3)}, torch.tensor(True)])
def test_states_of_next_to_nothing(state: Any) -> None:
    outcomes = Ranks([Route(2, (0, 1))], [state, state, None]).run()
    got = state_in(outcomes[2])
    assert str(got) == str(state)
    assert outcomes[2].bytes == (1 if isinstance(state, torch.Tensor) else 0)


def test_a_holder_whose_bytes_are_laid_out_in_another_way_does_not_send() -> None:
    weight = torch.arange(100_000)
    tied, untied = {"a": weight, "b": weight}, {"a": weight, "b": weight.clone()}
    sent, other, received = Ranks([Route(2, (0, 1))], [tied, untied, None]).run()
    state = state_in(received)
    assert state["a"] is state["b"] and torch.equal(state["a"], weight)
    assert (sent.bytes, other.bytes) == (800_000, 0)


# Damage ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def damaging(address: Any, place: int, size: int) -> Iterator[Any]:
    """An address that passes on what comes from another one, with one bit flipped."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(LIMIT)

        def carry() -> None:
            with server.accept()[0] as line, socket.create_connection(tuple(address), LIMIT) as holder:
                line.settimeout(LIMIT)
                holder.sendall(line.recv(100))
                at = 0
                while at < size:
                    data = bytearray(holder.recv(min(1 << 20, size - at)))
                    if at <= place < at + len(data):
                        data[place - at] ^= 4
                    line.sendall(data)
                    at += len(data)
                line.recv(1)

        with ThreadPoolExecutor(1) as pool:
            carried = pool.submit(carry)
            yield server.getsockname()
            with contextlib.suppress(ConnectionError):
                carried.result(LIMIT)


@pytest.mark.parametrize("place", [0, 3 << 20, -9, -1], ids=["first", "middle", "last", "checksum"])
def test_damaged_bytes_are_noticed(place: int) -> None:
    state = {"a": state_of(1)["model"]["weight"]}
    size = (5 << 20) + 8
    ranks = Ranks([Route(1, (0,))], [state, None])
    with contextlib.ExitStack() as stack:

        def detour(said: list[Any]) -> list[Any]:
            address, *rest = said[0]
            through = stack.enter_context(damaging(address[1], place % size, size))
            return [([address[0], through, address[2]], *rest), *said[1:]]

        ranks.gathered[1] = detour
        sent, received = ranks.run()
    assert isinstance(received, RuntimeError) and "rank 0 sent was damaged" in str(received)
    assert isinstance(sent, ConnectionError) and "rank 1 is gone" in str(sent)


# Peers that are gone or stalled ----------------------------------------------------------------------------


def test_a_holder_that_nobody_listens_for() -> None:
    ranks = Ranks([Route(1, (0,))], [state_of(1), None], timeout=SHORT)
    with socket.socket() as bound:
        bound.bind((HOST, 0))  # and does not listen
        ranks.gathered[1] = lambda said: [
            ([said[0][0][0], bound.getsockname(), said[0][0][2]], *said[0][1:]),
            *said[1:],
        ]
        sent, received = ranks.run()
    assert isinstance(received, ConnectionError)
    assert "active rank 0 is gone: no connection for a transfer ([Errno 111]" in str(received)
    assert isinstance(sent, TimeoutError)
    assert str(sent) == "active rank 1 has not come to a transfer in 1 s"


def test_only_the_stalled_holder_is_named() -> None:
    ranks = Ranks([Route(2, (0, 1))], [state_of(1, LARGE), state_of(1, LARGE), None], timeout=SHORT)
    over = threading.Event()
    ranks.at[1] = at_piece(1, lambda: over.wait(LIMIT))
    with ranks.others(here=2) as outcomes:
        with pytest.raises(
            TimeoutError, match=r"^not a byte for 1 s between this rank and rank 1 \(it "
        ) as caught:
            ranks.move(2)
        over.set()
    assert "rank 0" not in str(caught.value)
    assert isinstance(outcomes[0], Moved)


@contextlib.contextmanager
def forked(ranks: Ranks, rank: int) -> Iterator[Gather]:
    """Has one of two ranks in a process, which is killed in the end; gives the other's gather."""
    ours, theirs = FORK.Pipe()

    def gather_over(line: Connection, rank: int) -> Gather:
        def gather(mine: object) -> list[Any]:
            line.send(mine)
            assert line.poll(LIMIT), "the other rank says nothing"
            other = line.recv()
            return [mine, other] if rank == 0 else [other, mine]

        return gather

    process = FORK.Process(target=lambda: ranks.move(rank, gather_over(theirs, rank)))
    with ours, theirs:
        process.start()
        try:
            yield gather_over(ours, 1 - rank)
        finally:
            process.kill()
            process.join(LIMIT)
            process.close()


def at_piece(number: int, do: Callable[[], object]) -> Callable[[str], None]:
    seen = []

    def at(point: str) -> None:
        seen.append(point)
        if len(seen) == number:
            do()

    return at


@pytest.mark.parametrize("lost", [0, 1], ids=["holder", "receiver"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_killed_or_stopped(lost: int, signum: signal.Signals) -> None:
    is_killed = signum is signal.SIGKILL
    ranks = Ranks([Route(1, (0,))], [state_of(1, LARGE), None], timeout=LIMIT if is_killed else SHORT)
    ranks.at[lost] = at_piece(3, lambda: os.kill(os.getpid(), signum))
    gone = rf"rank {lost} is gone: it had {['sent', 'taken'][lost]} .* of 67\.1 MB"
    stalled = rf"between this rank and rank {lost} \("
    kind, text = (ConnectionError, gone) if is_killed else (TimeoutError, stalled)
    with forked(ranks, lost) as gather, pytest.raises(kind, match=text):
        ranks.move(1 - lost, gather)


def test_a_rank_that_was_stopped_itself_goes_on() -> None:
    """What came meanwhile counts, before anyone is called stalled."""
    ranks = Ranks([Route(2, (0, 1))], [state_of(1, LARGE), state_of(1, LARGE), None])
    ranks.timeouts[2] = SHORT
    behind = threading.Event()
    ranks.at[2] = at_piece(5, lambda: behind.wait(2 * SHORT))
    with ranks.others(here=2) as outcomes:
        assert_equal(state_in(ranks.move(2)), ranks.states[0])
    assert all(isinstance(outcomes[rank], Moved) for rank in (0, 1))


# Interrupts ------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    pass


def connect_and_leave(ranks: Ranks) -> None:
    """Has the holder, which may wait for its receiver, see that it is gone."""
    with contextlib.suppress(OSError, TypeError):  # it has ended, or has not said where it is
        _, name, nonce = json.loads(ranks.said[0])[0]
        with socket.create_connection(tuple(name), LIMIT) as line:
            line.sendall(wire.hello(unsigned, "transfer", [nonce], 1, 0))


@pytest.mark.parametrize("here", [0, 1], ids=["holder", "receiver"])
def test_the_main_thread_is_interrupted_anywhere(here: int) -> None:
    """At each line of the modules, one after the other, the first time that it comes to it."""
    ranks = Ranks([Route(1, (0,))], [state_of(1, 3 << 20), None])
    seen: set[tuple[str, int]] = set()
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != wire.__file__:
            return None
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in seen:
            seen.add(place)
            raise Interrupt
        return trace

    while True:
        before, known = sockets(), len(seen)
        ranks.barrier.reset()
        ranks.said = [None, None]
        with ranks.others(here) as outcomes:
            tracer = sys.gettrace()
            sys.settrace(trace)
            try:
                apart(ranks.move, here)
            except Interrupt:
                sys.settrace(tracer)
                ranks.barrier.abort()  # for the case that it has not come there
                if here == 1:
                    connect_and_leave(ranks)
            finally:
                sys.settrace(tracer)
        assert sockets() <= before
        if len(seen) == known:
            break
        lines += 1
    assert isinstance(outcomes[1 - here], Moved)
    assert lines > 40
