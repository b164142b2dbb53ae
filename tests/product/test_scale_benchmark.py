"""`benchmarks/scale.py` at a tiny size: what it counts, and that its clients do what torch's do."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistStoreError

from ft_wrapper.protocol.operations import read, set_if_absent
from ft_wrapper.store import StoreMixin, TCPStore, TCPStoreServer

pytest.importorskip("greenlet")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def port() -> Iterator[int]:
    server = TCPStoreServer(host_name="127.0.0.1")
    yield server.port
    server.close()


def use(store: StoreMixin) -> list[Any]:
    """Does every operation; returns all results."""
    results: list[Any] = [store.check(["a"]), read(store, "a")]
    store.set("a", "1")
    store.append("log", "x" * 5000)
    store.append("log", "y")
    store.multi_set(["b", "c"], ["2", b"3"])
    results.append({"a", "b", "c", "log"} <= set(store.list_keys()))
    results += [store.check(["a", "b", "c"]), store.get("log"), read(store, "c"), store.add("count", 7)]
    results += [
        store.compare_set("a", "1", "4"),
        store.compare_set("a", "1", "5"),
        set_if_absent(store, "d", "6"),
    ]
    results += [
        set_if_absent(store, "d", "7"),
        store.delete_key("b"),
        store.delete_key("b"),
        store.wait_for("a", 5.0),
    ]
    with pytest.raises(DistStoreError):
        store.wait(["absent"], timedelta(milliseconds=1))
    return [*results, store.wait_for("absent", 0.001) is not None, store.add("count", 1)]


@pytest.mark.parametrize("shared", [False, True])
def test_simulated_clients_do_what_torchs_do(port: int, shared: bool) -> None:
    from scale_wire import Connection, Loop, WireStore

    loop = Loop()
    wire = WireStore(Connection(loop, "127.0.0.1", port, is_shared=shared))
    results: list[Any] = []
    loop.start(lambda: results.extend(use(wire)))
    loop.run()
    loop.close()
    assert wire.looks == 2
    other = TCPStore("127.0.0.1", port)
    for key in ("a", "log", "c", "count", "d"):
        other.delete_key(key)
    assert results == use(other)
    other.close()


def test_ranks_that_share_a_connection_wait_without_blocking_each_other(port: int) -> None:
    from scale_wire import Connection, Loop, WireStore

    loop = Loop()
    connection = Connection(loop, "127.0.0.1", port, is_shared=True)
    order = []

    def task(store: WireStore, i: int) -> Callable[[], None]:
        def run() -> None:
            if i == 2:
                with pytest.raises(DistStoreError):
                    store.wait(["absent"], timedelta(milliseconds=1))
                store.add("count", 1)
                store.set("key", "1")
            store.wait(["key"])
            order.append(store.add("order", 1))

        return run

    stores = [WireStore(connection) for _ in range(3)]
    for i, store in enumerate(stores):
        loop.start(task(store, i))
    loop.run()
    loop.close()
    assert sorted(order) == [1, 2, 3]
    # A wait of no avail takes two: one to cancel it.
    assert [store.operations for store in stores] == [2, 2, 6]


def test_simulated_threads_and_events(port: int) -> None:
    """An event's wait ends by its time, or by what another thread does; both are threads of this process."""
    from scale_wire import Loop, Threading

    loop = Loop()
    threading = Threading(loop)
    first, second = threading.Event(), threading.Event()
    seen = []

    def wait() -> None:
        seen.append(first.wait(0.01))
        second.set()
        seen.append(first.wait())

    def wake() -> None:
        assert second.wait(60.0)
        first.set()

    threading.Thread(target=wake, name="any", daemon=True).start()
    loop.start(wait)
    loop.run()
    loop.close()
    assert seen == [False, True]


def figures(output: str, title: str) -> list[dict[str, str]]:
    """Reads a table: each row's cells by their column."""
    lines = output[output.index(f"\n{title}") :].splitlines()[2:]
    headers = re.split(r"\s{2,}", lines[0].strip())
    rows = [re.split(r"\s{2,}", line) for line in itertools.takewhile(lambda x: x[:1].isdigit(), lines[2:])]
    return [dict(zip(headers, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    value, _, unit = cell.replace(",", "").partition(" ")
    return float(value) * {"": 1, "B": 1, "kB": 1000}[unit]


def run_benchmark(*arguments: str) -> str:
    # In a process of its own: what multiprocessing keeps open would look like a leftover here.
    command = [sys.executable, str(BENCHMARKS / "scale.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly("what it counts with is tested always")
@pytest.mark.parametrize("shared", [False, True])
def test_ranks_ask_what_counting_says_in_every_world(shared: bool) -> None:
    """And their connections are a rank's four, or as many as they share."""
    arguments = ["--ranks", "32", "--shared", "4"] if shared else ["--ranks", "8", "32"]
    output = run_benchmark(
        *arguments, "--interval", "1", "--repeats", "1", "--parts", "form", "exception", "barrier"
    )
    for title in ("The first formation", "One restart after an exception"):
        for row in figures(output, title):
            # Of few ranks most may come before rank 0 has told where it is: they wait, and read again.
            waits = number(row["requests/rank"]) == number(row["expected"]) + 2
            assert waits or row["requests/rank"] == row["expected"], (title, row)
            more = number(row["bytes/rank"]) - number(row["expected bytes"])
            assert abs(more) < (175 if waits else 25), (title, row)
            if not shared:
                assert number(row["connections"]) == 4 * number(row["ranks"])
    # The figure of the documentation: docs/scale.md.
    assert {row["expected"] for row in figures(output, "One restart after")} == {"10"}
    if not shared:
        barrier = [number(row["bytes/rank"]) for row in figures(output, "A barrier of NVRx's shape")]
        # The contrast: each reads the list, of 86 bytes against 16, or half of it if one comes after another.
        assert barrier[1] > barrier[0] + 20


@pytest.mark.alone("it counts what is asked in a second")
def test_quick_run_prints_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "static" / "scale.svg"
    output = run_benchmark("--quick", "--plot", str(picture))
    (lost,) = figures(output, "The loss of a node")
    assert number(lost["requests/rank"]) >= 10
    (beats,) = figures(output, "Heartbeats")
    assert abs(number(beats["requests*"]) / number(beats["expected"]) - 1) < 0.35  # of a few intervals
    assert len(ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}polyline")) == 4


def test_processes_with_few_files_are_all_connected() -> None:
    """`benchmarks/scale_processes.py`, small: 40 ranks' connections where each process may open 64 files."""
    command = [sys.executable, str(BENCHMARKS / "scale_processes.py"), "--processes", "40", "--files", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "40 of 40 processes had their 4 connections" in done.stdout
