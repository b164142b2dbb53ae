"""Releasing groups: no deadlock, nothing left behind, nothing in the way of the next group."""

from __future__ import annotations

import functools
import gc
import os
import select
import socket
import sys
import threading
import weakref
from typing import Any

import abort_ranks
import pytest
import torch
import torch.distributed as dist
from abort_ranks import MAKING, TIMEOUT, Rank, RunRanks
from torch.distributed.device_mesh import init_device_mesh

from ft_wrapper.abort import (
    AbortTorchDistributed,
    close_aborted_sockets,
    release_process_groups,
    wait_for_released_groups,
)
from ft_wrapper.state import FrozenState
from ft_wrapper.store.bounded import in_background
from ft_wrapper.torch_groups import release

CYCLES = 9


def ddp() -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 200))


def cycle(rank: Rank, iteration: int) -> Any:
    """One iteration that ends while many operations are in flight. Returns the model: a user may keep it."""
    rank.init(iteration)
    init_device_mesh("cpu", (rank.world_size,))
    model = ddp()
    if rank.last:
        rank.control.wait([f"over {iteration}"])
        return model

    def step() -> None:
        for _ in range(100):
            # The tensors belong to Python: gloo's threads need the interpreter's lock to drop them.
            dist.all_reduce(torch.ones(1000), async_op=True)
        model(torch.ones(2, 200)).sum().backward()

    error = rank.freed(step, "_engine_run_backward", "_reducer_prepare")
    assert isinstance(error, RuntimeError), error
    if rank.control.add(f"free {iteration}", 1) == rank.world_size - 1:
        rank.control.set(f"over {iteration}", "1")
    return model


def many_cycles(rank: Rank) -> Any:
    seen = []
    for iteration in range(CYCLES):
        model = cycle(rank, iteration)
        if iteration % 3 == 0:
            del model
            abort_ranks.leave()
        else:
            abort_ranks.leave()
            if iteration % 3 == 1:
                assert wait_for_released_groups(TIMEOUT)
            del model
        assert wait_for_released_groups(TIMEOUT)
        rank.all_have_left(iteration)
        close_aborted_sockets()
        if iteration in (3, CYCLES - 1):
            gc.collect()
            seen.append((len(abort_ranks.fds()), abort_ranks.threads()))
    return seen, sys.excepthook is sys.__excepthook__


def test_many_ddp_cycles_neither_hang_nor_leak(run_ranks: RunRanks) -> None:
    for (early, late), hook_restored in run_ranks(many_cycles, iterations=CYCLES):
        assert late == early
        assert hook_restored


def interrupted_init(rank: Rank) -> Any:
    counts = []
    for iteration in range(3):
        if not rank.last:
            rank.enter(iteration)
            rank.freed(rank.init, *MAKING)
            assert not dist.is_initialized()
            counts.append(dist.distributed_c10d._world.group_count)
        abort_ranks.leave()
    names = []
    rank.init(3)
    for group in (dist.group.WORLD, dist.new_group([0, 1]), dist.new_group()):
        names.append(getattr(group, "group_name", None))
    dist.all_reduce(torch.ones(1))
    abort_ranks.leave()
    return counts, names


def test_an_interrupted_init_leaves_no_trace_in_group_names(run_ranks: RunRanks) -> None:
    (counts, names), (_, same), (_, others) = run_ranks(interrupted_init, iterations=4)
    assert all(count > 0 for count in counts), "torch resets the counter itself: this test shows nothing"
    assert names == same
    assert [names[0], names[2]] == [others[0], others[2]]


def left_between_registration_and_default(rank: Rank) -> Any:
    """The main thread may be interrupted when the group is registered but not yet the default one."""
    rank.init(2)
    dist.distributed_c10d._update_default_pg(None)
    assert not dist.is_initialized() and dist.distributed_c10d._world.pg_map
    abort_ranks.leave()
    rank.init(3)
    dist.all_reduce(total := torch.ones(1))
    abort_ranks.leave()
    return int(total)


def normal_return(rank: Rank) -> Any:
    """Operations in flight come to their end."""
    rank.init(4)
    before = abort_ranks.threads()
    tensors = [torch.ones(100_000) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    del works
    dist.barrier()
    release_process_groups()
    assert not dist.is_initialized()
    assert wait_for_released_groups(TIMEOUT)
    return before > abort_ranks.threads(), [int(tensor[-1]) for tensor in tensors]


class Backend:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def name(self) -> str:
        return self.kind


def test_only_gloos_backends_wait_for_threads_that_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 with torch 2.11, where NCCL's threads count: gradients' buckets stayed for up to 5 s."""
    kinds = ["nccl", "gloo", "ucc"]
    references: list[Any] = [("a group", "its store"), *map(Backend, kinds)]
    alive = [weakref.ref(each) for each in references[1:]]
    seen = []
    monkeypatch.setattr(
        release, "_wait_until_idle", lambda _: seen.append([each() is None for each in alive])
    )
    release._drop_in_background(references)
    assert wait_for_released_groups(TIMEOUT)
    assert seen == [[True, False, True]]
    assert not any(each() for each in alive)


def test_a_thread_that_wakes_to_wait_for_descriptors_again_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gloo's loops do, which have no names on torch < 2.13: each release waited 5 s for them."""
    monkeypatch.setattr(release, "_IDLE_LIMIT", 10 * TIMEOUT)
    ends = threading.Event()
    with select.epoll() as epoll:

        def loop() -> None:
            while not ends.is_set():
                epoll.poll(0.005)

        looper = in_background("a loop of gloo's", loop)
        assert looper.native_id is not None
        waits = in_background("waiting", functools.partial(release._wait_until_idle, [looper.native_id]))
        waits.join(TIMEOUT)
        ends.set()
        looper.join()
    assert not waits.is_alive()


def other_sockets(rank: Rank) -> Any:
    """Sockets that are not torch.distributed's, in a rank whose groups are aborted many times over."""
    pair = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    socket.setdefaulttimeout(5)
    blocking = [os.get_blocking(sock.fileno()) for sock in (*pair, client, server)]
    answers: list[Any] = []
    for iteration in range(2):
        rank.init(iteration)
        dist.all_reduce(torch.ones(1))
        for _ in range(20):
            AbortTorchDistributed()(FrozenState(rank=rank.rank, world_size=rank.world_size))
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        abort_ranks.leave()
    late = socket.create_connection(listener.getsockname())
    latest, _ = listener.accept()
    for one, two in (pair, (client, server), (late, latest)):
        one.sendall(b"there")
        two.sendall(b"back")
        answers.append((two.recv(5).decode(), one.recv(4).decode()))
    answers.append(rank.control.add("still here", 1) > 0)
    answers.append(blocking == [os.get_blocking(sock.fileno()) for sock in (*pair, client, server)])
    socket.setdefaulttimeout(None)
    return answers


def leaves_in_several_ways(rank: Rank) -> Any:
    return other_sockets(rank), left_between_registration_and_default(rank), normal_return(rank)


def test_groups_are_released_whole_and_no_other_socket_is_touched(run_ranks: RunRanks) -> None:
    for answers, total, returned in run_ranks(leaves_in_several_ways, world_size=2, iterations=5):
        assert answers == [["there", "back"]] * 3 + [True, True]
        assert total == 2
        assert returned == [True, [2] * 20]


def test_nothing_happens_where_torch_distributed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port + 1 if port < 65535 else port - 1))
        with socket.create_connection((host, port)) as client, server.accept()[0] as accepted:
            state = FrozenState(rank=0, world_size=1)
            assert AbortTorchDistributed()(state) is state
            release_process_groups(aborted=True)
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ft_wrapper")]


def test_only_connections_to_the_master_are_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as master,
        socket.create_server(("127.0.0.2", master.getsockname()[1])) as namesake,
        socket.create_connection(namesake.getsockname()) as other,
        namesake.accept()[0] as accepted,
        socket.socket(socket.AF_INET6) as client,
    ):
        host, port = master.getsockname()
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        # As torch connects: through IPv6, to the mapped address.
        client.connect((f"::ffff:{host}", port))
        with master.accept()[0] as served:
            AbortTorchDistributed()(FrozenState(rank=0, world_size=1))
            served.settimeout(TIMEOUT)
            assert served.recv(1) == b""
        other.sendall(b"x")
        assert accepted.recv(1) == b"x"
        with socket.create_connection((host, port)) as late, master.accept()[0] as served:
            late.sendall(b"x")
            assert served.recv(1) == b"x"
