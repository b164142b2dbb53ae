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

from ft_wrapper.store import StoreMixin, TCPStore, TCPStoreServer

pytest.importorskip("greenlet")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


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
    results: list[Any] = [store.check(["a"]), store.try_get("a")]
    store.set("a", "1")
    store.append("log", "x" * 5000)
    store.append("log", "y")
    store.multi_set(["b", "c"], ["2", b"3"])
    results += [store.check(["a", "b", "c"]), store.get("log"), store.try_get("c"), store.add("count", 7)]
    results += [store.compare_set("a", "1", "4"), store.compare_set("a", "1", "5"), store.claim("d", "6")]
    results += [store.claim("d", "7"), store.delete_key("b"), store.delete_key("b"), store.wait_for("a", 5.0)]
    with pytest.raises(DistStoreError):
        store.wait(["absent"], timedelta(milliseconds=1))
    return [*results, store.wait_for("absent", 0.001), store.add("count", 1)]


def test_simulated_clients_do_what_torchs_do(port: int) -> None:
    from scale_wire import Connection, Loop, WireStore

    loop = Loop()
    wire = WireStore(Connection(loop, "127.0.0.1", port))
    results: list[Any] = []
    loop.start(wire, lambda: results.extend(use(wire)))
    loop.run()
    loop.close()
    assert wire.looks == 2
    other = TCPStore("127.0.0.1", port)
    for key in ("a", "log", "b", "c", "count", "d"):
        other.delete_key(key)
    assert results == use(other)


def test_ranks_that_share_a_connection_wait_without_blocking_each_other(port: int) -> None:
    from scale_wire import Connection, Loop, WireStore

    loop = Loop()
    connection = Connection(loop, "127.0.0.1", port)
    order = []

    def task(store: WireStore, i: int) -> Callable[[], None]:
        def run() -> None:
            if i == 2:
                store.add("count", 1)
                store.set("key", "1")
            store.wait(["key"])
            order.append(store.add("order", 1))

        return run

    stores = [WireStore(connection) for _ in range(3)]
    for i, store in enumerate(stores):
        loop.start(store, task(store, i))
    loop.run()
    loop.close()
    assert sorted(order) == [1, 2, 3]
    assert [store.operations for store in stores] == [2, 2, 4]


def figures(output: str, title: str) -> dict[tuple[str, str], dict[str, str]]:
    """Reads a table: by ranks and connections, the cells by their column."""
    lines = output[output.index(f"\n{title}\n") :].splitlines()[2:]
    headers = re.split(r"\s{2,}", lines[0])
    rows = [re.split(r"\s{2,}", line) for line in itertools.takewhile(lambda x: x[:1].isdigit(), lines[2:])]
    cells = [dict(zip(headers, row, strict=True)) for row in rows]
    return {(row["ranks"], row["connections"]): row for row in cells}


def number(cell: str) -> float:
    value, _, unit = cell.replace(",", "").partition(" ")
    return float(value) * {"": 1, "B": 1, "kB": 1000}[unit]


def test_restart_costs_a_rank_the_same_in_every_world(tmp_path: Path) -> None:
    """And the script prints its tables and draws."""
    picture = tmp_path / "static" / "scale.svg"
    # In a process of its own: what multiprocessing keeps open would look like a leftover here.
    command = [sys.executable, str(BENCHMARKS / "scale.py"), "--sizes", "8", "64", "--shared", "4"]
    command += ["--repeats", "2", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    restart = figures(done.stdout, "One restart, from the fault until every rank knows its place")
    barrier = figures(done.stdout, "A barrier of NVRx's shape, in which each rank reads the whole list")
    assert list(restart) == [("8", "8"), ("8", "4"), ("64", "64"), ("64", "4")]
    # The figure of the documentation: docs/scale.md.
    assert {(row["operations/rank"], row["most of any rank*"]) for row in restart.values()} == {("6", "6")}
    received = [number(row["bytes/rank"]) for row in restart.values()]
    assert max(received) < 1.1 * min(received)
    listed = [number(barrier[ranks, "4"]["bytes/rank"]) for ranks in ("8", "64")]
    assert listed[1] > listed[0] + 100  # everyone reads the whole list: the contrast
    assert len(ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}polyline")) == 4
