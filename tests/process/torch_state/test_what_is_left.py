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
    "closure": (lambda library, mesh: setattr(library, "f", a_closure(mesh)), "mylib.f.__closure__[0]"),
    "cache": (put_in_cache, "mylib.cached (in a _lru_cache_wrapper)[0]"),
    "partial": (
        lambda library, mesh: setattr(library, "f", functools.partial(print, mesh)),
        "mylib.f.args[0]",
    ),
}


@pytest.mark.parametrize("what", ["DeviceMesh", "ProcessGroup"])
def test_the_way_from_a_global_is_told(things: Tracker, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group, too: the collector does not track containers of what C++ has made.

    All places at once, each in a library of its own: each walk goes through all that the tests have imported.
    """
    for place, (put, _) in PLACES.items():
        library = types.ModuleType(f"{place}_lib")
        monkeypatch.setitem(sys.modules, library.__name__, library)
        put(library, mesh_of(2, 2) if what == "DeviceMesh" else dist.new_group([0, 1]))
    restart(things)
    ways_told = {(what, way.replace("mylib", f"{place}_lib")) for place, (_, way) in PLACES.items()}
    assert set(found()) == ways_told
    assert len(found()) == len(PLACES)


def test_what_the_present_iteration_has_made_is_not_told(things: Tracker, library: Any) -> None:
    restart(things)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    library.mesh = mesh_of(4)
    assert found() == []
    restart(things, 2)
    assert found() == [("DeviceMesh", "mylib.mesh")]


def test_what_was_frozen_is_found(things: Tracker, library: Any) -> None:
    library.table = {"dp": mesh_of(4)}
    gc.freeze()
    try:
        restart(things)
        assert not gc.get_referrers(library.table["dp"]), "else the collector would do"
        assert found() == [("DeviceMesh", "mylib.table['dp']")]
    finally:
        gc.unfreeze()


@pytest.mark.nightly("the searches of other kinds run always")
def test_slices_and_copies_of_meshes_are_found(things: Tracker, library: Any) -> None:
    mesh = mesh_of(2, 2)
    library.slice = mesh["r"]
    library.loaded = pickle.loads(pickle.dumps(mesh))
    library.slice._root_mesh = None
    del mesh
    restart(things)
    assert sorted(found(), key=str) == [("DeviceMesh", "mylib.loaded"), ("DeviceMesh", "mylib.slice")]


def test_what_holds_itself_is_told(things: Tracker) -> None:
    gc.disable()
    try:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
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


@pytest.mark.nightly("the searches of other kinds run always")
def test_the_old_names_still_work(things: Tracker, library: Any) -> None:
    library.mesh = mesh_of(4)
    restart(things)
    with pytest.warns(DeprecationWarning, match=r"find_leaks\(\).*kind and Leak.referrer") as warned:
        (left,) = [each for each in ft_wrapper.leftovers() if not each.within]
    assert warned[0].filename == __file__
    assert isinstance(left, ft_wrapper.Leftover) and isinstance(left, ft_wrapper.Leak)
    assert (left.what, left.iteration, left.held_by) == ("DeviceMesh", 0, "mylib.mesh")


# ---- local variables and threads


@pytest.mark.nightly("the searches of other kinds run always")
def test_frames_and_threads_are_looked_at(things: Tracker) -> None:
    def holds(mesh: Any, begun: threading.Event, over: threading.Event) -> None:
        own = {"mesh": mesh}
        del mesh
        begun.set()
        over.wait(60)
        own.clear()

    begun, over = threading.Event(), threading.Event()
    given = [mesh_of(4)]
    thread = threading.Thread(target=lambda: holds(given.pop(), begun, over), name="prefetch")
    thread.start()
    assert begun.wait(60)
    restart(things)
    try:
        ((what, way),) = found()
    finally:
        over.set()
        thread.join(60)
    assert what == "DeviceMesh" and way is not None
    assert way.startswith("own['mesh'] in holds (test_what_is_left.py:") and way.endswith("thread 'prefetch'")


@pytest.mark.nightly("the searches of other kinds run always")
def test_a_local_variable_lives_no_longer_for_being_looked_at(things: Tracker, library: Any) -> None:
    """Before Python 3.13 reading ``f_locals`` leaves a copy of all of them in the frame."""
    thing = Owner()
    gone = weakref.ref(thing)
    library.mesh = mesh_of(4)
    restart(things)
    assert found() == [("DeviceMesh", "mylib.mesh")]
    del thing
    assert gone() is None


@pytest.mark.nightly("the searches of other kinds run always")
def test_what_locals_has_given_to_someone_stays_whole(things: Tracker, library: Any) -> None:
    mine = locals()
    library.mesh = mesh_of(4)
    restart(things)
    assert found() == [("DeviceMesh", "mylib.mesh")]
    assert mine["library"] is library and mine["things"] is things


@pytest.mark.nightly("the searches of other kinds run always")
def test_nothing_that_asks_an_object_for_its_class_is_run(things: Tracker, library: Any) -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise AssertionError("asked")

    library.proxy = [Proxy()]
    library.behind = {"a": [mesh_of(4)]}
    restart(things)
    assert found() == [("DeviceMesh", "mylib.behind['a'][0]")]


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


def test_a_torch_that_has_none_of_the_names_is_no_error(
    monkeypatch: pytest.MonkeyPatch, library: Any
) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_new_process_group_helper")
    things = tracker.begin_tracking()
    things.enter(0)
    things.close()


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


@pytest.mark.nightly("the searches of other kinds run always")
def test_process_groups_are_not_counted(
    things: Tracker, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    library.group = dist.new_group([0, 1])
    restart(things)
    things.warn()
    assert not caplog.records and found() == [("ProcessGroup", "mylib.group")]


@pytest.mark.nightly("the searches of other kinds run always")
def test_with_a_live_state_nothing_is_counted(
    things: Tracker, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    library.mesh = mesh_of(4)
    restart(things)
    things.exempt(Owner())
    things.warn()
    assert not caplog.records and found() == [("DeviceMesh", "mylib.mesh")]
