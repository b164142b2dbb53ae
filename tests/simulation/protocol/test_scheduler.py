"""The scheduler itself: orders, time, crashes, pauses, and what it says when a run goes wrong."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError

from ft_wrapper.testing import Deadlock, FakeStore, Scheduler, SchedulerError, TooLong, scheduler
from ft_wrapper.testing.fake_store import Waiter

HOUR = timedelta(hours=1)


@pytest.fixture
def made() -> Scheduler:
    return Scheduler()


@pytest.fixture
def store(made: Scheduler) -> FakeStore:
    return FakeStore(made)


def race(seed: int, choices: tuple[int, ...] = ()) -> tuple[Scheduler, str]:
    """Three tasks that append to one log."""
    made = Scheduler(seed, choices)
    store = FakeStore(made)

    def task(client: FakeStore, name: str) -> None:
        for _ in range(3):
            client.append("log", name)

    for name in "abc":
        made.spawn(name, task, store.clone(name), name)
    made.run()
    return made, store.snapshot()["log"].decode()


def test_seeds_are_orders() -> None:
    assert len({race(seed)[1] for seed in range(50)}) > 20
    assert all(sorted(race(seed)[1]) == sorted("abc" * 3) for seed in range(50))


def test_same_seed_or_same_choices_are_the_same_order() -> None:
    made, order = race(7)
    assert race(7)[1] == order
    assert race(8, tuple(made.choices))[1] == order


def test_all_orders_can_be_tried() -> None:
    """Depth first, by choices and options: two tasks with two steps each have six orders."""

    def orders(choices: tuple[int, ...]) -> tuple[Scheduler, str]:
        made = Scheduler(0, choices)
        store = FakeStore(made)

        def task(client: FakeStore, name: str) -> None:
            client.append("log", name)
            client.append("log", name)

        for name in "ab":
            made.spawn(name, task, store.clone(name), name)
        made.run()
        return made, store.snapshot()["log"].decode()

    seen, pending = set(), [()]
    while pending:
        prefix: tuple[int, ...] = pending.pop()
        made, order = orders((*prefix, *[0] * 20))
        seen.add(order)
        for place in range(len(prefix), len(made.options)):
            pending += [(*made.choices[:place], other) for other in range(1, made.options[place])]  # type: ignore[arg-type]
    assert seen == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}


def test_time_jumps_to_the_earliest_deadline(made: Scheduler, store: FakeStore) -> None:
    woken = []

    def wait(client: FakeStore, key: str, seconds: float) -> None:
        assert client.wait_for(key, seconds) is None
        woken.append((key, client.now()))

    for key, seconds in (("late", 50.0), ("soon", 2.5)):
        made.spawn(key, wait, store.clone(key), key, seconds)
    made.run()
    assert woken == [("soon", 2.5), ("late", 50.0)]


def test_a_waiter_is_woken_without_time_passing(made: Scheduler, store: FakeStore) -> None:
    made.spawn("waiter", store.clone("waiter").wait, ["k"], HOUR)
    made.spawn("writer", store.clone("writer").set, "k", "1")
    made.run()
    assert made.now() == 0.0


def test_crash_leaves_no_trace_in_the_store() -> None:
    for step in range(1, 4):
        made = Scheduler()
        store = FakeStore(made)

        def task(client: FakeStore) -> None:
            try:
                for number in range(3):
                    client.set(f"key {number}", "1")
            finally:
                client.set("clean-up", "1")

        victim = made.spawn("victim", task, store.clone("victim"))
        made.crash_at(victim, step)
        made.run()
        assert sorted(store.snapshot()) == [f"key {number}" for number in range(step - 1)]
        assert victim.crashed and victim.done


def test_a_waiting_task_can_be_crashed_by_another(made: Scheduler, store: FakeStore) -> None:

    def wait(client: FakeStore) -> None:
        try:
            client.wait(["never"], HOUR)
        finally:
            client.set("clean-up", "1")

    victim = made.spawn("victim", wait, store.clone("victim"))

    def kill() -> None:
        made.sleep(1.0)
        made.crash(victim)

    made.spawn("killer", kill)
    made.run()
    assert victim.crashed and store.snapshot() == {} and made.now() == 1.0


def test_pause_stops_a_task_while_others_go_on(made: Scheduler, store: FakeStore) -> None:
    order = []

    def task(client: FakeStore) -> None:
        client.add("n", 1)
        order.append((client.client, client.now()))

    zombie = made.spawn("zombie", task, store.clone("zombie"))
    made.spawn("other", task, store.clone("other"))
    made.pause_at(zombie, 1, 30.0)
    made.run()
    assert order == [("other", 0.0), ("zombie", 30.0)]


def test_store_error_at_a_step(made: Scheduler, store: FakeStore) -> None:

    def task(client: FakeStore) -> str:
        client.set("a", "1")
        with pytest.raises(DistStoreError, match="lost"):
            client.set("b", "1")
        return "went on"

    victim = made.spawn("victim", task, store.clone("victim"))
    made.at_step(victim, 2, lambda: store.fail(client="victim", error=DistStoreError("lost")))
    made.run()
    assert victim.result == "went on" and sorted(store.snapshot()) == ["a"]


def test_deadlock_names_who_waits_for_what() -> None:
    made = Scheduler(seed=5)
    made.spawn("a task", made.block, Waiter({"the key"}), math.inf)
    with pytest.raises(Deadlock, match="a task waits for the key") as caught:
        made.run()
    assert "replay: Scheduler(seed=5)" in str(caught.value)


def test_bounds_on_time_and_steps() -> None:
    made = Scheduler(max_time=10.0)
    made.spawn("sleeper", made.sleep, 11.0)
    with pytest.raises(TooLong, match="more than 10 virtual seconds"):
        made.run()
    made = Scheduler(max_steps=20)
    store = FakeStore(made)

    def spin() -> None:
        while True:
            store.add("n", 1)

    made.spawn("spinner", spin)
    with pytest.raises(TooLong, match="more than 20 steps"):
        made.run()


def test_error_of_a_task_tells_who_did_what_and_how_to_replay() -> None:
    made = Scheduler(seed=11)
    store = FakeStore(made)

    def fail() -> None:
        store.set("the key", "1")
        raise ZeroDivisionError("of mine")

    made.spawn("a task", fail)
    with pytest.raises(SchedulerError) as caught:
        made.run()
    text = str(caught.value)
    assert "ZeroDivisionError in 'a task': of mine" in text and "set the key 1" in text
    assert "Scheduler(seed=11)" in text and f"choices={made.choices}" in text
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_checks_run_after_each_step(made: Scheduler, store: FakeStore) -> None:

    def check() -> None:
        if store.snapshot().get("n") == b"3":
            raise ValueError("three")

    made.after_each_step(check)

    def count() -> None:
        for _ in range(10):
            store.add("n", 1)

    made.spawn("counter", count)
    with pytest.raises(SchedulerError, match="three"):
        made.run()
    assert store.snapshot()["n"] == b"3"


def test_daemons_do_not_keep_a_run_alive(made: Scheduler, store: FakeStore) -> None:

    def beat() -> None:
        while True:
            store.add("beats", 1)
            made.sleep(1.0)

    daemon = made.spawn("daemon", beat, daemon=True)
    made.spawn("worker", made.sleep, 5.5)
    made.run()
    assert daemon.crashed and 5 <= int(store.snapshot()["beats"]) <= 6


def test_time_is_not_turned_by_hand() -> None:
    with pytest.raises(RuntimeError, match="sleep"):
        Scheduler().advance(1.0)


def test_without_greenlet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "greenlet", None)
    with pytest.raises(ImportError, match=r"pip install 'ft-wrapper\[testing\]'"):
        Scheduler()
