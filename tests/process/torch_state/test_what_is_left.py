"""What `find_leaks` finds in one process, on torch's fake process group, and what the search leaves alone."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import ft_wrapper
from ft_wrapper.torch_groups import tracker
from ft_wrapper.torch_groups.caches import clear_caches
from ft_wrapper.torch_groups.release import release_process_groups, wait_for_released_groups
from ft_wrapper.torch_groups.tracker import Tracker


@pytest.fixture
def things() -> Iterator[Tracker]:
    """Iteration 0 is on, with process groups."""
    things = tracker.begin_tracking()
    things.enter(0)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield things
    restart(things, 100)
    things.close()
    assert wait_for_released_groups(60)


def restart(things: Tracker, iteration: int = 1) -> None:
    release_process_groups(aborted=True)
    clear_caches()
    gc.collect()
    things.enter(iteration)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[: len(shape)])


def found() -> list[tuple[str, str | None]]:
    return [(each.kind, each.referrer) for each in ft_wrapper.find_leaks() if not each.within]


@pytest.fixture
def library() -> Iterator[Any]:
    """A module of the user's."""
    library = types.ModuleType("mylib")
    sys.modules["mylib"] = library
    yield library
    del sys.modules["mylib"]


class Slotted:
    """Has no dict."""

    __slots__ = ("mesh",)


class Owner:
    """Has attributes, of its own and of its class."""

    kept: Any = None

    def method(self) -> None:
        """Bound to it."""


class Proxy:
    """Must not be asked for its class."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise AssertionError("asked")


def holds(mesh: Any, begun: threading.Event, over: threading.Event) -> None:
    """Holds a mesh in a local variable."""
    own = {"mesh": mesh}
    del mesh
    begun.set()
    over.wait(60)
    own.clear()


def a_closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def put_attribute(library: Any, mesh: Any) -> None:
    library.owner = Owner()
    library.owner.mesh = mesh


def put_slot(library: Any, mesh: Any) -> None:
    library.owner = Slotted()
    library.owner.mesh = mesh


def put_method(library: Any, mesh: Any) -> None:
    owner = Owner()
    setattr(owner, "mesh", mesh)  # noqa: B010
    library.call = owner.method


def put_in_class(library: Any, mesh: Any) -> None:
    class Registry:
        table = {"a": [mesh]}

    Registry.__module__ = library.__name__
    library.Registry = Registry


def put_in_cache(library: Any, mesh: Any) -> None:
    library.cached = functools.lru_cache(lambda mesh: None)
    library.cached(mesh)


PLACES: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "global": (lambda library, mesh: setattr(library, "MESH", mesh), "mylib.MESH"),
    "dict": (lambda library, mesh: setattr(library, "M", {"dp": mesh}), "mylib.M['dp']"),
    "list": (lambda library, mesh: setattr(library, "M", [0, (mesh,)]), "mylib.M[1][0]"),
    "set": (lambda library, mesh: setattr(library, "M", {mesh}), "mylib.M (in a set)"),
    "key": (lambda library, mesh: setattr(library, "M", {mesh: 1}), "mylib.M (in a dict)"),
    "attribute": (put_attribute, "mylib.owner.mesh"),
    "slot": (put_slot, "mylib.owner.mesh"),
    "class": (put_in_class, "mylib.Registry.table['a'][0]"),
    "method": (put_method, "mylib.call.__self__.mesh"),
    "closure": (
        lambda library, mesh: setattr(library, "f", a_closure(mesh)),
        "mylib.f.__closure__[0] (in a cell)",
    ),
    "cache": (put_in_cache, "mylib.cached (in a _lru_cache_wrapper)[0]"),
    "partial": (
        lambda library, mesh: setattr(library, "f", functools.partial(print, mesh)),
        "mylib.f.args[0]",
    ),
}


def test_the_way_from_whatever_holds_it_is_told(
    things: Tracker, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All places at once, each in a library of its own: a walk goes through all that the tests have imported.

    A group, too: the collector does not track containers of what C++ has made.
    """
    expected: set[tuple[str, str | None]] = set()
    for kind, make in (
        ("DeviceMesh", lambda: mesh_of(2, 2)),
        ("ProcessGroup", lambda: dist.new_group([0, 1])),
    ):
        for place, (put, way) in PLACES.items():
            one = types.ModuleType(f"{kind}_{place}")
            monkeypatch.setitem(sys.modules, one.__name__, one)
            put(one, make())
            expected.add((kind, way.replace("mylib", one.__name__)))
    # Slices and copies of meshes, and what stands behind an object that must not be asked for its class.
    mesh = mesh_of(2, 2)
    library.slice = mesh["r"]
    library.loaded = pickle.loads(pickle.dumps(mesh))
    library.slice._root_mesh = None
    del mesh
    library.proxy = [Proxy()]
    library.behind = {"a": [mesh_of(4)]}
    expected |= {("DeviceMesh", f"mylib.{place}") for place in ("slice", "loaded", "behind['a'][0]")}
    # A local variable of a thread.
    begun, over = threading.Event(), threading.Event()
    given = [mesh_of(4)]
    thread = threading.Thread(target=lambda: holds(given.pop(), begun, over), name="prefetch")
    thread.start()
    assert begun.wait(60)
    # Looking at a frame does not change it; before Python 3.13 ``f_locals`` leaves a copy of all in it.
    thing = Owner()
    gone = weakref.ref(thing)
    restart(things)
    try:
        told = found()
    finally:
        over.set()
        thread.join(60)
    (local,) = set(told) - expected
    assert local[0] == "DeviceMesh" and local[1] is not None
    assert local[1].startswith("own['mesh'] in holds (test_what_is_left.py:")
    assert local[1].endswith("thread 'prefetch'")
    assert len(told) == len(expected) + 1 and expected < set(told)
    del thing
    assert gone() is None


def test_what_the_present_iteration_has_made_is_not_told_and_what_was_frozen_is(
    frozen_again: None, things: Tracker, library: Any
) -> None:
    library.table = {"dp": mesh_of(4)}
    mine = locals()
    gc.freeze()
    restart(things)
    assert not gc.get_referrers(library.table["dp"]), "else the collector would do"
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    library.mesh = mesh_of(4)
    (left,) = [each for each in ft_wrapper.find_leaks() if not each.within]
    assert mine["library"] is library and mine["things"] is things, "what locals() gave stays whole"
    assert (left.kind, left.iteration, left.referrer) == ("DeviceMesh", 0, "mylib.table['dp']")


def test_what_holds_itself_is_told(things: Tracker) -> None:
    gc.disable()
    try:
        model = DistributedDataParallel(DistributedDataParallel(torch.nn.Linear(1, 1)))
        model.own = [model]
        del model
        release_process_groups(aborted=True)
        clear_caches()  # and no collection
        things.enter(1)
        (left,) = [each for each in ft_wrapper.find_leaks() if not each.within]
        assert left.referrer is None and left.cycle is not None
        assert "is held by itself (DistributedDataParallel" in str(left)
    finally:
        gc.enable()


# ---- noticing


def test_torch_is_as_it_was_afterwards() -> None:
    c10d: Any = dist.distributed_c10d
    hooks = torch.nn.modules.module._global_module_registration_hooks
    before = [DeviceMesh.__init__, DeviceMesh.__setstate__, c10d._new_process_group_helper, len(hooks)]
    things = tracker.begin_tracking()
    assert DeviceMesh.__init__ is not before[0] and len(hooks) == before[3] + 1
    things.close()
    assert before == [
        DeviceMesh.__init__,
        DeviceMesh.__setstate__,
        c10d._new_process_group_helper,
        len(hooks),
    ]


def test_a_program_that_has_wrapped_it_too_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # put back in the end
    things = tracker.begin_tracking()
    ours = DeviceMesh.__init__

    def theirs(*arguments: Any, **options: Any) -> None:
        ours(*arguments, **options)

    setattr(DeviceMesh, "__init__", theirs)  # noqa: B010
    things.close()
    assert DeviceMesh.__init__ is theirs


def test_what_is_gone_leaves_no_trace(things: Tracker) -> None:
    before = len(things._tracked)
    for _ in range(100):
        mesh_of(4)
    gc.collect()
    assert len(things._tracked) == before


def test_a_compiled_function_may_slice_a_mesh(things: Tracker) -> None:
    mesh = mesh_of(2, 2)

    @torch.compile(backend="eager", fullgraph=True)
    def add_size(x: torch.Tensor) -> torch.Tensor:
        return x + mesh["s"].size()

    assert add_size(torch.ones(1)).item() == 3


# ---- the warning at a restart


def test_what_outlives_the_next_iteration_is_counted_each_time_that_it_is_more(
    things: Tracker, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    library.kept = [mesh_of(4), DistributedDataParallel(torch.nn.Linear(1, 1))]
    library.theirs = type("DistributedDataParallel", (torch.nn.Module,), {})()
    library.theirs.module = torch.nn.Linear(1, 1)
    things.warn()
    assert not caplog.records, "of this iteration"
    restart(things)
    things.warn()
    things.warn()
    (record,) = caplog.records
    assert record.getMessage() == (
        "objects of earlier iterations are still alive, with their memory: 1 DeviceMesh, 1 "
        "DistributedDataParallel; ft_wrapper.find_leaks(), called in the function, finds what holds them"
    )
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    library.kept.append(mesh_of(4))
    restart(things, 2)
    things.warn()
    assert "2 DeviceMesh" in caplog.text and len(caplog.records) == 2


def test_with_a_live_state_nothing_is_counted_nor_are_process_groups_ever(
    things: Tracker, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    library.group = dist.new_group([0, 1])
    restart(things)
    things.warn()
    assert not caplog.records
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    library.mesh = mesh_of(4)
    restart(things, 2)
    things.exempt(Owner())
    things.warn()
    assert not caplog.records
