"""Signs of life in etcd: leases, which are not written, and which lapse by themselves."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
from etcd_helpers import Make, Relay, ask, erase
from store_helpers import Background

from ft_wrapper.exception import StoreError
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.operations import LAPSED, Heartbeat, read_heartbeat
from ft_wrapper.protocol.records import Member
from ft_wrapper.protocol.silence import CounterObserver, HeartbeatObserver, beat_lasts
from ft_wrapper.store import EtcdStore
from ft_wrapper.store.etcd_client import Watch
from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.testing import EtcdServer, FakeStore

MEMBER = Member(1, 0)
KEY = keys.heartbeat(str(MEMBER))
SHORT = 2.0  # seconds: the shortest lease


def entries(store: EtcdStore, key: str = KEY) -> dict[bytes, int]:
    """The entries that are there for a key, with their leases."""
    found = store._etcd.client.read(store._keys.entries(key))
    return {kv.key: kv.lease for kv in found}


def lapse(store: EtcdStore, key: str = KEY) -> dict[bytes, int]:
    """Lets the leases of a key run out now; returns what went with them."""
    found = entries(store, key)
    for lease in found.values():
        assert store._etcd.client.revoke(lease)
    return found


def await_lapses(store: EtcdStore, after: int, number: int = 1, key: str = KEY) -> None:
    """Waits until etcd has taken away some entries of a key."""
    watch = Watch(store._etcd.client, store._keys.entries(key), after + 1)
    events = watch.events()
    lapses = (event for event in events if not event.create_revision)
    try:
        Background(lambda: [*itertools.islice(lapses, number)]).join()
    finally:
        watch.close()
        events.close()


def revision(store: EtcdStore) -> int:
    """Of all that etcd holds: it moves by each write."""
    return store._etcd.read("revision", [], 30.0)[0]


# What a sign of life costs


def test_nothing_is_written_while_hearts_beat(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    others = [store.clone() for _ in range(3)]

    def keys_of_the_job() -> dict[bytes, int]:
        found = store._etcd.client.read(Range.prefix(store._etcd.prefix))
        return {kv.key: kv.mod_revision for kv in found}

    for tick in range(20):
        for number, other in enumerate(others):
            Agreement(other).heartbeats.beat_heart(str(Member(number, 0)))
            assert tick == 0 or Agreement(store).heartbeats.get_heartbeat(Member(number, 0)) > 0
        if tick == 0:
            before = keys_of_the_job()
    assert len(before) >= 3 and keys_of_the_job() == before


def test_a_sign_of_life_is_one_request(relay: Relay, make: Make) -> None:
    store = make(relay.endpoint)
    relay.wait_for("lease/keepalive", 1)  # of the job's lease
    before = len(relay.requests)
    store.execute([Heartbeat("k", 60.0)])
    assert relay.requests[before:] == ["lease/grant", "kv/txn"]
    for _ in range(3):
        store.execute([Heartbeat("k", 60.0)])
    assert relay.requests[before + 2 :] == ["lease/keepalive"] * 3
    read_heartbeat(store, "k")
    assert relay.requests[before + 5 :] == ["kv/txn"]
    read_heartbeat(store, "k")
    (entry,) = store._etcd.client.read(store._keys.entries("k"))
    assert entry.create_revision == entry.mod_revision


@pytest.mark.parametrize(
    ("timeout", "interval", "lasts"), [(30.0, 1.0, 15.0), (15.0, 5.0, 7.5), (4.0, 3.0, 4.5)]
)
def test_how_long_it_lasts(timeout: float, interval: float, lasts: float) -> None:
    """Until the next one at least: else anyone who lives would seem to come and go."""
    assert beat_lasts(timeout, interval) == lasts


@pytest.mark.parametrize(("lasts", "granted"), [(0.1, 2), (7.5, 8)])
def test_time_of_the_lease(etcd: EtcdServer, make: Make, lasts: float, granted: int) -> None:
    store = make(etcd.endpoints)
    store.execute([Heartbeat(KEY, lasts)])
    (lease,) = entries(store).values()
    reply = ask(store._etcd.client, "lease/timetolive", {"ID": str(lease)})
    assert int(reply["grantedTTL"]) == granted


def test_another_time_makes_another_lease(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    store.execute([Heartbeat(KEY, 60.0)])
    store.execute([Heartbeat(KEY, 30.0)])
    store.execute([Heartbeat(KEY, 30.0)])
    assert len(entries(store)) == 2


def test_leases_of_those_who_come_and_go_do_not_stay(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    began = revision(store)
    for number in range(5):
        clone = store.clone()
        clone.execute([Heartbeat(KEY, SHORT)])
        store.execute([Heartbeat(f"of {number}", SHORT)])
    leases = set(store._etcd._beats.values())
    assert len(leases) == 6  # those of clones for one key are one
    await_lapses(store, began, 1)
    for number in range(5):
        await_lapses(store, began, 1, f"of {number}")
    listed = ask(store._etcd.client, "lease/leases", {}).get("leases", [])
    assert not leases & {int(lease["ID"]) for lease in listed}
    assert store.list_keys() == []


# What others see


def test_the_end_of_signs_of_life_is_silence(etcd: EtcdServer, make: Make) -> None:
    store, clock = make(etcd.endpoints), FakeStore().clock
    observer = CounterObserver(Agreement(store).heartbeats.get_heartbeat, clock.now, 10.0)
    Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
    for _ in range(3):
        assert observer.stillness(MEMBER) == 0.0
        clock.advance(1000.0)  # as long as the lease is there, whatever else takes its time
    lapse(store)
    assert observer.stillness(MEMBER) == 5.0
    clock.advance(4.9)
    assert observer.stillness(MEMBER) < 10.0
    clock.advance(0.2)
    assert observer.stillness(MEMBER) >= 10.0


def test_whoever_was_stopped_for_longer_comes_back(etcd: EtcdServer, make: Make) -> None:
    store, other = make(etcd.endpoints), make(etcd.endpoints)
    Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
    first = lapse(other)
    assert Agreement(other).heartbeats.get_heartbeat(MEMBER) == LAPSED
    Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
    assert Agreement(other).heartbeats.get_heartbeat(MEMBER) > 0
    assert len(entries(other)) == 1 and not entries(other).keys() & first.keys()


def test_one_of_two_who_speak_for_the_same(etcd: EtcdServer, make: Make) -> None:
    """A process and the monitor beside it: it is there as long as either says so."""
    store = make(etcd.endpoints)
    monitor, process = (Agreement(store.clone()).heartbeats for _ in range(2))
    monitor.beat_heart(str(MEMBER), 30.0)
    before = revision(store)
    process.beat_heart(str(MEMBER), SHORT)
    monitor.beat_heart(str(MEMBER), 30.0)
    await_lapses(store, before)
    assert Agreement(store).heartbeats.get_heartbeat(MEMBER) > 0


def test_after_a_fork(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
    pid = os.fork()
    if pid == 0:
        try:
            Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
            Agreement(store.clone()).heartbeats.beat_heart(str(MEMBER), 60.0)
            Agreement(store).heartbeats.beat_heart(str(Member(2, 0)), 60.0)
            assert Agreement(store).heartbeats.get_heartbeat(Member(2, 0)) > 0
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(entries(store)) == 1  # they have one lease
    Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
    assert len(entries(store)) == 1 and Agreement(store).heartbeats.get_heartbeat(Member(2, 0)) > 0


# When etcd fails


def test_an_outage_silences_nobody(cluster: EtcdServer, make: Make) -> None:
    """Leases last for their whole time once a leader is elected again; one that lapsed is made again."""
    store = make(cluster.endpoints)
    store.patience = 0.2
    heart, eye = Agreement(store.clone()).heartbeats, store.clone()
    observer = HeartbeatObserver(Agreement(eye).heartbeats, 10.0)
    seen: list[float] = []
    actions = (lambda: heart.beat_heart(str(MEMBER), SHORT), lambda: seen.append(observer.stillness(MEMBER)))

    def live(times: int) -> int:
        """Beats and looks, so many times; gives how often that failed."""
        failures = 0
        for _ in range(times):
            threading.Event().wait(0.05)  # as often as that, not as soon as something has come
            for action in actions:
                try:
                    action()
                except StoreError:
                    failures += 1
        return failures

    live(5)
    leader = cluster.leader()
    cluster.kill(leader)
    cluster.restart(leader)
    live(30)
    for index in range(3):
        cluster.pause(index)
    assert live(12) == 24  # 0.2 s each: longer than the lease
    for index in range(3):
        cluster.resume(index)
    live(60)
    assert max(seen) < 10.0 and seen[-1] == 0.0


def test_lost_answers(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    store, other = make(relay.endpoint), make(etcd.endpoints)
    relay.wait_for("lease/keepalive", 1)
    for path in ("lease/grant", "kv/txn"):
        relay.lose_answer(path)
    store.execute([Heartbeat(KEY, 60.0)])
    relay.lose_answer("lease/keepalive")
    store.execute([Heartbeat(KEY, 60.0)])
    assert read_heartbeat(other, KEY) > 0 and len(entries(other)) == 1


def test_a_lease_that_runs_out_before_it_is_used(etcd: EtcdServer, make: Make) -> None:
    store = make(etcd.endpoints)
    client, grant = store._etcd.client, store._etcd.client.grant

    def grant_too_late(ttl: int, timeout: float | None = None) -> int:
        lease = grant(ttl, timeout)
        client.revoke(lease)
        return lease

    client.grant = grant_too_late  # type: ignore[method-assign]
    with pytest.raises(StoreError, match=r"beat of .*lease not found"):
        store.execute([Heartbeat(KEY, 60.0)])
    client.grant = grant  # type: ignore[method-assign]
    store.execute([Heartbeat(KEY, 60.0)])
    assert read_heartbeat(store, KEY) > 0


# The end of a job


def test_nothing_is_left_of_a_job(relay: Relay, etcd: EtcdServer, make: Make) -> None:
    store, other = make(relay.endpoint), make(etcd.endpoints)
    relay.hold("kv/txn")
    Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
    store.set("k", "1")
    assert other.remove() is True
    everything = Range.prefix(store._etcd.prefix)
    client = other._etcd.client
    assert client.read(everything) == ()
    Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)  # its lease is there still
    relay.release()  # what comes late
    assert client.read(everything) == ()
    for beat in (
        lambda: Agreement(store).heartbeats.beat_heart(str(Member(2, 0))),
        lambda: Agreement(store.clone()).heartbeats.beat_heart(str(MEMBER)),
    ):
        with pytest.raises(StoreError, match="the job's keys are gone"):
            beat()
    with pytest.raises(StoreError, match="the job's keys are gone"):
        Agreement(store).heartbeats.get_heartbeat(MEMBER)
    assert client.read(everything) == ()
    assert other.remove() is False


def test_a_job_below_another_one_stays(etcd: EtcdServer, make: Make, prefix: str) -> None:
    outer, inner = make(etcd.endpoints), make(etcd.endpoints, prefix=f"{prefix}/inner")
    for store in (outer, inner):
        store.set("k", "1")
        Agreement(store).heartbeats.beat_heart(str(MEMBER), 60.0)
    assert outer.remove()
    assert inner.get("k") == b"1" and Agreement(inner).heartbeats.get_heartbeat(MEMBER) > 0
    assert inner.remove()


def test_signs_of_life_of_an_earlier_job_are_none(etcd: EtcdServer, make: Make) -> None:
    """Its members had the same names, and one of its processes may not have noticed that it is over."""
    old = make(etcd.endpoints)
    Agreement(old).heartbeats.beat_heart(str(MEMBER), 60.0)
    erase(old._etcd.client, Range(old._etcd.prefix + b"life"))
    new = make(etcd.endpoints)
    assert entries(new) and Agreement(new).heartbeats.get_heartbeat(MEMBER) == LAPSED
    Agreement(new).heartbeats.beat_heart(str(MEMBER), 60.0)
    assert Agreement(new).heartbeats.get_heartbeat(MEMBER) > 0
