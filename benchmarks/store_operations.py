"""What the operations of the stores cost, and how soon a write wakes those who wait for it.

    python benchmarks/store_operations.py            # five minutes on two cores
    python benchmarks/store_operations.py --quick    # fewer and shorter runs, under a minute

`EtcdStore` on a cluster of three, ft_wrapper's `TCPStore` and torch's own one, the last two on one server,
in turn on the same machine: operations per second of one client and of eight processes; the time from just
before a `set` to a blocked `wait` being back; and what waiting itself costs etcd, by etcd's own count.
Figures are medians; rates are of this machine, the ratios are what to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed
from figures import duration, ratio, table

from ft_wrapper.protocol import keys
from ft_wrapper.protocol.operations import Append, Count, Heartbeat, read_heartbeat
from ft_wrapper.store import EtcdStore, TCPStore, TCPStoreServer
from ft_wrapper.testing import EtcdServer

ETCD, TCP, TORCH = "EtcdStore", "TCPStore", "torch's TCPStore"
NAMES = (ETCD, TCP, TORCH)
CLIENTS = 8
TIMEOUT = timedelta(seconds=120)
LISTED = 100  # keys in the store while they are listed
DELETED = 300  # keys that there are for a run of deletions
VALUE = "x" * 32
BUDGET = 0.02  # seconds from a `set` to a blocked `wait` being back
CASES = {
    "1, a key to wake somebody": (1, f"{keys.WAKE}waited"),
    "100, each its own": (100, f"{keys.WAKE}waited/{{}}"),
    "1, another key": (1, "waited"),
    "100, all the same other key": (100, "waited"),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is measured.

    Args:
        name: in the table.
        do: it, with the store, a key of the client's own, one that all clients share, and a number.
        prepare: what has to be there before, with the store and the client's own key.
        most: how often it can be done after that.
        only: the stores that have it; all when empty.
    """

    name: str
    do: Callable[[Any, str, str, int], object]
    prepare: Callable[[Any, str], object] = lambda store, own: None
    most: int = sys.maxsize
    only: tuple[str, ...] = ()


def _ten(own: str) -> list[str]:
    return [f"{own}/{number}" for number in range(10)]


def _set(store: Any, own: str) -> None:
    store.set(own, VALUE)


def _append(store: Any, own: str, shared: str, number: int) -> None:
    if hasattr(store, "execute"):
        store.execute([Append(shared, "entry")])
    else:
        store.append(shared, "entry")


def _count(store: Any, own: str, shared: str, number: int) -> None:
    if hasattr(store, "execute"):
        store.execute([Count(shared)])
    else:
        store.add(shared, 1)


# Those that list come first: there is nothing else in the store then.
OPERATIONS = (
    Operation("num_keys of 100", lambda store, own, shared, number: store.num_keys()),
    Operation("list_keys of 100", lambda store, own, shared, number: store.list_keys()),
    Operation("set", lambda store, own, shared, number: store.set(own, VALUE)),
    Operation("get", lambda store, own, shared, number: store.get(own), _set),
    Operation("add", lambda store, own, shared, number: store.add(own, 1)),
    Operation("add, one for all", lambda store, own, shared, number: store.add(shared, 1)),
    Operation("log_append, one for all", _append),
    Operation("count, one for all", _count),
    Operation(
        "compare_set",
        lambda store, own, shared, number: store.compare_set(own, str(number), str(number + 1)),
        lambda store, own: store.set(own, "0"),
    ),
    Operation("check", lambda store, own, shared, number: store.check([own]), _set),
    Operation("wait, it is there", lambda store, own, shared, number: store.wait([own]), _set),
    Operation(
        "delete_key",
        lambda store, own, shared, number: store.delete_key(f"{own}/{number}"),
        lambda store, own: store.multi_set(
            [f"{own}/{number}" for number in range(DELETED)], [VALUE] * DELETED
        ),
        most=DELETED,
    ),
    Operation(
        "multi_get of 10",
        lambda store, own, shared, number: store.multi_get(_ten(own)),
        lambda store, own: store.multi_set(_ten(own), [VALUE] * 10),
    ),
    Operation("multi_set of 10", lambda store, own, shared, number: store.multi_set(_ten(own), [VALUE] * 10)),
    Operation(
        "beat", lambda store, own, shared, number: store.execute([Heartbeat(own, 15.0)]), only=(ETCD, TCP)
    ),
    Operation(
        "beats",
        lambda store, own, shared, number: read_heartbeat(store, own),
        lambda store, own: store.execute([Heartbeat(own, 60.0)]),
        only=(ETCD, TCP),
    ),
)


# In the clients' processes ------------------------------------------------------------------------------


class Client:
    """What a client's process does when it is told to.

    Args:
        number: of the client.
        together: where the clients that take part wait for each other, by how many they are.
    """

    def __init__(self, number: int, together: dict[int, Any]) -> None:
        self._number = number
        self._together = together
        self._stores: dict[str, Any] = {}

    def open(self, endpoints: str, port: int) -> None:
        """Makes the stores."""
        self._stores = {
            ETCD: EtcdStore(endpoints, "benchmark", timeout=TIMEOUT),
            TCP: TCPStore("127.0.0.1", port, timeout=TIMEOUT),
            TORCH: torch.distributed.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT
            ),
        }

    def measure(self, name: str, index: int, clients: int, run: str, seconds: float) -> Measured:
        """Does an operation again and again."""
        store, operation = self._stores[name], OPERATIONS[index]
        own, shared, done = f"{run}/{self._number}", run, 0
        operation.prepare(store, own)
        operation.do(store, own, shared, done)  # connections and watches
        done += 1
        self._together[clients].wait(TIMEOUT.total_seconds())
        begin = time.monotonic()
        while done < operation.most and time.monotonic() < begin + seconds:
            operation.do(store, own, shared, done)
            done += 1
        return Measured(done - 1, begin, time.monotonic())

    def write(self, name: str, key: str, after: float) -> float:
        """Sets a key after a while; returns when, just before."""
        time.sleep(after)
        begin = time.monotonic()
        self._stores[name].set(key, VALUE)
        return begin

    def wait(self, name: str, key: str) -> float:
        """Waits for a key; returns when it was back."""
        store = self._stores[name]
        if key.startswith(keys.WAKE):
            store.wait_for(key, TIMEOUT.total_seconds())
        else:
            store.wait([key], TIMEOUT)
        return time.monotonic()

    def wait_in_threads(self, threads: int, key: str, seconds: float) -> None:
        """Waits in many threads for keys that are never written."""
        clients = [self._stores[ETCD].clone() for _ in range(threads)]
        waiting = [
            threading.Thread(target=client.wait_for, args=(key.format(number), seconds))
            for number, client in enumerate(clients)
        ]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()

    def close(self) -> None:
        """Lets go of the stores."""
        for store in self._stores.values():
            if hasattr(store, "close"):
                store.close()
        self._stores = {}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one client did: how many operations, and from when to when."""

    number: int
    begin: float
    end: float


def serve(number: int, together: dict[int, Any], orders: Connection) -> None:
    """Does what is told until there is no more of it."""
    client = Client(number, together)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            what, arguments = orders.recv()
            try:
                orders.send(getattr(client, what)(*arguments))
            except Exception as error:
                orders.send(RuntimeError(f"client {number}: {what}{arguments}: {error!r}"))


# In this process ----------------------------------------------------------------------------------------


class Clients:
    """The clients' processes. Made before anything that has threads, since they are forked."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        together = {number: context.Barrier(number) for number in (1, CLIENTS)}
        self._orders: list[Connection] = []
        self._processes = []
        for number in range(CLIENTS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(number, together, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)

    def tell(self, number: int, what: str, *arguments: object) -> None:
        """Tells one to do something."""
        self._orders[number].send((what, arguments))

    def answer(self, number: int) -> Any:
        """Waits for what it says to that."""
        result = self._orders[number].recv()
        if isinstance(result, Exception):
            raise result
        return result

    def all(self, clients: int, what: str, *arguments: object) -> list[Any]:
        """Tells some to do something at the same time; returns what they say."""
        for number in range(clients):
            self.tell(number, what, *arguments)
        return [self.answer(number) for number in range(clients)]

    def end(self) -> None:
        """Ends all of them."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def rates(clients: Clients, repeats: int, seconds: float) -> dict[tuple[str, str, int], float | None]:
    """Returns operations per second: by operation, store and number of clients."""
    found: dict[tuple[str, str, int], float | None] = {}
    for index, operation in enumerate(OPERATIONS):
        for number in (1, CLIENTS):
            seen: dict[str, list[float]] = defaultdict(list)
            for repeat in range(repeats):
                for name in operation.only or NAMES:
                    run = f"run/{index}/{number}/{repeat}/{name}"
                    with_keys = clients.all(number, "measure", name, index, number, run, seconds)
                    lasted = max(one.end for one in with_keys) - min(one.begin for one in with_keys)
                    seen[name].append(sum(one.number for one in with_keys) / lasted)
            for name in NAMES:
                found[operation.name, name, number] = statistics.median(seen[name]) if seen[name] else None
        shown = ", ".join(f"{name} {_rate(found[operation.name, name, 1])}" for name in NAMES)
        print(f"{operation.name}: {shown}", flush=True)
    return found


def wakes(clients: Clients, number: int) -> dict[str, list[float]]:
    """Returns the seconds from just before a `set` to a `wait` being back, by what was waited for."""
    found: dict[str, list[float]] = defaultdict(list)
    pauses = random.Random(0)
    for round_ in range(number):
        for label, name, key in (
            (f"{ETCD}, a key to wake somebody", ETCD, f"{keys.WAKE}{round_}"),
            (f"{ETCD}, another key", ETCD, f"woken/{round_}"),
            (TCP, TCP, f"woken/{round_}"),
            (TORCH, TORCH, f"woken/torch/{round_}"),
        ):
            clients.tell(1, "wait", name, key)
            clients.tell(0, "write", name, key, pauses.uniform(0.05, 0.1))  # it is blocked by then
            written, back = clients.answer(0), clients.answer(1)
            found[label].append(back - written)
    return found


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What etcd's members count, together, of what their clients do.

    Args:
        requests: that have begun.
        bytes: received and sent.
    """

    requests: int
    bytes: int

    @classmethod
    def of(cls, endpoints: str) -> Traffic:
        """Reads it."""
        requests = bytes_ = 0.0
        for endpoint in endpoints.split(","):
            with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            values = [line.rpartition(" ") for line in lines if not line.startswith("#")]
            requests += sum(float(v) for name, _, v in values if name.startswith("grpc_server_started_total"))
            bytes_ += sum(
                float(v)
                for name, _, v in values
                if name.startswith("etcd_network_client_grpc_") and name.endswith("_bytes_total")
            )
        return cls(int(requests), int(bytes_))


def traffic(clients: Clients, endpoints: str, cases: Sequence[str], seconds: float) -> dict[str, Traffic]:
    """Returns what blocked waits cause in a while, once they have begun."""
    found = {}
    for case in cases:
        threads, key = CASES[case]
        begins = 2.0
        clients.tell(0, "wait_in_threads", threads, key, begins + seconds + 1.0)
        time.sleep(begins)
        before = Traffic.of(endpoints)
        time.sleep(seconds)
        after = Traffic.of(endpoints)
        clients.answer(0)
        found[case] = Traffic(after.requests - before.requests, after.bytes - before.bytes)
        print(f"waiting: {case}: {found[case]}", flush=True)
    return found


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.0f}/s"


def _inverse(per_second: float | None) -> float | None:
    return None if per_second is None else 1 / per_second


def rates_table(found: dict[tuple[str, str, int], float | None], clients: int) -> str:
    """Returns the operations per second of so many clients."""
    rows = []
    for operation in OPERATIONS:
        of = {name: found[operation.name, name, clients] for name in NAMES}
        ratios = [ratio(_inverse(of[ETCD]), _inverse(of[name])) for name in (TCP, TORCH)]
        rows.append([operation.name, *(_rate(of[name]) for name in NAMES), *ratios])
    title = "1 client" if clients == 1 else f"{clients} clients, together"
    return table([title, *NAMES, "etcd / ours", "etcd / torch's"], rows)


def wakes_table(found: dict[str, list[float]]) -> str:
    """Returns how soon waits are back."""
    rows = []
    for label, times in found.items():
        median, late = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        rows.append([label, duration(median), duration(late), "yes" if late <= BUDGET else "no"])
    return table(["from set to wait being back", "median", "95 %", f"within {duration(BUDGET)}"], rows)


def traffic_table(found: dict[str, Traffic], seconds: float) -> str:
    """Returns what waiting costs."""
    rows = [[case, f"{one.requests:,}", f"{one.bytes:,}"] for case, one in found.items()]
    return table([f"threads waiting for {seconds:g} s on etcd", "requests", "bytes"], rows)


@contextlib.contextmanager
def stores(clients: Clients) -> Iterator[str]:
    """Servers, and clients of them; yields etcd's endpoints."""
    with EtcdServer(members=3, quick_election=False) as etcd:
        server = TCPStoreServer(0)
        try:
            # One after the other: the first begins the job.
            for number in range(CLIENTS):
                clients.tell(number, "open", etcd.endpoints, server.port)
                clients.answer(number)
            listed = [f"listed/{number}" for number in range(LISTED)]
            with contextlib.closing(EtcdStore(etcd.endpoints, "benchmark")) as store:
                store.multi_set(listed, [VALUE] * LISTED)
            TCPStore("127.0.0.1", server.port).multi_set(listed, [VALUE] * LISTED)
            yield etcd.endpoints
            clients.all(CLIENTS, "close")
        finally:
            server.close()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs, under a minute")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each kind (default: 5)")
    arguments = parser.parse_args()
    quick = arguments.quick
    repeats, seconds, woken, waited = (2, 0.05, 20, 10.5) if quick else (arguments.repeats, 0.3, 100, 30.0)
    begin = time.monotonic()
    clients = Clients()
    try:
        with stores(clients) as endpoints:
            waiting = traffic(clients, endpoints, list(CASES)[: 2 if quick else None], waited)
            found = rates(clients, repeats, seconds)
            soon = wakes(clients, woken)
    finally:
        clients.end()
    for shown in (
        rates_table(found, 1),
        rates_table(found, CLIENTS),
        wakes_table(soon),
        traffic_table(waiting, waited),
    ):
        print(f"\n{shown}")
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
