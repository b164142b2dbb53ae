"""Which device a rank uses where a node runs more ranks than it has devices; the devices need not exist."""

from __future__ import annotations

import fcntl
import json
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_job import FtRun
from test_nodes import pids_of

from ft_wrapper.exception import RestartAbort
from ft_wrapper.torch_groups import device
from ft_wrapper.torch_groups.device import DEVICES_ENV, own_device, take_device

# Its arguments: a folder, and what happens in each iteration: which active ranks are killed, and whether
# the first of the others raises; in the iteration after the last one all return.
SCRIPT = """
    import json, os, signal, socket, sys, time
    import torch.distributed as dist
    from ft_wrapper import CallWrapper, Compose, Limits, Wrapper
    from ft_wrapper.rank_assignment import ActivateAllRanks, Layer, LayerFlag, ShiftRanks, Tree
    from ft_wrapper.torch_groups import device

    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    at_start = os.environ["LOCAL_RANK"]
    wanted = int(os.environ["FT_WRAPPER_ACTIVE_WORLD_SIZE"])
    settings = SETTINGS

    @Wrapper(rejoin=True, **settings, limits=Limits(rejoin_wait=60, max_same_faults=None))
    def train(call_wrapper: CallWrapper = None):
        state, n = call_wrapper.state, call_wrapper.iteration
        noted = {"n": n, "rank": state.active_rank, "pid": os.getpid()}
        noted |= {"at_start": at_start, "local_rank": os.environ["LOCAL_RANK"]}
        with open(f"{folder}/{n}-{os.getpid()}", "w") as file:
            json.dump({**noted, "device": str(call_wrapper.device)}, file)
        os.environ["LOCAL_RANK"] = "the function's own"
        dist.init_process_group("gloo")
        dist.barrier()  # all have noted theirs
        if n < len(plan):
            killed, raises = plan[n]
            if state.active_rank in killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if raises and state.active_rank == min(set(range(wanted)) - set(killed)):
                raise ValueError("as planned")
            while True:
                time.sleep(1)

    train()
    assert os.environ["LOCAL_RANK"] == at_start
"""


def entries(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What active ranks have noted, by iteration; each holds a device alone, and keeps it."""
    found = defaultdict(list)
    for path in folder.glob("*-*"):
        noted = json.loads(path.read_text())
        assert noted["device"] == f"cuda:{noted['local_rank']}"
        found[noted["n"]].append(noted)
    for noted in found.values():
        assert len({one["device"] for one in noted}) == len(noted), noted
    for n in found.keys() - {0}:
        before = {one["pid"]: one["device"] for one in found[n - 1]}
        for one in found[n]:
            assert one["device"] == before.get(one["pid"], one["device"]), (
                "it was active, and had another one"
            )
    return found


# In a job ----------------------------------------------------------------------------------------------

OPTIONS = ["--active-world-size", "2", "--devices-per-node", "2"]


def start(tmp_path: Path, nproc: int, settings: str, plan: list[tuple[list[int], bool]]) -> FtRun:
    """Starts a job on one node, which notes in a folder; see SCRIPT."""
    (tmp_path / "noted").mkdir()
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).replace("SETTINGS", settings))
    arguments = [str(tmp_path / "script.py"), str(tmp_path / "noted"), json.dumps(plan)]
    return FtRun(tmp_path / "job", "--nproc-per-node", str(nproc), *OPTIONS, *arguments)


def test_whoever_steps_in_has_a_device_that_no_active_rank_has(tmp_path: Path) -> None:
    """Two are killed and one raises, in iterations of their own and in one."""
    plan = [([1], False), ([], True), ([0, 1], False), ([0], False)]
    with start(tmp_path, 4, "{'min_world_size': wanted}", plan) as job:
        assert job.end() == 0, job.said
        assert "AssertionError" not in job.said  # once the call has completed, a failure is forgiven
        started = {pid: rank for rank, pids in pids_of(job).items() for pid in pids}
    found = entries(tmp_path / "noted")
    assert sorted(found) == list(range(len(plan) + 1)), job.said
    for noted in found.values():
        assert sorted(one["device"] for one in noted) == ["cuda:0", "cuda:1"]
    for one in found[0]:
        assert one["at_start"] == str(started[one["pid"]] % 2), job.said
    assert len({one["pid"] for noted in found.values() for one in noted}) > 2, "others have stepped in"
    first, second = ({one["pid"]: one["device"] for one in found[n]} for n in (1, 2))
    assert first == second, "an exception moves no rank"


def test_an_active_rank_without_a_device_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    """The code's assignment has more active ranks than ftrun says. A new process would fare no better."""
    settings = "{'rank_assignment': Compose(ActivateAllRanks(), ShiftRanks()), 'min_world_size': 2}"
    with start(tmp_path, 3, f"{settings}; device._LOOKS = 5", []) as job:
        assert job.end() == 0, job.said
        assert "active ranks hold all 2 devices" in job.said
        assert "it left the job for good" in job.said
        assert sorted(len(pids) for pids in pids_of(job).values()) == [1, 1, 1]
        assert len(entries(tmp_path / "noted")[1]) == 2, job.said


LEAVES = """
    import os, sys, time
    from ft_wrapper import CallWrapper, Wrapper
    from ft_wrapper.exception import RestartAbort
    from ft_wrapper.torch_groups import device

    device._LOOKS = 100

    @Wrapper(rejoin=True)
    def train(call_wrapper: CallWrapper = None):
        if call_wrapper.iteration > 0:
            open(call_wrapper.device.type + str(call_wrapper.device.index), "w").close()
            return
        if os.environ["RANK"] == "1":
            raise RestartAbort("as planned")
        while True:
            time.sleep(1)

    try:
        train()
    except RestartAbort:
        deadline = time.monotonic() + 60
        while not os.path.exists("cuda1") and time.monotonic() < deadline:
            time.sleep(0.01)
"""


def test_whoever_leaves_the_call_leaves_its_device(tmp_path: Path) -> None:
    """Its process may live on for long."""
    (tmp_path / "script.py").write_text(textwrap.dedent(LEAVES))
    with FtRun(tmp_path / "job", "--nproc-per-node", "3", *OPTIONS, str(tmp_path / "script.py")) as job:
        assert job.end() == 0, job.said
        assert sorted(path.name for path in (tmp_path / "job").glob("cuda*")) == ["cuda0", "cuda1"], job.said


# In a process -------------------------------------------------------------------------------------------


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A file of locks, and this process as one that uses device 1 of 2."""
    descriptor = os.memfd_create("devices")
    monkeypatch.setenv(DEVICES_ENV, f"/proc/{os.getpid()}/fd/{descriptor}:2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(device, "_index", None)
    monkeypatch.setattr(device, "_locks", None)
    yield descriptor
    device.release_device()
    os.close(descriptor)


class Other:
    """Another process, which holds what it can get of some devices."""

    def __init__(self, locks: int, *devices: int) -> None:
        here, there = os.pipe()
        self._held, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            held = []
            for index in devices:
                try:
                    fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
                    held.append(index)
                except BlockingIOError:
                    pass
            os.close(there)
            os.write(told, json.dumps(held).encode())
            os.read(here, 1)
            os._exit(0)
        os.close(here)
        os.close(told)
        self._end = there
        self.held = json.loads(os.read(self._held, 100))

    def end(self) -> None:
        """Ends it."""
        os.close(self._end)
        os.close(self._held)
        os.waitpid(self.pid, 0)


def held_by_us(locks: int) -> set[int]:
    other = Other(locks, 0, 1)
    other.end()
    return {0, 1}.difference(other.held)


def test_a_spare_lets_go_and_comes_back(locks: int) -> None:
    for is_active, held in ((False, set()), (True, {1}), (True, {1}), (False, set()), (True, {1})):
        take_device(is_active)
        assert held_by_us(locks) == held
        assert os.environ["LOCAL_RANK"] == "1"
        assert own_device() == torch.device("cuda", 1)


def test_its_own_is_taken(locks: int) -> None:
    other = Other(locks, 1)
    take_device(True)
    other.end()
    assert own_device() == torch.device("cuda", 0)
    assert held_by_us(locks) == {0}
    take_device(False)
    take_device(True)  # where it has been warm since
    assert os.environ["LOCAL_RANK"] == "0"


def test_whoever_dies_is_waited_for(locks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Other(locks, 0), Other(locks, 1)]
    looks = []

    def dies(pause: float) -> None:
        looks.append(pause)
        if len(looks) == 3:
            others.pop().end()

    monkeypatch.setattr(device, "time", SimpleNamespace(sleep=dies))
    take_device(True)
    assert len(looks) == 3
    assert held_by_us(locks) == {0, 1}, "and the other one has its own"
    others.pop().end()
    assert held_by_us(locks) == {1}


def test_none_is_free(locks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other(locks, 0, 1)
    monkeypatch.setattr(device, "_LOOKS", 2)
    try:
        with pytest.raises(RestartAbort, match=r"all 2 devices of \S+ \(--devices-per-node\).*Tree\("):
            take_device(True)
    finally:
        other.end()


def test_it_is_the_current_device_where_cuda_is_in_use(locks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    take_device(False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    other = Other(locks, 1)
    take_device(True)
    other.end()
    assert chosen == [0]


@pytest.mark.parametrize(
    ("local_rank", "count", "found"),
    [("1", 0, "cpu"), ("1", 2, "cuda:1"), ("3", 1, "cuda:0"), ("", 2, "cuda:0")],
)
def test_the_device_where_ftrun_looks_after_none(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, count: int, found: str
) -> None:
    monkeypatch.setattr(device, "_index", None)
    monkeypatch.delenv(DEVICES_ENV, raising=False)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    for name, value in {
        "is_available": lambda: count > 0,
        "is_initialized": lambda: count > 0,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "init": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    take_device(True)
    assert os.environ["LOCAL_RANK"] == local_rank
    assert str(own_device()) == found
