"""What torch keeps of old ranks: in one process, rank 1 of 4 and after a "restart" rank 0 of 4.

On torch's fake process group, so in seconds. Each of the caches is left out in turn, which shows what it is
cleared for: in a fork of the process that was rank 1, since DTensor's caches cannot be made new.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ft_wrapper import Leak, find_leaks
from ft_wrapper.torch_groups import caches as _torch_caches
from ft_wrapper.torch_groups import tracker
from ft_wrapper.torch_groups.release import release_process_groups

sys.path.append(str(Path(__file__).parents[2]))
from support.warm_ftrun import run_python

FAST = "DTensor's fast cache"
PROPAGATION = "DTensor's propagation caches"
REDISTRIBUTION = "DTensor's redistribution caches"
TOPOLOGY = "DTensor's mesh topologies"
RANDOM = "DTensor's random number tracker"
FUNCTIONS = "torch.distributed.nn's default group"
SYMMETRIC = "symmetric memory"
# By which way a mesh or a group of the old rank stays, if a step is left out. The fast cache is in C++.
ITS_HOLDER = {
    PROPAGATION: "ShardingPropagator._propagate_tensor_meta_cached",
    REDISTRIBUTION: "torch.distributed.tensor._redistribute.",
    TOPOLOGY: "MeshTopoInfo.build_from_mesh",
    FUNCTIONS: "torch.distributed.nn.functional.",
}


# ---- in a process of its own


class Job:
    """Iterations on a mesh of two dimensions."""

    def begin(self, rank: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))

    def operations(self, mesh: Any) -> dict[str, Any]:
        """Results, all of which must be on this mesh."""
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        from torch.distributed.tensor._op_schema import OpSchema

        whole, rows = [Replicate(), Replicate()], [Replicate(), Shard(0)]
        numbers = torch.arange(64.0).view(8, 8)
        a = distribute_tensor(numbers, mesh, whole, src_data_rank=None)
        s = distribute_tensor(numbers, mesh, rows, src_data_rank=None)
        w = distribute_tensor(torch.ones(8, 8), mesh, rows, src_data_rank=None).requires_grad_()
        (w * w).sum().backward()
        # What the fast path does not take is asked of Python.
        schema = OpSchema(torch.ops.aten.zeros_like.default, (s._spec,), {})
        propagator = DTensor._op_dispatcher.sharding_propagator
        asked = propagator.propagate_op_sharding(schema)
        propagator._propagate_tensor_meta(schema)  # what `loss_parallel` asks
        return {
            "redistribute": (a * 2).redistribute(mesh, rows),
            "zeros_like": torch.zeros_like(s),
            "matmul": s @ a,
            "sum": s.sum(),
            "foreach": torch._foreach_add([s, s], 1.0)[0],
            "gradient": w.grad,
            "propagation": asked.output_spec,
        }

    def wrong(self, mesh: Any, results: dict[str, Any]) -> list[str]:
        """Which results are another rank's, or on another mesh."""
        index = mesh.get_coordinate()[-1]
        mine = torch.arange(64.0).view(8, 8).mul(2).chunk(mesh.size(mesh.ndim - 1))[index]
        of_mesh = {name: getattr(value, "device_mesh", None) or value.mesh for name, value in results.items()}
        found = [name for name, on in of_mesh.items() if on is not mesh]
        if not torch.equal(results["redistribute"].to_local(), mine):
            found.append("wrong rows")
        return found


def fill_tables(mesh: Any) -> None:
    """Tables that nothing fills without a GPU; and a module that is imported while a group is there."""
    import torch.distributed._symmetric_memory as memory
    from torch.distributed.nn import functional
    from torch.distributed.tensor import _random as random

    name = mesh.get_group(0).group_name
    memory._group_name_to_store[name] = dist.HashStore()
    memory._group_name_to_workspace_tensor[name] = torch.ones(1)
    random._rng_tracker = SimpleNamespace()
    functional.broadcast.__defaults__ = (dist.group.WORLD,)  # as where it is imported now


def not_forgotten(left: list[Leak]) -> list[str]:
    """Which steps were not carried out, as far as one can tell from what is still there."""
    import torch.distributed._symmetric_memory as memory
    from torch.distributed.tensor import _random as random

    found = []
    for each in left:
        known = [what for what, holder in ITS_HOLDER.items() if each.referrer and holder in each.referrer]
        is_in_cpp = each.kind == "DeviceMesh" and not each.within and not each.referrer and not each.cycle
        found += [] if each.within else known or ([FAST] if is_in_cpp else [str(each)])
    if random._rng_tracker is not None:
        found.append(RANDOM)
    if memory._group_name_to_store or memory._group_name_to_workspace_tensor:
        found.append(SYMMETRIC)
    return found


def _all_that_is_left() -> dict[str, Any]:
    """What is left if nothing is left out, if all is, and if each step is."""
    steps = [what for what, _, _ in _torch_caches._STEPS]
    things, job = _as_rank_1()
    variants = {"": [""], **{step: [step] for step in steps}, "all": steps}
    left = {
        name: _in_a_fork(functools.partial(_as_rank_0, things, job, left_out))
        for name, left_out in variants.items()
    }
    things.close()
    return left


def _what_is_left_of_a_thread() -> dict[str, Any]:
    """All that torch has to do is done by a thread of the user's that lives over the restart."""
    thread = WorkingThread()
    things, job = _as_rank_1(thread.do)
    left = _as_rank_0(things, job, [], thread.do)
    thread.end()
    things.close()
    return left


def _do(function: Callable[[], Any]) -> Any:
    return function()


def _as_rank_1(do: Callable[[Callable[[], Any]], Any] = _do) -> tuple[tracker.Tracker, Job]:
    job = Job()
    things = tracker.begin_tracking()
    things.enter(0)
    mesh = job.begin(rank=1)
    fill_tables(mesh)
    assert not do(lambda: job.wrong(mesh, job.operations(mesh)))
    return things, job


def _as_rank_0(
    things: tracker.Tracker,
    job: Job,
    left_out: list[str],
    do: Callable[[Callable[[], Any]], Any] = _do,
) -> dict[str, Any]:
    release_process_groups(aborted=True)
    _torch_caches._STEPS = tuple(step for step in _torch_caches._STEPS if step[0] not in left_out)
    _torch_caches.clear_caches()
    gc.collect()
    things.enter(1)
    forgets_not = not_forgotten(find_leaks())
    mesh = job.begin(rank=0)
    wrong = do(lambda: job.wrong(mesh, job.operations(mesh)))
    dist.destroy_process_group()
    return {"wrong": wrong, "not forgotten": forgets_not}


def _in_a_fork(work: Callable[[], Any]) -> Any:
    with tempfile.TemporaryFile("w+") as answer:
        pid = os.fork()
        if pid == 0:
            json.dump(work(), answer)
            answer.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        answer.seek(0)
        return json.load(answer)


class WorkingThread:
    """A thread of the user's that lives over the restart."""

    def __init__(self) -> None:
        self._wanted = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._job: Callable[[], Any] | None = None
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], Any]) -> Any:
        self._job = job
        self._wanted.release()
        assert self._done.acquire(timeout=100)
        result, self._result, self._job = self._result, None, None
        return result

    def end(self) -> None:
        self._job = None
        self._wanted.release()
        self._thread.join(100)

    def _run(self) -> None:
        while self._wanted.acquire() and self._job is not None:
            self._result = self._job()
            self._done.release()


def run(what: str) -> Any:
    ran = run_python([__file__, what], timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


# What goes wrong, beside the old mesh or its groups staying alive.
ITS_MISTAKES = {
    FAST: {"wrong rows", "zeros_like", "matmul", "sum", "foreach", "gradient"},
    PROPAGATION: {"propagation"},
    REDISTRIBUTION: set(),
    TOPOLOGY: set(),
    RANDOM: set(),
    FUNCTIONS: set(),
    SYMMETRIC: set(),
}


def test_each_step_drops_what_torch_keeps_of_the_old_rank() -> None:
    left = run("all")
    assert left.pop("") == {"wrong": [], "not forgotten": []}
    alone = left.pop("all")
    # Once this fails, torch knows that ranks move, and the caches need not be cleared.
    assert "wrong rows" in alone["wrong"]
    # One holder is named; others would be hidden behind it.
    assert {RANDOM, SYMMETRIC, FUNCTIONS} < set(alone["not forgotten"])
    assert {what: set(one["wrong"]) for what, one in left.items()} == ITS_MISTAKES
    assert all(one["not forgotten"] == [what] for what, one in left.items()), left


def test_a_thread_of_the_users_that_lives_over_a_restart_keeps_its_fast_cache() -> None:
    """As docs/usage.md says; what Python keeps is dropped in all threads."""
    left = run("thread")
    assert "wrong rows" in left["wrong"] and "propagation" not in left["wrong"]
    assert left["not forgotten"] == [FAST]


# ---- in this process


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Puts a module in place of torch's."""
    monkeypatch.setattr(_torch_caches, "_warned", set())
    yield lambda name, module: monkeypatch.setitem(sys.modules, name, module)


def test_what_torch_does_not_let_go_of_is_one_warning_each(
    modules: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    modules("torch.distributed._symmetric_memory", SimpleNamespace())
    modules("torch.distributed.tensor._collective_utils", SimpleNamespace())
    _torch_caches.clear_caches()
    _torch_caches.clear_caches()
    topologies, memory = (record.getMessage() for record in caplog.records)
    for word in (torch.__version__, "mesh topologies", "docs/usage.md, 'What torch keeps'"):
        assert word in topologies
    assert "symmetric memory" in memory


def test_an_older_torch_need_not_have_them(
    modules: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules("torch.distributed._symmetric_memory", SimpleNamespace())
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    _torch_caches.clear_caches()
    assert not caplog.records


def test_nothing_is_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = (
        "torch._dynamo",
        "torch.distributed.tensor",
        "torch.distributed._symm",
        "torch.distributed.nn",
    )
    for name in [name for name in sys.modules if name.startswith(looked_at)]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    _torch_caches.clear_caches()
    for rank in (1, 0):
        _torch_caches.reset_compiled_code(rank, 4)
    assert set(sys.modules) == before


if __name__ == "__main__":
    print(json.dumps({"all": _all_that_is_left, "thread": _what_is_left_of_a_thread}[sys.argv[1]]()))
