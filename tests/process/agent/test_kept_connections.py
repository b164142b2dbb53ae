"""A process keeps its connections to the store from call to call: for each new one torch asks DNS."""

from __future__ import annotations

import inspect
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from agent_job import FtRun
from torch.distributed import TCPStore as TorchTCPStore

from ft_wrapper.monitor.watch import IterationStores
from ft_wrapper.restart import resources
from ft_wrapper.store import TCPStore, TCPStoreServer
from ft_wrapper.store.bounded import take_or_make

RANKS = 2


def tcp_sockets(pid: int | str) -> set[str]:
    """The TCP sockets that a process has open: their inodes."""
    found = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        found |= {f"socket:[{line.split()[9]}]" for line in lines}
    held = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return found & held


SCRIPT = f"""
import json, os, sys
from pathlib import Path
from ft_wrapper import CallWrapper, Wrapper

{inspect.getsource(tcp_sockets)}

seen = []

def look() -> None:
    seen.append((sorted(tcp_sockets("self")), sorted(tcp_sockets(os.getppid()))))

@Wrapper(rejoin=True)
def one(call_wrapper: CallWrapper = None):
    look()

@Wrapper(rejoin=True, soft_timeout=50.0)
def other(call_wrapper: CallWrapper = None):
    look()

for _ in range(3):
    one()
    other()
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    json.dump(seen, file)
"""


def test_calls_of_nothing_open_no_connection(tmp_path: Path) -> None:
    """Neither in the rank nor in its agent; of two functions in turn, too, whose settings differ."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = ["--nproc-per-node", str(RANKS), str(script), str(tmp_path / "seen")]
    with FtRun(tmp_path / "job", *arguments) as job:
        assert job.end() == 0, job.said
    for rank in range(RANKS):
        seen = [[set(of) for of in call] for call in json.loads((tmp_path / f"seen{rank}").read_text())]
        ours, agents = zip(*seen, strict=True)
        assert len(ours[0]) == 2, "the call's and its monitor thread's"
        assert all(call == ours[0] for call in ours)
        # The second function has a heart of its own; and a call that takes long has the next iteration's
        # store opened ahead. Nothing is closed.
        assert all(before <= after for before, after in pairwise(agents))


def test_a_forked_process_has_none_of_them() -> None:
    server = TCPStoreServer()
    client = TCPStore("127.0.0.1", server.port)
    resources._kept["the store", 1.0] = [client], "127.0.0.1"
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(len(resources._kept))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.set("key", "value")
        assert client.get("key") == b"value", "the parent goes on with it"
    finally:
        del resources._kept["the store", 1.0]
        client.close()
        server.close()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_store_that_no_rank_has_used_serves_the_next_call(is_used: bool) -> None:
    unused: list[TorchTCPStore] = []
    stores = IterationStores(unused)
    port = stores.next_port("127.0.0.1")
    if is_used:
        TorchTCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).add("key", 1)
    stores.close(hand_on=True)
    assert [store.port for store in unused] == ([] if is_used else [port])
    again = IterationStores(unused)
    assert (again.next_port("127.0.0.1") == port) is not is_used
    assert unused == []
    again.close()


def test_an_idle_connection_is_taken_before_a_new_one_is_made() -> None:
    idle = [1, 2]
    assert [take_or_make(idle, lambda: 3) for _ in range(4)] == [2, 1, 3, 3]
