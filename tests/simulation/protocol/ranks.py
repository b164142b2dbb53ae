"""Runs functions of several ranks on one store: simulated processes, or real threads on a real store."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import FakeStore, Scheduler

Tasks = Mapping[str, Callable[[StoreMixin], Any]]


class Simulated:
    """Runs functions as simulated processes on one store, in virtual time.

    Args:
        seed: of the order in which they take their steps, and of the store's oddities.
    """

    short = brief = timedelta(seconds=10)

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, tasks: Tasks) -> dict[str, Any]:
        """Runs them all; returns what each returned."""
        scheduler = Scheduler(self._seed)
        store = FakeStore(scheduler, use_libuv=bool(self._seed % 2))
        made = {name: scheduler.spawn(name, task, store.clone(name)) for name, task in tasks.items()}
        scheduler.run()
        return {name: task.result for name, task in made.items()}


class Threads:
    """Runs functions in threads on one real store.

    Args:
        connect: makes a client.

    Attributes:
        short: in which all threads take some steps, however busy the machine is.
        brief: for a wait in vain of one thread, of which nothing depends on others.
    """

    short, brief = timedelta(seconds=3), timedelta(seconds=0.2)

    def __init__(self, connect: Callable[[], StoreMixin]) -> None:
        self._connect = connect

    def __call__(self, tasks: Tasks) -> dict[str, Any]:
        """Runs them all, each with a client of its own; returns what each returned."""
        clients = {name: self._connect() for name in tasks}
        start = threading.Barrier(len(tasks))

        def run(name: str) -> Any:
            start.wait(60.0)
            return tasks[name](clients[name])

        with ThreadPoolExecutor(len(tasks)) as pool:
            running = {name: pool.submit(run, name) for name in tasks}
            return {name: future.result(60.0) for name, future in running.items()}


def in_many_orders(name: str, make: Callable[[int], Any], seeds: Iterable[int]) -> Callable[[Any], Any]:
    """Runs a test in one order for each seed.

    Args:
        name: the test's argument that gets what is made.
        make: makes it of a seed.
        seeds: which.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**others: Any) -> None:
            for seed in seeds:
                test(**{name: make(seed)}, **others)

        signature = inspect.signature(test)
        others = [each for each in signature.parameters.values() if each.name != name]
        functools.update_wrapper(run, test)
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
