"""Several operations in a row, on stores of every kind; on etcd they are one transaction."""

from __future__ import annotations

import threading

import pytest
from etcd_helpers import Make, Relay

from ft_wrapper.protocol import keys
from ft_wrapper.protocol.operations import (
    LAPSED,
    Append,
    CompareAndSet,
    Count,
    Delete,
    Heartbeat,
    Notify,
    Read,
    ReadHeartbeat,
    ReadLog,
    SetIfAbsent,
    Step,
    Write,
    read_log,
)
from ft_wrapper.store import EtcdStore, StoreMixin


def test_each_gives_what_it_gives_alone(store: StoreMixin) -> None:
    store.set("held", "value")
    given = store.execute(
        [
            Read("absent"),
            Read("held"),
            Write({"a": "1"}),
            Write({"b": "2", "c": "3"}),
            Append("log", "first"),
            Append("log", "second"),
            Count("number"),
            ReadHeartbeat("nobody"),
            Notify("wake", "up"),
            SetIfAbsent("register", "mine"),
            CompareAndSet("head", "", "one"),
        ]
    )
    unheard = given.pop(7)
    assert given == [None, "value", None, None, None, None, "1", None, "mine", "one"]
    assert int(unheard or "") in (0, LAPSED)
    assert store.multi_get(["a", "b", "c", "register", "head"]) == [b"1", b"2", b"3", b"mine", b"one"]
    assert read_log(store, "log") == ["first", "second"]
    assert store.execute([Count("number")]) == ["2"]
    assert store.get("wake") == b"up"
    assert store.execute([Notify("wake", "up"), Notify("other", "1")]) == [None, None]
    assert store.get("wake") == b"up"


def test_signs_of_life_beside_what_is_read(store: StoreMixin) -> None:
    seen = []
    for _ in range(2):
        beaten, head, beats = store.execute(
            [Heartbeat("somebody", 10.0), Read("head"), ReadHeartbeat("somebody")]
        )
        assert beaten is head is None
        seen.append(int(beats or ""))
    assert 0 < seen[0] < seen[1]


def test_registers_that_somebody_else_wrote(store: StoreMixin) -> None:
    store.set("register", "theirs")
    store.set("head", "two")
    steps = [
        SetIfAbsent("register", "mine"),
        CompareAndSet("head", "one", "three"),
        CompareAndSet("head", "two", "four"),
        Read("head"),
    ]
    assert store.execute(steps) == ["theirs", "two", "four", "four"]
    assert store.get("register") == b"theirs"


def test_steps_see_those_before_them(store: StoreMixin) -> None:
    assert store.execute([Write({"a": "1"}), Read("a"), SetIfAbsent("a", "2")]) == [None, "1", "1"]
    assert store.execute([Append("log", "x"), ReadLog("log"), ReadLog("none")]) == [None, "x", ""]


def test_what_is_too_large_for_one_transaction(store: StoreMixin) -> None:
    large = "x" * 600_000
    written: list[Step] = [Write({"a": large}), Write({"b": large}), SetIfAbsent("head", "1")]
    assert store.execute(written) == [None, None, "1"]
    assert (len(store.get("a")), len(store.get("b"))) == (600_000, 600_000)


def test_more_keys_than_a_transaction_takes(store: StoreMixin) -> None:
    values = {f"key {number}": str(number) for number in range(200)}
    assert store.execute([Write(values), SetIfAbsent("head", "1")]) == [None, "1"]
    assert store.multi_get([*values]) == [value.encode() for value in values.values()]


def test_who_waits_hears_what_is_said(store: StoreMixin) -> None:
    """What a store does not tell by itself is read."""
    key, heard = keys.wake_head(1), []
    waiting = store.clone()

    def wait() -> None:
        heard.append(waiting.wait_for(key, 60.0))

    assert store.wait_for(key, 0.0) is None
    waiter = threading.Thread(target=wait)
    waiter.start()
    store.execute([SetIfAbsent("head", "0:1:a"), Write({key: "0:1:a"})])
    waiter.join()
    assert heard[0] in ("", "0:1:a")
    assert store.wait_for(key, 0.0) in ("", "0:1:a")
    waiting.close()


def test_many_keys_are_deleted(store: StoreMixin) -> None:
    names = [f"key {number}" for number in range(100)]
    store.multi_set(names, ["x"] * 100)
    store.append(names[0], "more")
    store.set("kept", "x")
    assert store.execute([Read("kept"), Delete((*names, "absent"))]) == ["x", None]
    assert not any(store.check([name]) for name in names)
    assert store.check(["kept"])
    assert store.execute([Delete(("kept",)), Read("kept"), Delete(())]) == [None, None, None]


@pytest.fixture
def relayed(relay: Relay, make: Make) -> EtcdStore:
    """A store of which all requests are seen."""
    return make(relay.endpoint)


ALL: list[Step] = [
    Append("log", "entry"),
    Count("number"),
    SetIfAbsent("taken", "mine"),
    SetIfAbsent("free", "mine"),
    CompareAndSet("head", "", "one"),
    Write({"a": "1"}),
    Read("held"),
]


@pytest.mark.parametrize("steps", [ALL, [Read("a"), Read("b"), Read("c")]], ids=["writing", "reading"])
def test_etcd_is_asked_once(relay: Relay, relayed: EtcdStore, steps: list[Step]) -> None:
    before = relay.requests.count("kv/txn")
    relayed.execute(steps)
    assert relay.requests.count("kv/txn") == before + 1


def test_nobody_is_woken_twice(relay: Relay, relayed: EtcdStore) -> None:
    woken = Notify(keys.wake_end(1), "1")
    relayed.execute([Append("log", "a"), woken])
    written = relayed._etcd.read("revision", [], 20.0)[0]
    relayed.execute([woken])
    assert relayed._etcd.read("revision", [], 20.0)[0] == written


def test_an_answer_is_lost(relay: Relay, relayed: EtcdStore) -> None:
    relayed.set("taken", "theirs")
    relayed.set("held", "value")
    relay.lose_answer()
    assert relayed.execute(ALL) == [None, "1", "theirs", "mine", "one", None, "value"]
    assert read_log(relayed, "log") == ["entry"]


def test_etcd_tells_what_is_said(relay: Relay, relayed: EtcdStore) -> None:
    """Without another request: the watch tells it, or the look."""
    other, heard = relayed.clone(), []
    waiter = threading.Thread(target=lambda: heard.append(other.wait_for(keys.wake_head(1), 60.0)))
    before = relay.requests.count("kv/txn")
    waiter.start()
    relay.wait_for("watch", 1)
    relayed.set(keys.wake_head(1), "0:1:a")
    waiter.join()
    assert heard == ["0:1:a"]
    assert relayed.wait_for(keys.wake_head(1), 0.0) == "0:1:a"  # it is known
    assert relay.requests.count("kv/txn") == before + 2  # as of when to watch, and what was written
