"""Communicators end without the half second of their service threads, and one in the making is left.

On a stand-in with NCCL's system calls, since NCCL itself needs GPUs: tests/gpu.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import nccl_standin
from support.nccl_standin import Communicator, StandInGroup
from torch._C._distributed_c10d import HashStore

from ft_wrapper.testing import OnAbort, blocking_backend
from ft_wrapper.torch_groups import nccl as from_outside
from ft_wrapper.torch_groups.abort import abort_all
from ft_wrapper.torch_groups.release import release_process_groups, taking_over_destroy
from ft_wrapper.torch_groups.sockets import bound_to, shut_down

TIMEOUT = 60.0
pytestmark = pytest.mark.skipif(nccl_standin.COMPILER is None, reason="there is no C compiler: cc")
needs_shutdown = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "shutdown"), reason="this torch shuts down no group of another backend"
)


ONE = torch.ones(1)


@pytest.fixture(scope="module")
def nccl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    uses_ppoll = getattr(request, "param", False)
    return nccl_standin.build(tmp_path_factory.mktemp("standin"), uses_ppoll=uses_ppoll)


by_both_calls = pytest.mark.parametrize("nccl", [False, True], ids=["poll", "ppoll"], indirect=True)


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    from_outside.mark_entry()
    yield
    release_process_groups(aborted=True)


def make(names: list[str]) -> list[Any]:
    """A group of this process alone for each backend."""
    first, *others = names
    dist.init_process_group(first, store=HashStore(), rank=0, world_size=1)
    return [dist.group.WORLD, *(dist.new_group([0], backend=name) for name in others)]


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> bool:
    thread.join(TIMEOUT)
    return not thread.is_alive()


def sat_out(groups: list[StandInGroup]) -> int:
    return sum(group.count("sat_out") for group in groups)


@by_both_calls
def test_aborts_do_not_sit_out_the_half_second(nccl: ctypes.CDLL) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        how = {"beside_others": draw.random() < 0.5, "device_ms": draw.choice([0, 0, 10, 40])}
        groups = make([nccl_standin.register(nccl, **how) for _ in range(draw.randint(1, 8))])
        threading.Event().wait(draw.random() * 0.5)  # wherever their half seconds are
        abort_all()
        assert sat_out(groups) == 0, how
        release_process_groups(aborted=True)


def test_an_abort_that_waits_for_another_does_not_hang(nccl: ctypes.CDLL) -> None:
    depends = blocking_backend(OnAbort.DEPENDS)
    _, standin, _ = make([depends, nccl_standin.register(nccl), depends])
    assert joined(in_thread(abort_all))
    assert sat_out([standin]) == 0


def test_a_communicator_that_goes_on_is_left_alone(nccl: ctypes.CDLL) -> None:
    """One that was there at the entry belongs to somebody else."""
    others = Communicator(nccl)
    from_outside.mark_entry()
    groups = make([nccl_standin.register(nccl, device_ms=40)])
    abort_all()
    assert sat_out(groups) == 0 and others.count("accepted") == 0
    assert joined(in_thread(others.destroy))


@needs_shutdown
def test_a_destroy_wakes_who_gets_datagrams_and_nobody_else(nccl: ctypes.CDLL) -> None:
    (destroyed,) = make([nccl_standin.register(nccl, device_ms=40)])
    with taking_over_destroy():
        lives = Communicator(nccl)
        dist.destroy_process_group()
    assert sat_out([destroyed]) == 0
    assert lives.count("accepted") == 0 < lives.count("messages")
    assert joined(in_thread(lives.destroy))  # a thread that tries again for ever would not end


def test_where_the_kernel_does_not_tell_the_abort_is_slow(
    nccl: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tid: int) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", f"/proc/self/task/{tid}/syscall")

    monkeypatch.setattr(from_outside, "system_call", refuse)
    groups = make([nccl_standin.register(nccl)])
    abort_all()
    assert sat_out(groups) > 0


# ---- a communicator in the making


class Making:
    """A thread in a group's first collective, or its destroy, which waits for a peer that does not come."""

    def __init__(self, nccl: ctypes.CDLL, call: Callable[[], object] = lambda: dist.all_reduce(ONE)) -> None:
        (self.group,) = make([nccl_standin.register(nccl, is_made_late=True)])
        self._call = call
        self.thread = in_thread(self._run)
        while len(listening()) < 2:  # there is no other sign that it and its root are there
            assert self.thread.is_alive()

    def _run(self) -> None:
        with pytest.raises(RuntimeError, match="ncclSystemError"):
            self._call()


def listening() -> set[int]:
    """Inode numbers of sockets that listen at loopback, since the entry."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    own = from_outside._inodes(range(1024)) - (from_outside._at_entry or set())
    return {int(line[9]) for line in lines if line[3] == "0A" and line[1].startswith("0100007F")} & own


@by_both_calls
def test_a_communicator_in_the_making_is_left(nccl: ctypes.CDLL) -> None:
    making = Making(nccl)
    abort_all()
    assert making.group.left_with is None  # it might have been elsewhere, and be free by now
    abort_all()
    assert joined(making.thread)
    assert making.group.left_with == (errno.EINVAL, -errno.EINVAL)


def open_by_c(nccl: ctypes.CDLL, ending: contextlib.ExitStack, *, is_polled: bool = False) -> int:
    """A server that Python knows nothing of, but for its descriptor; a thread may be polling it."""
    fd: int = nccl.serve()
    ending.callback(os.close, fd)
    if is_polled:
        polling = select.poll()
        polling.register(fd, select.POLLIN)
        thread = in_thread(polling.poll)
        # Left running, it might come to poll what has the number by then.
        ending.callback(thread.join, TIMEOUT)
    ending.callback(shut_down, fd, socket.SHUT_RDWR)  # who waits there leaves
    while is_polled and not any(fd in fds for fds, _ in from_outside._polls()):
        assert thread.is_alive()
    return fd


def open_by_python(host: str, ending: contextlib.ExitStack) -> socket.socket:
    server = ending.enter_context(socket.create_server((host, 0)))
    ending.callback(server.shutdown, socket.SHUT_RDWR)
    return server


@pytest.mark.parametrize("lacks", ["syscall", "machine"])
def test_nothing_is_shut_down_where_the_kernel_does_not_tell(
    nccl: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """Whose server it is cannot be known there."""

    def refuse(tid: int) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", f"/proc/self/task/{tid}/syscall")

    making = Making(nccl)
    with contextlib.ExitStack() as ending, monkeypatch.context() as patch:
        server = open_by_c(nccl, ending, is_polled=True)
        name, value = ("system_call", refuse) if lacks == "syscall" else ("_PPOLL", None)
        patch.setattr(from_outside, name, value)
        for _ in range(2):
            abort_all()
        assert accepts(server) and making.thread.is_alive()
    abort_all()
    assert joined(making.thread)


@needs_shutdown
def test_an_abort_behind_a_destroy_frees_that(nccl: ctypes.CDLL) -> None:
    with taking_over_destroy():
        making = Making(nccl, dist.destroy_process_group)
        assert joined(in_thread(abort_all))
        assert joined(making.thread)
    assert making.group.left_with == (errno.EINVAL, -errno.EINVAL)


def accept_one(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed before one came
        server.accept()[0].close()


def accepts(fd: int) -> bool:
    address = bound_to(fd)
    assert isinstance(address, tuple)
    try:
        socket.create_connection(address, timeout=TIMEOUT).close()
    except OSError:
        return False
    return True


def test_servers_of_others_go_on(nccl: ctypes.CDLL) -> None:
    with contextlib.ExitStack() as ending:
        servers = {"before": open_by_c(nccl, ending)}
        from_outside.mark_entry()
        servers |= {"polled": open_by_c(nccl, ending, is_polled=True), "in an epoll": open_by_c(nccl, ending)}
        epoll = ending.enter_context(select.epoll())
        epoll.register(servers["in an epoll"], select.EPOLLIN)
        pythons = {name: open_by_python("127.0.0.1", ending) for name in ("Python's", "accepting")}
        in_thread(lambda: accept_one(pythons["accepting"]))
        servers |= {name: server.fileno() for name, server in pythons.items()}
        servers["at all addresses"] = socket.create_server(("0.0.0.0", 0)).detach()  # not Python's any more
        ending.callback(os.close, servers["at all addresses"])
        making = Making(nccl)
        for _ in range(2):
            abort_all()
        assert joined(making.thread)
        assert [name for name, fd in servers.items() if not accepts(fd)] == []


def test_nothing_is_shut_down_where_nobody_is_in_torch(nccl: ctypes.CDLL) -> None:
    with contextlib.ExitStack() as ending:
        server = open_by_c(nccl, ending)
        for _ in range(3):
            abort_all()
        assert accepts(server)
