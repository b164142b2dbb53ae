"""How fast a state goes from its holders to a receiver, compared with a bare socket.

    python benchmarks/live_transfer.py                       # 10 MB, 128 MB and 1 GB: some minutes
    python benchmarks/live_transfer.py --sizes 128 --runs 5

`ft_wrapper.live.wire.move` with one holder and with two, each a process of its own, and a bare socket:
``sendall`` and ``recv_into`` of pieces of 1 MB between two processes. They take turns in the same run, on
loopback. All have the same tensors to send, weights of 4 MB with biases of 4 kB, and receive into memory
that they allocate first, as a rank does that holds nothing. A move's time is all of it: taking the state
apart, the gather, connections, checksums at both ends, the tree.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from figures import median, table

from ft_wrapper.live.plan import Route
from ft_wrapper.live.tree import PIECE, flatten, pieces, unflatten
from ft_wrapper.live.wire import move

HOST = "127.0.0.1"
LIMIT = 120.0  # seconds for one transfer
FORK = multiprocessing.get_context("fork")
BARE, ONE, TWO = "bare socket", "one holder", "two holders"

State = dict[str, torch.Tensor]


def state_of(size: int) -> State:
    """A state of about so many bytes, its memory touched."""
    sizes = [4 << 20, 4 << 10] * (size // (4 << 20)) or [size]
    return {str(i): torch.full((n // 8,), i, dtype=torch.int64) for i, n in enumerate(sizes)}


@contextlib.contextmanager
def children(work: Callable[[int, Connection], None], count: int) -> Iterator[list[Connection]]:
    """Forks processes; each does its work once it is told to."""

    def child(number: int, line: Connection) -> None:
        line.send("ready")
        line.recv()
        work(number, line)

    pipes = [FORK.Pipe() for _ in range(count)]
    processes = [FORK.Process(target=child, args=(i, pipes[i][1]), daemon=True) for i in range(count)]
    for process in processes:
        process.start()
    try:
        lines = [ours for ours, _ in pipes]
        for line in lines:
            heard(line)
        yield lines
        for process in processes:
            process.join(LIMIT)
            if process.exitcode != 0:
                raise RuntimeError(f"a sender's exit code: {process.exitcode}")
    finally:
        for process, ends in zip(processes, pipes, strict=True):
            process.kill()
            process.join(LIMIT)
            for end in ends:
                end.close()


def heard(line: Connection) -> Any:
    """What comes, within the limit."""
    if not line.poll(LIMIT):
        raise TimeoutError("a sender says nothing")
    return line.recv()


def bare(state: State) -> float:
    """Seconds through one socket, with nothing else done."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(LIMIT)

        def send(_: int, __: Connection) -> None:
            with socket.create_connection(server.getsockname()) as line:
                for tensor in state.values():
                    for (view,) in pieces([tensor], 0, tensor.nbytes):
                        line.sendall(view)
                line.recv(1)

        with children(send, 1) as (sender,):
            began = time.perf_counter()
            sender.send("go")
            with server.accept()[0] as line:
                line.settimeout(None)
                received = {name: torch.empty_like(tensor) for name, tensor in state.items()}
                for tensor in received.values():
                    for (view,) in pieces([tensor], 0, tensor.nbytes):
                        rest = view
                        while rest:
                            rest = rest[line.recv_into(rest, min(len(rest), PIECE)) :]
                line.sendall(b"\1")
            took = time.perf_counter() - began
    check(received, state)
    return took


def ours(state: State, holders: int) -> float:
    """Seconds of a move from so many holders."""
    routes = [Route(holders, tuple(range(holders)))]

    def send(rank: int, line: Connection) -> None:
        def gather(mine: object) -> list[Any]:
            line.send(mine)
            said: list[Any] = heard(line)
            return said

        move(routes, rank, lambda: flatten(state), gather, host=HOST, timeout=LIMIT)

    with children(send, holders) as lines:

        def gather(mine: object) -> list[Any]:
            said = [*map(heard, lines), mine]
            for line in lines:
                line.send(said)
            return said

        began = time.perf_counter()
        for line in lines:
            line.send("go")
        moved = move(routes, holders, lambda: flatten(state), gather, host=HOST, timeout=LIMIT)
        assert moved.flat is not None
        received = unflatten(moved.flat)
        took = time.perf_counter() - began
    check(received, state)
    return took


def check(received: State, state: State) -> None:
    """Raises if another state was received."""
    if received.keys() != state.keys() or not all(torch.equal(received[name], state[name]) for name in state):
        raise RuntimeError("what was received is not what was sent")


WAYS: dict[str, Callable[[State], float]] = {
    BARE: bare,
    ONE: lambda state: ours(state, 1),
    TWO: lambda state: ours(state, 2),
}


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[10, 128, 1000], metavar="MB", help="of the states")
    add("--runs", type=int, default=9, metavar="N", help="of each way, in turn (default: 9)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # none of their own, which a forked process would lack
    rows = []
    for megabytes in arguments.sizes:
        state = state_of(megabytes * 1_000_000)
        size = sum(tensor.nbytes for tensor in state.values())
        took: dict[str, list[float]] = {name: [] for name in WAYS}
        for run in range(arguments.runs + 1):
            for name in list(WAYS)[:: 1 if run % 2 else -1]:
                seconds = WAYS[name](state)
                if run:  # the first one warms up
                    took[name].append(seconds)
        for name, times in took.items():
            middle, base = median(times) or 0.0, median(took[BARE]) or 0.0
            rows.append(
                [
                    f"{megabytes} MB, {name}",
                    *(f"{size / seconds / 1e9:.2f}" for seconds in (middle, max(times), min(times))),
                    f"{base / middle:.0%}",
                    f"{min(took[BARE]) / min(times):.0%}",
                ]
            )
        print(f"{megabytes} MB: {arguments.runs} turns done", flush=True)
    print(f"\nGB/s on loopback, {arguments.runs} turns")
    print(table(["state", "median", "least", "most", "of bare", "best of best"], rows))


if __name__ == "__main__":
    main()
