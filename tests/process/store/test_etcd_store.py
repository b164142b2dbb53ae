"""What EtcdStore alone promises: nothing is lost, whatever fails; see also the other tests."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
from etcd_helpers import Make, Relay, ask, write
from store_helpers import Background
from torch.distributed import DistStoreError

from ft_wrapper import Wrapper
from ft_wrapper.exception import StoreError
from ft_wrapper.protocol import keys as names
from ft_wrapper.protocol.operations import append_counted, read, read_log
from ft_wrapper.store import EtcdStore, PrefixStore, StoreMixin
from ft_wrapper.store.etcd_client import Watch
from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.store.plan import plan_store
from ft_wrapper.testing import EtcdServer

TIMEOUT = timedelta(seconds=30)
SECOND = timedelta(seconds=1)


# What a key holds


def test_all_that_writes_a_key_goes_together(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    store.append("k", "1")
    assert store.add("k", 1) == 2  # of what was appended
    store.append("k", "0")
    assert store.get("k") == b"20" and store.num_keys() == 1
    assert store.compare_set("k", "20", "3") == b"3"
    store.append("k", "4")
    store.append("k", "5")
    assert store.compare_set("k", "wrong", "6") == b"345"
    assert store.compare_set("k", "", "6") == b"345"
    store.set("k", "7")
    assert store.get("k") == b"7"
    store.append("k", "8")
    assert store.delete_key("k") and not store.check(["k"]) and store.num_keys() == 0
    store.append("log", "1")
    store.append("log", "2")
    assert store.delete_key("log") and store.list_keys() == []


def test_names_are_kept_apart(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    names = ["a", "a\0", "a\0\0", "a\0b", "a/", "a/b", "ä", ""]
    for name in names:
        store.append(name, f"1 {name}")
        store.set(f"set {name}", f"2 {name}")
    for name in names:
        assert (store.get(name), store.get(f"set {name}")) == (f"1 {name}".encode(), f"2 {name}".encode())
    assert store.list_keys() == sorted([*names, *(f"set {name}" for name in names)])
    assert store.delete_key("a\0")
    assert not store.check(["a\0"]) and store.check([name for name in names if name != "a\0"])


def test_a_counter_that_holds_text(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    store.set("k", "text")
    with pytest.raises(DistStoreError, match="'k' holds b'text'"):
        store.add("k", 1)


def test_more_keys_than_a_transaction_takes(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    keys = [f"k{number}" for number in range(300)]
    store.multi_set([*keys, "k0"], [*(key.upper() for key in keys), "twice"])
    assert store.multi_get(keys) == [b"twice", *(key.upper().encode() for key in keys[1:])]
    assert store.check(keys) and store.num_keys() == 300
    large = [bytes([number]) * 400_000 for number in range(4)]
    store.multi_set(keys[:4], large)
    assert store.multi_get(keys[:4]) == large


def test_value_that_is_too_large(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    for size in (1_600_000, 2_200_000):  # too large for etcd, and for its gateway
        with pytest.raises(StoreError, match=r"'the key': .*(too large|larger than).*about 1500000 bytes"):
            store.multi_set(["a", "the key"], ["1", bytes(size)])
    assert not store.check(["the key"])
    store.set("the key", "1")


# Logs that are counted


def _append_at_once(stores: list[StoreMixin]) -> list[int]:
    """Each appends an entry, all at the same moment; returns the counts that they saw."""
    together = threading.Barrier(len(stores))

    def append(number: int) -> int:
        together.wait(60.0)
        return append_counted(stores[number], "log", f"entry {number}", "count")

    appending = [Background(functools.partial(append, number)) for number in range(len(stores))]
    return [one.join() for one in appending]


def test_counted_appends_at_once_are_one_request_each(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    """No one is in another one's way, and the last one to append sees that all have."""
    store = PrefixStore(5, make(relay.endpoint))
    stores: list[StoreMixin] = [store.clone() for _ in range(32)]
    before = relay.requests.count("kv/txn")
    counts = _append_at_once(stores)
    # Where the machine is so slow that one is sent twice, there is one more: but none grows with the others.
    assert relay.requests.count("kv/txn") - before < 2 * len(stores)
    assert sorted(read_log(store, "log")) == sorted(f"entry {number}" for number in range(len(stores)))
    assert max(counts) == len(stores)


def test_ranks_that_come_to_a_barrier_are_not_in_each_others_way(
    relay: Relay, etcd: EtcdServer, make: Make
) -> None:
    """Each says so by one request; those that wait look once, and the last one wakes them."""
    store, size = PrefixStore(5, make(relay.endpoint)), 16
    ranks = [store.clone() for _ in range(size)]
    before = relay.requests.count("kv/txn")
    coming = [
        Background(functools.partial(rank.barrier, [i], "b", size, TIMEOUT, TIMEOUT))
        for i, rank in enumerate(ranks)
    ]
    for one in coming:
        one.join()
    # On a slow machine some are sent twice; but none for each of the others, which would be 15.
    assert relay.requests.count("kv/txn") - before < 12 * size


@pytest.mark.parametrize("when", ["carried out", "late"])
def test_lost_answer_of_a_counted_append(relay: Relay, etcd: EtcdServer, make: Make, when: str) -> None:
    """The entry is there once, and the count that is seen in the end is no less than the entries."""
    store, other = make(relay.endpoint), make(etcd.endpoints)
    if when == "carried out":
        relay.lose_answer(times=2)
    else:
        relay.hold()
    assert append_counted(store, "log", "mine", "count") == 1
    assert append_counted(other, "log", "another", "count") == 2
    relay.release()
    assert sorted(read_log(other, "log")) == ["another", "mine"]
    assert append_counted(other, "log", "last", "count") == 3


# Lost answers and late tries

WRITES: dict[str, tuple[Callable[[EtcdStore], object], object, object]] = {
    "set": (lambda store: store.set("k", "1"), None, b"1"),
    "multi_set": (lambda store: store.multi_set(["k", "other"], ["1", "2"]), None, b"1"),
    "add": (lambda store: store.add("k", 1), 1, b"1"),
    "append": (lambda store: store.append("k", "x"), None, b"x"),
    "compare_set": (lambda store: store.compare_set("k", "", "mine"), b"mine", b"mine"),
}


@pytest.mark.parametrize("what", sorted(WRITES.keys() - {"add"}))
def test_lost_answer(relay: Relay, etcd: EtcdServer, make: Make, what: str) -> None:
    write, result, holds = WRITES[what]
    store, other = make(relay.endpoint), make(etcd.endpoints)
    store.set("warm", "up")
    store._held = lambda key: ()  # type: ignore[method-assign]  # so that only what writes is lost
    before = relay.requests.count("kv/txn")
    relay.lose_answer(times=3)
    assert write(store) == result
    assert relay.requests.count("kv/txn") >= before + 4
    assert other.get("k") == holds


@pytest.mark.parametrize("what", ["add", "compare_set"])
def test_late_try(relay: Relay, etcd: EtcdServer, make: Make, what: str) -> None:
    """What the network delivers after its repetition undoes nothing that others wrote since."""
    write, result, holds = WRITES[what]
    store, other = make(relay.endpoint), make(etcd.endpoints)
    store._held = lambda key: ()  # type: ignore[method-assign]  # so that only what writes is late
    relay.hold()
    assert write(store) == result
    assert other.get("k") == holds
    other.set("k", "others wrote it")
    relay.release()
    assert read(other, "k") == "others wrote it"


def test_lost_answer_of_a_deletion(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    store, other = make(relay.endpoint), make(etcd.endpoints)
    other.append("k", "1")
    assert other.get("k") == b"1"
    store.check(["k"])
    held = store._held("k")
    store._held = lambda key: held  # type: ignore[method-assign]  # so that only what writes is lost
    relay.lose_answer(times=2)
    store.delete_key("k")
    assert not other.check(["k"])
    relay.hold()
    other.set("k", "2")
    assert store.delete_key("k") is True
    other.set("k", "3")
    relay.release()
    assert other.get("k") == b"3"


def test_lost_answer_of_an_addition(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    """It may be counted twice, and is never given to two."""
    store, other = make(relay.endpoint), make(etcd.endpoints)
    held = store._held("n")
    store._held = lambda key: held  # type: ignore[method-assign]  # so that only what writes is lost
    relay.lose_answer(times=2)
    assert store.add("n", 1) == 2
    assert other.add("n", 1) == 3


CHANGES: dict[str, Callable[[EtcdStore], object]] = {
    "set": lambda store: store.set("k", "6"),
    "appended": lambda store: store.append("k", "0"),
    "deleted": lambda store: store.delete_key("k"),
    "deleted and set": lambda store: (store.delete_key("k"), store.set("k", "6")),
    "deleted and appended": lambda store: (store.delete_key("k"), store.append("k", "6")),
}


@pytest.mark.parametrize(
    ("first", "change"), [("set", "set"), ("set", "deleted"), *(("append", change) for change in CHANGES)]
)
def test_change_of_what_somebody_else_has_changed(
    etcd: EtcdServer, make: Make, first: str, change: str
) -> None:
    """What was read before counts no more: nothing is lost of what was written since."""
    store, other = make(etcd.endpoints), make(etcd.endpoints)
    getattr(other, first)("k", "5")
    held = store._held("k")
    CHANGES[change](other)
    value = int(other.get("k") if other.check(["k"]) else b"0")
    store._held = lambda key: held  # type: ignore[method-assign]
    assert store.compare_set("k", "5", "7") == (str(value).encode() if value else b"5")
    assert store.add("k", 1) == value + 1
    assert other.get("k") == str(value + 1).encode()


def test_late_try_of_what_was_given_up(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    store, other = make(relay.endpoint), make(etcd.endpoints)
    store.append("log", "1")
    relay.hold(times=1000)
    store.patience = 0.3
    with pytest.raises(StoreError, match=rf"{relay.endpoint}.*append to 'log' got no answer for 0.3 s"):
        store.append("log", "2")
    relay._hold.clear()
    store.patience = 30.0
    first, *others = relay._held
    relay._held = [first]
    relay.release()
    assert other.get("log") == b"12"
    store.append("log", "3")
    relay._held = others
    relay.release()
    assert other.get("log") == b"123"


def test_nothing_is_lost_while_members_fail(cluster: EtcdServer, make: Make) -> None:
    store, other = make(cluster.endpoints), make(cluster.endpoints)
    waiter = store.clone()
    for index, (fail, recover) in enumerate(
        [(cluster.kill, cluster.restart), (cluster.pause, cluster.resume)]
    ):
        waiting = Background(lambda index=index: waiter.get(f"k{index}"))  # type: ignore[misc]
        fail(index)
        other.add("noticed", 1)
        store.add("noticed", 1)  # anyone who uses the store notices, and the watch goes elsewhere, too
        other.set(f"k{index}", "1")
        assert waiting.join() == b"1"
        recover(index)

    def work(number: int) -> list[int]:
        client, results = store.clone(), []
        for round_ in range(30):
            results.append(client.add("n", 1))
            client.append("log", f"{number}.{round_}\n")
        return results

    workers = [Background(functools.partial(work, number)) for number in range(2)]
    leader = cluster.leader()
    cluster.kill(leader)
    cluster.restart(leader)
    results = [result for worker in workers for result in worker.join()]
    assert len(set(results)) == 60
    assert store.add("n", 0) == max(results) >= 60
    lines = read_log(store, "log")
    for number in range(2):
        of_one = [line for line in lines if line.startswith(f"{number}.")]
        assert of_one == [f"{number}.{round_}" for round_ in range(30)]

    store.patience = 1.0
    for index in (0, 1):
        cluster.kill(index)
    with pytest.raises(StoreError, match=r"get 'n' got no answer for 1 s.*majority"):
        Background(lambda: store.add("n", 1)).join()
    with pytest.raises(StoreError, match="majority"):
        make(cluster.endpoints, timeout=SECOND)
    cluster.restart(1)
    store.patience = 30.0
    assert store.add("n", 1) == max(results) + 1


# Waiting


def test_blocked_wait_costs_no_traffic(relay: Relay, make: Make) -> None:
    store = make(relay.endpoint)
    relay.wait_for("lease/keepalive", 1)
    before = len(relay.requests)
    with pytest.raises(LookupError, match="'the key'") as caught:
        store.wait(["the key"], SECOND)
    assert isinstance(caught.value, DistStoreError)
    assert relay.requests[before:] == ["kv/txn", "watch", "kv/txn"]


def test_a_key_that_is_gone_again_has_been_there(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    store, other = make(relay.endpoint), make(etcd.endpoints)
    waiting = Background(lambda: store.wait(["a", "b"]))
    relay.wait_for("watch", 1)
    other.set("a", "1")
    other.delete_key("a")
    other.set("b", "1")
    assert waiting.join() is None


def test_wait_goes_on_when_its_connection_is_cut(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    store, other = make(relay.endpoint), make(etcd.endpoints)
    waiting = Background(lambda: store.get("k"))
    relay.wait_for("watch", 1)
    relay.cut_watches()
    other.set("k", "1")
    assert waiting.join() == b"1"


@pytest.mark.parametrize("is_closed", [True, False])
def test_wait_looks_again_when_what_it_missed_is_compacted(
    etcd: EtcdServer, make: Make, is_closed: bool
) -> None:
    store = make(etcd.endpoints)
    store.set("k", "1")
    store.set("k", "2")
    client, held = etcd.get_client(), store._held("k")
    last = held[0].mod_revision
    ask(client, "kv/compaction", {"revision": str(last)})
    client.close()
    looks = [(last, {"k": held}), (0, {})]  # the second one first
    store._look = lambda what, keys: looks.pop()  # type: ignore[method-assign, assignment]
    if is_closed:
        store.close()
    Background(lambda: store.wait(["k"], timedelta(seconds=60))).join()
    assert looks == []


def test_threads_that_wait_to_be_woken_cost_no_traffic(
    relay: Relay, etcd: EtcdServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a look in ten seconds: neither while they wait, nor when one of them is woken."""
    monkeypatch.setattr("ft_wrapper.store.etcd.LOOK_AGAIN", 600.0)
    store, other, number = make(relay.endpoint), make(etcd.endpoints), 5
    relay.wait_for("lease/keepalive", 1)
    before = relay.requests.count("kv/txn")
    clients = [store.clone() for _ in range(number)]
    waiting = [
        Background(lambda client=client, one=one: client.wait_for(f"{names.WAKE}{one}", 60.0))  # type: ignore[misc]
        for one, client in enumerate(clients)
    ]
    relay.wait_for("kv/txn", before + 1)  # what is there, and as of when to watch
    relay.wait_for("watch", 1)
    blocked = len(relay.requests)
    for one in reversed(range(number)):
        other.set(f"{names.WAKE}{one}", "1")
        assert waiting[one].join() == "1"
        assert relay.requests[blocked:] == []


def test_wait_after_a_compaction_costs_no_more(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    """Anyone who comes after it watches what is written from now on, and not what is not kept any more."""
    store = make(relay.endpoint)
    relay.wait_for("lease/keepalive", 1)
    for number in range(3):
        store.set(f"{names.WAKE}{number}", "1")
    client = etcd.get_client()
    ask(client, "kv/compaction", {"revision": str(store._etcd.read("revision", [], 30.0)[0])})
    client.close()
    before = len(relay.requests)
    assert store.wait_for(f"{names.WAKE}k", 1.0) is None
    # What is there, and as of when to watch; wakes; whether it is there in the end.
    assert sorted(relay.requests[before:]) == [*["kv/txn"] * 2, "watch"]
    other = make(etcd.endpoints)
    waiting = Background(lambda: store.wait_for(f"{names.WAKE}k", 60.0))
    other.set(f"{names.WAKE}k", "1")
    assert waiting.join() == "1"


def test_a_key_that_is_deleted_wakes_nobody_who_comes_later(etcd: EtcdServer, make: Make) -> None:
    store, other = make(etcd.endpoints), make(etcd.endpoints)
    deleted, kept = f"{names.WAKE}a", f"{names.WAKE}b"
    assert store.wait_for(deleted, 0.0) is None
    other.set(deleted, "1")
    assert store.wait_for(deleted, 60.0) == "1"
    other.delete_key(deleted)
    other.set(kept, "1")
    assert store.wait_for(kept, 60.0) == "1"  # the watch is past the deletion
    assert store.wait_for(deleted, 0.0) is None


# The life of a job


def test_keys_go_with_the_job(etcd: EtcdServer, make: Make, prefix: str) -> None:
    store = make(etcd.endpoints)
    store.set("k", "1")
    store.append("log", "1")
    client = etcd.get_client()
    keys = client.read(Range.prefix(f"{prefix}/".encode()))
    assert {kv.lease for kv in keys} == {keys[0].lease} and keys[0].lease
    assert int(ask(client, "lease/timetolive", {"ID": str(keys[0].lease)})["TTL"]) > 500
    assert store.remove() is True
    assert client.read(Range.prefix(f"{prefix}/".encode())) == ()
    assert store.remove() is False
    client.close()


def test_whoever_outlives_the_job_is_told(etcd: EtcdServer, make: Make) -> None:
    operations: list[Callable[[EtcdStore], object]] = [
        *(write for write, _, _ in WRITES.values()),
        lambda store: store.get("k"),
        lambda store: read(store, "k"),
        lambda store: store.wait(["k"], TIMEOUT),
        lambda store: store.delete_key("k"),
        lambda store: store.list_keys(),
    ]
    old = make(etcd.endpoints)
    old.add("n", 1)
    old.remove()
    for begins_again in (False, True):
        if begins_again:
            new = make(etcd.endpoints)  # another job, of the same prefix
            new.set("k", "theirs")
        for operation in operations:
            with pytest.raises(StoreError, match="the job's keys are gone"):
                operation(old)
    assert new.get("k") == b"theirs" and new.num_keys() == 1
    new.remove()


@pytest.mark.parametrize("key", ["k", f"{names.WAKE}k"])
def test_blocked_wait_is_told_that_the_job_is_gone(
    relay: Relay, etcd: EtcdServer, make: Make, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """By its next look."""
    monkeypatch.setattr("ft_wrapper.store.etcd.LOOK_AGAIN", 0.5)
    store = make(relay.endpoint)
    waiting = Background(lambda: store.wait_for(key, 60.0))
    relay.wait_for("watch", 1)
    make(etcd.endpoints).remove()
    with pytest.raises(StoreError, match="the job's keys are gone"):
        waiting.join()


def test_lease_is_kept_alive_until_the_store_is_closed(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    store = make(relay.endpoint, ttl=SECOND)
    clone = store.clone()
    clone.add("n", 1)
    relay.wait_for("lease/keepalive", 4)  # a lease of a second would have run out by now
    assert clone.add("n", 1) == 2
    client = etcd.get_client()
    (life,) = client.read(Range(store._etcd.prefix + b"life"))
    store.close()
    events = Watch(client, Range(life.key), life.mod_revision + 1).events()
    assert Background(lambda: next(events)).join().create_revision == 0
    events.close()
    client.close()
    with pytest.raises(StoreError, match="the job's keys are gone"):
        clone.add("n", 1)


def test_two_who_begin_a_job_at_once(etcd: EtcdServer, make: Make) -> None:
    beginning = [Background(lambda: make(etcd.endpoints)) for _ in range(4)]
    stores = [one.join() for one in beginning]
    assert sorted(store.add("n", 1) for store in stores) == [1, 2, 3, 4]
    assert len({store._etcd.lease for store in stores}) == 1


def test_a_lost_answer_when_the_job_begins(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    relay.lose_answer("kv/txn")
    relay.lose_answer("lease/grant")
    store, other = make(relay.endpoint), make(etcd.endpoints)
    store.set("k", "1")
    assert other.get("k") == b"1"


def test_used_after_a_fork(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    assert [store.add("n", 1) for _ in range(3)] == [1, 2, 3]
    waiting = Background(lambda: store.clone().get("from the child"))
    pid = os.fork()
    if pid == 0:
        try:
            assert store.add("n", 1) == 4
            store.set("from the child", "1")
            store.get("from the parent")
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert waiting.join() == b"1"
    assert [store.add("n", 1) for _ in range(2)] == [5, 6]
    store.set("from the parent", "1")
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert store.add("n", 1) == 7


# torch


def test_under_torchs_prefix_store(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    part = torch.distributed.PrefixStore("part", store)
    part.set("k", "1")
    assert part.get("k") == b"1" and store.get("part/k") == b"1"
    assert part.add("n", 2) == 2 and part.num_keys() == 2
    assert part.compare_set("k", "1", "2") == b"2" and part.check(["k"])
    part.append("log", "a")
    part.multi_set(["a", "b"], ["1", "2"])
    assert part.multi_get(["log", "a", "b"]) == [b"a", b"1", b"2"]
    part.wait(["k"])
    part.wait(["k"], SECOND)
    assert part.delete_key("k") and not part.check(["k"])
    part.set_timeout(SECOND)
    assert store.timeout == SECOND
    with pytest.raises(LookupError, match="part/k"):
        part.get("k")


def test_example_of_the_documentation(etcd: EtcdServer, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "etcd.md").read_text()
    *_, example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out == "b'value'\n"


# Bad input


def test_password_is_not_shown() -> None:
    arguments = {"endpoints": "host:1", "prefix": "job", "user": "me", "password": "the-secret-word"}
    plan = plan_store(EtcdStore, arguments, TIMEOUT)
    assert "host:1" in plan.description and "the-secret-word" not in plan.description
    with pytest.raises(TypeError, match="no_such_argument") as caught:
        Wrapper(store_factory=EtcdStore, store_kwargs={**arguments, "no_such_argument": 1})
    assert "the-secret-word" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "/", "//"])
def test_prefix_that_is_none(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix="):
        EtcdStore("localhost:1", prefix)


def test_time_to_live_that_is_none() -> None:
    with pytest.raises(ValueError, match="ttl="):
        EtcdStore("localhost:1", "job", ttl=timedelta(0))


def test_prefix_that_another_program_uses(etcd: EtcdServer, make: Make, prefix: str) -> None:
    client = etcd.get_client()
    write(client, f"{prefix}/life".encode(), b"")
    client.close()
    with pytest.raises(StoreError, match="another program has this prefix"):
        make(etcd.endpoints)
