"""The operations that the protocol needs, on every kind of store."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
from store_helpers import Background
from torch.distributed import DistStoreError

from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.operations import Append, Write, read_log
from ft_wrapper.settings import AllLimits
from ft_wrapper.store import FileStore, PrefixStore, StoreMixin
from ft_wrapper.testing import FakeStore

SECOND = timedelta(seconds=1)


def expect_timeout(store: StoreMixin, function: object) -> DistStoreError:
    """Runs something that waits in vain; turns the clock where it is virtual."""
    waiting = Background(function)  # type: ignore[arg-type]
    inner = store._store if isinstance(store, PrefixStore) else store
    if isinstance(inner, FakeStore):
        inner.clock.wait_for_sleepers(1)
        inner.clock.advance(60.0)
    with pytest.raises(DistStoreError) as caught:
        waiting.join()
    return caught.value


def test_torchs_operations(store: StoreMixin) -> None:
    before = store.num_keys()
    store.set("a", "text")
    store.multi_set(["b", "empty"], [b"\x00\xff", ""])
    assert store.multi_get(["b", "a", "empty"]) == [b"\x00\xff", b"text", b""]
    store.set("a", "other")
    assert store.get("a") == b"other"
    assert store.num_keys() == before + 3
    assert store.check(["a"]) and not store.check(["absent"]) and not store.check(["a", "absent"])
    assert [store.add("n", amount) for amount in (1, 5, 0, -2)] == [1, 6, 6, 4]
    assert int(store.get("n")) == 4
    for text in ("a", b"b", "c"):
        store.append("log", text)
    assert store.get("log") == b"abc"
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert not store.check(["a"])
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)


def test_compare_set(store: StoreMixin) -> None:
    """It writes what is absent or expected."""
    store.compare_set("k", "something", "2")
    assert not store.check(["k"])
    assert store.compare_set("k", "", "1") == b"1"
    store.compare_set("k", "", "2")
    assert store.get("k") == b"1"
    assert store.compare_set("k", "wrong", "2") == b"1"
    assert store.compare_set("k", "1", "2") == b"2"
    assert store.get("k") == b"2"


def test_waiters_are_woken(store: StoreMixin) -> None:
    writes = {
        "set": lambda key: store.set(key, "1"),
        "add": lambda key: store.add(key, 1),
        "append": lambda key: store.append(key, "1"),
        "multi_set": lambda key: store.multi_set([key], ["1"]),
    }
    for key, write in writes.items():
        waiter = store.clone()
        waiting = Background(lambda waiter=waiter, key=key: waiter.get(key))  # type: ignore[misc]
        write(key)
        assert waiting.join() == b"1", key


def test_wait_for_several(store: StoreMixin) -> None:
    waiter = store.clone()
    waiting = Background(lambda: waiter.wait(["a", "b"], timedelta(seconds=20)))
    store.set("a", "1")
    store.set("b", "1")
    assert waiting.join() is None


def test_wait_in_vain(store: StoreMixin) -> None:
    waiter = store.clone()
    error = expect_timeout(store, lambda: waiter.wait(["the key"], SECOND))
    assert "the key" in str(error)


def test_threads_lose_nothing(store: StoreMixin) -> None:
    clients = [store.clone() for _ in range(4)]
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait(20.0)
        for round_ in range(10):
            clients[number].add("n", 1)
            clients[number].execute([Append("log", f"{number}.{round_}")])

    for worker in [Background(lambda number=number: work(number)) for number in range(4)]:  # type: ignore[misc]
        worker.join()
    assert store.add("n", 0) == 40
    assert set(read_log(store, "log")) == {
        f"{number}.{round_}" for number in range(4) for round_ in range(10)
    }


def test_only_one_compare_set_wins(store: StoreMixin) -> None:
    clients = [store.clone() for _ in range(4)]
    for worker in [
        Background(lambda i=i: clients[i].compare_set("head", "", f"mine {i}"))
        for i in range(4)  # type: ignore[misc]
    ]:
        worker.join()
    assert store.get("head").decode() in {f"mine {number}" for number in range(4)}


def test_protocol_on_every_store(store: StoreMixin) -> None:
    """Two members form, one reports a fault, both go on."""
    first, second = store, store.clone()

    def live(client: StoreMixin, slot: int) -> tuple[int, int]:
        member = Agreement(client).joining.register(slot)
        Agreement(client).joining.join_first(member, range(2))
        first = Agreement(client).joining.await_first(member, range(2), 20.0)
        assert first is not None
        view = first
        if slot == 0:
            Agreement(client).ends.end_iteration(view.n, "fault")
        assert Agreement(client).ends.wait_for_end(view.n, 20.0) == "fault"
        Agreement(client).iterations.arrive(view, member, slot, 2)
        limits = AllLimits(barrier_timeout=20.0, heartbeat_timeout=10.0)
        following = Agreement(client).iterations.await_next(view, member, limits)
        assert following is not None
        return following.n, len(following.members)

    other = Background(lambda: live(second, 1))
    assert live(first, 0) == (1, 2)
    assert other.join() == (1, 2)


def test_prefix_store_is_torchs_and_keeps_iterations_apart() -> None:
    store = FakeStore()
    one, two = PrefixStore(1, store), PrefixStore(2, store)
    assert isinstance(one, torch.distributed.PrefixStore)
    one.set("k", "1")
    assert not two.check(["k"])
    assert one.barrier.__func__ is StoreMixin.barrier  # type: ignore[attr-defined]  # torch has one, too
    seen_by_torch = torch.distributed.PrefixStore("x", two)
    seen_by_torch.set("k", "2")
    assert next(key for key, value in store.snapshot().items() if value == b"2").endswith("user/2/x/k")


def test_what_a_store_of_ones_own_lacks_is_named() -> None:
    class Lacking(StoreMixin):
        def append(self, key: str, value: str | bytes) -> None:
            self.appended = key, value

    store = Lacking()
    store.execute([Append("log", "x")])
    assert store.appended == ("log", "x\n")
    for lacks in (lambda: store.set("k", "v"), lambda: store.execute([Write({"k": "v"})])):
        with pytest.raises(NotImplementedError, match="Lacking has no set"):
            lacks()


def test_prefix_store_is_over_with_its_iteration(job: Agreement) -> None:
    store = job.store
    part = PrefixStore(1, store)
    assert not part.is_over()
    job.ends.end_iteration(1, "fault")
    assert part.is_over() and not PrefixStore(2, store).is_over() and not store.is_over()
    job.ends.end_iteration(2, "done")
    assert not PrefixStore(2, store).is_over()


def test_file_store_of_another_process_sees_the_same(tmp_path: Path) -> None:
    one, two = FileStore(str(tmp_path / "s")), FileStore(str(tmp_path / "s"))
    one.set("k", "1")
    assert two.get("k") == b"1"
