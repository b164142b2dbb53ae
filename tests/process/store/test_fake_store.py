"""FakeStore: like TCPStore in what is odd about it, with a clock that a test turns and faults it injects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed
from store_helpers import Background
from torch.distributed import DistNetworkError, DistStoreError

from ft_wrapper.testing import FakeStore

BRIEF = timedelta(seconds=3)


class Pair:
    """A FakeStore, or torch's TCPStore, of the same kind: for what both must do alike."""

    def __init__(self, real: bool, use_libuv: bool) -> None:
        self.real = real
        self.store: Any = (
            torch.distributed.TCPStore(
                "localhost", 0, is_master=True, wait_for_workers=False, timeout=BRIEF, use_libuv=use_libuv
            )
            if real
            else FakeStore(use_libuv=use_libuv, timeout=BRIEF)
        )

    def is_woken(self, wait: Callable[[Any], Any], wake: Callable[[Any], Any]) -> Any:
        """What a waiter gets, or None if it waits in vain."""
        waiter = self.store.clone()
        here = self.store.clone()
        waiting = Background(lambda: wait(waiter))
        if self.real:
            # No one tells when the server has the waiter; what comes before it is seen at once, too, so this
            # repeats the wake until the wait is over.
            while waiting._thread.is_alive():
                wake(here)
                waiting._thread.join(0.05)
        else:
            self.store.clock.wait_for_sleepers(1)
            wake(here)
            self.store.clock.advance(BRIEF.total_seconds())
        with contextlib.suppress(DistStoreError):
            return waiting.join()
        return None


@pytest.fixture(params=["real", "fake"])
def real(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "real")


@pytest.mark.parametrize("use_libuv", [True, False])
def test_compare_set_on_an_absent_key_returns_what_was_expected(real: bool, use_libuv: bool) -> None:
    store = Pair(real, use_libuv).store
    assert store.compare_set("k", "something", "v") == b"something"
    assert not store.check(["k"])


@pytest.mark.parametrize("use_libuv", [True, False])
def test_failed_compare_set_on_an_absent_key_wakes_with_libuv(real: bool, use_libuv: bool) -> None:
    got = Pair(real, use_libuv).is_woken(
        lambda waiter: waiter.get("k"), lambda store: store.compare_set("k", "something", "v")
    )
    assert got == (b"" if use_libuv else None)


def test_key_created_by_compare_set_wakes_with_libuv_only() -> None:
    for use_libuv in (True, False):
        got = Pair(False, use_libuv).is_woken(
            lambda waiter: waiter.get("k"), lambda store: store.compare_set("k", "", "v")
        )
        assert got == (b"v" if use_libuv else None)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    yield FakeStore(client="main")


def test_waiter_stays_woken_though_the_key_is_deleted(store: FakeStore) -> None:
    waiter = store.clone()
    waiting = Background(lambda: waiter.wait(["a", "b"]))
    store.clock.wait_for_sleepers(1)
    store.set("a", "1")
    store.delete_key("a")
    store.set("b", "1")
    assert waiting.join() is None


def test_time_passes_only_when_turned(store: FakeStore) -> None:
    waiter = store.clone()
    waiting = Background(lambda: waiter.wait(["the key"], timedelta(seconds=10)))
    store.clock.wait_for_sleepers(1)
    store.clock.advance(9.9)
    assert store.now() == 9.9
    store.clock.advance(0.1)
    with pytest.raises(DistStoreError, match=r"wait timed out after 10 s: keys \['the key'\]"):
        waiting.join()


def test_an_operation_fails_is_repeated_or_its_reply_is_lost(store: FakeStore) -> None:
    store.fail("set", "a*", times=2)
    for _ in range(2):
        with pytest.raises(DistNetworkError, match="set abc failed"):
            store.set("abc", "1")
    store.set("b", "1")
    store.set("abc", "2")
    assert store.snapshot() == {"b": b"1", "abc": b"2"}
    store.lose_reply("add", error=DistStoreError("gone"))
    with pytest.raises(DistStoreError, match="gone"):
        store.add("n", 1)
    store.repeat("add", client="main")
    assert store.clone("other").add("n", 1) == 2
    assert [store.add("n", 1) for _ in range(2)] == [4, 5]


def test_hook_sees_each_operation_and_may_refuse_it(store: FakeStore) -> None:
    seen: list[Any] = []

    def hook(client: str, operation: str, args: Any) -> None:
        seen.append((client, operation, args[0]))
        if operation == "delete_key":
            raise PermissionError("not that")

    store.on_operation(hook)
    store.clone("other").set("k", "1")
    with pytest.raises(PermissionError):
        store.delete_key("k")
    assert store.get("k") == b"1"
    assert seen == [("other", "set", "k"), ("main", "delete_key", "k"), ("main", "get", "k")]


def test_add_to_what_is_no_number(store: FakeStore) -> None:
    store.set("the key", "text")
    with pytest.raises(DistStoreError, match="'the key'"):
        store.add("the key", 1)


def test_torch_can_use_it(store: FakeStore) -> None:
    prefixed = torch.distributed.PrefixStore("job", store)
    torch.distributed.init_process_group("gloo", store=prefixed, rank=0, world_size=1)
    try:
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    assert store.num_keys() > 0 and all(key.startswith("job/") for key in store.snapshot())


def test_a_get_that_nobody_could_end_is_refused(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_wrapper.testing.fake_store._PATIENCE", 0.05)
    store.set("there", "1")
    for get in (lambda: store.get("the key"), lambda: store.multi_get(["there", "the key"])):
        with pytest.raises(
            RuntimeError, match=r"would block for ever: in 0.05 s no one .*'the key'.*advance"
        ):
            get()
    store.set("the key", "1")
    assert store.get("the key") == b"1"


def test_a_get_goes_on_while_the_clock_is_turned(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_wrapper.testing.fake_store._PATIENCE", 60.0)
    getting = Background(lambda: store.get("the key"))
    store.clock.wait_for_sleepers(1)
    store.clock.advance(1.0)
    store.set("the key", "1")
    assert getting.join() == b"1"
