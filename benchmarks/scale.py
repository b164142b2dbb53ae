"""What one restart costs the store, from 256 to 16,384 ranks.

    python benchmarks/scale.py                            # two minutes or so
    python benchmarks/scale.py --sizes 256 1024
    python benchmarks/scale.py --plot docs/_static/scale.svg

Simulated ranks run the protocol's own code (`ft_wrapper.store`) against one real TCPStore server in a process
of its own: a fault is published, every rank hears of it, leaves, one decides, and everyone reads the decision
and knows its place. Beside it a barrier of the shape that NVRx's has: every rank enters itself into a list,
then each reads the whole list.

All clients share the machine with the server. So the wall time is at least that of the slower side and says
what this machine does; what a server alone needs is its CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from figures import duration, table
from scale_plot import Line, Panel, draw
from scale_worker import GO, HOST, Costs, raise_file_limit, run_ranks, run_server

from ft_wrapper.attribution import Interruption
from ft_wrapper.store import Decision, Fault, Member, TCPStore, View

SIZES = [256, 1024, 4096, 16384]
SHARED = 512  # connections, where ranks share them
SPARE_FILES = 100  # that a process needs beside its connections


@dataclasses.dataclass(frozen=True)
class Sample:
    """One restart, or one barrier.

    Args:
        wall: seconds until the last rank was through.
        parts: seconds until the last rank was through each part, by name.
        server: CPU seconds of the server.
        clients: CPU seconds of all ranks.
        operations: requests of a rank; the median of those that did not propose.
        most_operations: of any of those.
        sent: bytes to the server, of a rank, likewise.
        received: bytes from the server, of a rank: the mean, since they may differ.
        proposer_operations: of the rank that decided; 0 where nobody does.
        proposer_bytes: both ways.
        looks: how often a rank looked, after a while, whether it has to propose.
    """

    wall: float
    parts: dict[str, float]
    server: float
    clients: float
    operations: float
    most_operations: int
    sent: float
    received: float
    proposer_operations: int
    proposer_bytes: int
    looks: int

    @property
    def bytes(self) -> float:
        """Both ways."""
        return self.sent + self.received


@dataclasses.dataclass
class Result:
    """All samples of one number of ranks and connections."""

    ranks: int
    connections: int
    advances: list[Sample] = dataclasses.field(default_factory=list)
    entries: list[Sample] = dataclasses.field(default_factory=list)
    barriers: list[Sample] = dataclasses.field(default_factory=list)


def middle(samples: list[Sample], figure: Callable[[Sample], float]) -> float:
    """Returns the median of a figure."""
    return statistics.median(figure(sample) for sample in samples)


class Simulation:
    """A server and simulated ranks, in processes of their own.

    Args:
        ranks: how many.
        connections: how many connections they share.
        processes: how many processes the ranks are in.
    """

    def __init__(self, ranks: int, connections: int, processes: int) -> None:
        self.ranks = ranks
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        self._pipes: list[Pipe] = []
        self._server = context.Process(target=run_server, args=(other,), daemon=True)
        self._server.start()
        self._processes = [self._server]
        other.close()
        self._server_pipe = pipe
        port = pipe.recv()
        for i in range(processes):
            pipe, other = context.Pipe()
            slots = range(i * ranks // processes, (i + 1) * ranks // processes)
            share = max(1, connections // processes)
            process = context.Process(target=run_ranks, args=(other, port, slots, ranks, share), daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        self._answers()  # connected
        self._do("join")
        self._do("read_view")
        self._store = TCPStore(HOST, port)
        self._n = 0
        self._barriers = 0

    def advance(self) -> Sample:
        """One restart, up to the moment when every rank knows its place."""
        fault = Fault(Member(0, 0), 0, Interruption.EXCEPTION, "raised ValueError: loss is nan", "host", 1)
        sample = self._sample("advance", lambda: self._store.report_fault(self._n, fault), "placed")
        self._n += 1
        return sample

    def enter(self) -> Sample:
        """The rest of the restart's operations, up to the moment when every rank may call the function."""
        return self._sample("enter", lambda: self._store.set(f"{GO}/{self._n}", "1"), "entered")

    def barrier(self) -> Sample:
        """One barrier in which everyone reads the whole list."""
        self._barriers += 1
        key = f"{GO}/barrier/{self._barriers}"
        return self._sample("barrier", lambda: self._store.set(key, "1"), "placed")

    def close(self) -> None:
        """Ends all processes."""
        for pipe in (*self._pipes, self._server_pipe):
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _do(self, command: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return self._answers()

    def _answers(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise RuntimeError("a process of simulated ranks has failed; see its traceback above") from None

    def _server_time(self) -> float:
        # The clock of another process's CPU time, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime((~self._server.pid << 3) | 2)  # type: ignore[operator]

    def _sample(self, command: str, go: Callable[[], object], end: str) -> Sample:
        self._do(command)  # answered once every rank waits
        self._store.check(["scale/nothing"])  # the server has dealt with what came before
        server, begin = self._server_time(), time.monotonic()
        go()
        costs: list[Costs] = self._answers()
        server = self._server_time() - server
        last = {name: max(getattr(cost.stamps, name) for cost in costs) for name in vars(costs[0].stamps)}
        return _summarize(costs, {name: at - begin for name, at in last.items() if at}, end, server)


def _summarize(costs: list[Costs], parts: dict[str, float], end: str, server: float) -> Sample:
    others: list[tuple[int, int, int]] = []
    proposers: list[tuple[int, int, int]] = []
    for cost in costs:
        for i, counts in enumerate(zip(cost.operations, cost.sent, cost.received, strict=True)):
            (proposers if i in cost.proposers else others).append(counts)
    operations, sent, received = zip(*others, strict=True)
    return Sample(
        wall=parts[end],
        parts=parts,
        server=server,
        clients=sum(cost.cpu for cost in costs),
        operations=statistics.median(operations),
        most_operations=max(operations),
        sent=statistics.median(sent),
        received=statistics.fmean(received),
        proposer_operations=max((p[0] for p in proposers), default=0),
        proposer_bytes=max((p[1] + p[2] for p in proposers), default=0),
        looks=sum(cost.looks for cost in costs),
    )


@contextlib.contextmanager
def simulation(ranks: int, connections: int, processes: int) -> Iterator[Simulation]:
    """A `Simulation` that is ended in the end."""
    running = Simulation(ranks, connections, processes)
    try:
        yield running
    finally:
        running.close()


def own_work(ranks: int) -> float:
    """Seconds for which a rank that read a decision computes its place: this grows with the world."""
    members = tuple(Member(slot, 0) for slot in range(ranks))
    view = View(0, 0, "a", 0, members)
    gone = members[ranks // 2]
    decision = Decision(0, 1, 0, (gone,), (gone.slot,), (), (), (), world_size=ranks)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        following = view.after(decision, "b")
        assert members[-1] in following.members and following.members.index(members[-1]) == ranks - 2
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(arguments: argparse.Namespace, files: int) -> list[Result]:
    """Runs everything, a line for each number of ranks and connections."""
    results = []
    for ranks in sorted(arguments.sizes):
        own = min(ranks, (files - SPARE_FILES) // arguments.processes * arguments.processes)
        for connections in sorted({own, min(arguments.shared, own)}, reverse=True):
            result = Result(ranks, connections)
            with simulation(ranks, connections, arguments.processes) as running:
                for _ in range(arguments.repeats):
                    result.advances.append(running.advance())
                    result.entries.append(running.enter())
                for _ in range(arguments.repeats):
                    result.barriers.append(running.barrier())
            results.append(result)
            shown = ", ".join(duration(sample.wall) for sample in result.advances)
            print(f"{ranks} ranks, {connections} connections: {shown}", flush=True)
    return results


def size(count: float) -> str:
    """Returns a number of bytes for people."""
    return f"{count:,.0f} B" if count < 10_000 else f"{count / 1000:,.0f} kB"


def print_table(results: list[Result], columns: dict[str, Callable[[Result], str]]) -> None:
    """Prints a line for each number of ranks and connections."""
    rows = [
        [f"{result.ranks:,}", f"{result.connections:,}", *(column(result) for column in columns.values())]
        for result in results
    ]
    print(table(["ranks", "connections", *columns], rows))


def costs(samples: Callable[[Result], list[Sample]]) -> dict[str, Callable[[Result], str]]:
    """Columns with what something costs."""
    return {
        "wall": lambda r: duration(middle(samples(r), lambda s: s.wall)),
        "server CPU": lambda r: duration(middle(samples(r), lambda s: s.server)),
        "clients' CPU": lambda r: duration(middle(samples(r), lambda s: s.clients)),
        "operations/rank": lambda r: f"{middle(samples(r), lambda s: s.operations):.0f}",
        "bytes/rank": lambda r: size(middle(samples(r), lambda s: s.bytes)),
    }


def print_tables(results: list[Result]) -> None:
    """Prints what was measured."""

    def until(part: str) -> Callable[[Result], str]:
        return lambda r: duration(middle(r.advances, lambda s: s.parts[part]))

    print("\nWhere the time of a restart goes: since the fault, until the last rank is through")
    print_table(
        results,
        {
            "told of the end": until("woken"),
            "arrived": until("proposing"),
            "decided": until("decided"),
            "know their place": until("placed"),
            "a rank's own part*": lambda r: duration(own_work(r.ranks)),
            "looks**": lambda r: f"{middle(r.advances, lambda s: s.looks):.0f}",
        },
    )
    print(" * what each rank computes for itself, in parallel with all others; here once in each process")
    print("** waits that timed out before the decision; ranks that share a connection have no timeouts")

    print("\nAfter that, until all may call the function: rank assignments checked, endpoint read")
    print_table(results, costs(lambda r: r.entries))

    print("\nA barrier of NVRx's shape, in which each rank reads the whole list")
    ratio = {
        "times the restart's bytes": lambda r: (
            f"{middle(r.barriers, lambda s: s.bytes) / middle(r.advances, lambda s: s.bytes):.1f} x"
        )
    }
    print_table(results, costs(lambda r: r.barriers) | ratio)

    print("\nOne restart, from the fault until every rank knows its place")
    more = {
        "most of any rank*": lambda r: f"{max(s.most_operations for s in r.advances)}",
        "the proposer's": lambda r: f"{middle(r.advances, lambda s: s.proposer_operations):.0f}",
        "its bytes": lambda r: size(middle(r.advances, lambda s: s.proposer_bytes)),
    }
    print_table(results, costs(lambda r: r.advances) | more)
    print(" * operations of any rank but the proposer, in any of the restarts")


def plot(results: list[Result], path: Path) -> None:
    """Draws cost against world size."""
    ours, lists = "ft_wrapper: a restart", "NVRx's shape: a barrier"
    most: dict[int, Result] = {}
    for result in results:
        if result.ranks not in most or most[result.ranks].connections < result.connections:
            most[result.ranks] = result

    def line(name: str, figure: Callable[[Result], float]) -> Line:
        return Line(name, [(ranks, figure(result)) for ranks, result in sorted(most.items())])

    panels = [
        Panel(
            "bytes per rank",
            [
                line(ours, lambda r: middle(r.advances, lambda s: s.bytes)),
                line(lists, lambda r: middle(r.barriers, lambda s: s.bytes)),
            ],
        ),
        Panel(
            "server CPU seconds",
            [
                line(ours, lambda r: middle(r.advances, lambda s: s.server)),
                line(lists, lambda r: middle(r.barriers, lambda s: s.server)),
            ],
        ),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(panels, "ranks"))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="numbers of ranks")
    parser.add_argument(
        "--shared",
        type=int,
        default=SHARED,
        metavar="N",
        help="measure also with that many connections, shared by the ranks (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="restarts (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="that the ranks are in (default: %(default)s)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw an SVG picture, too")
    arguments = parser.parse_args()
    if min(arguments.sizes) < max(2, arguments.processes):
        parser.error(f"--sizes {min(arguments.sizes)}: at least two ranks, and one in each process")
    if arguments.processes < 1 or arguments.repeats < 1 or arguments.shared < arguments.processes:
        parser.error("--processes and --repeats must be at least 1, --shared at least --processes")
    files = raise_file_limit()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {files} open files a "
        f"process; ranks in {arguments.processes} processes, medians of {arguments.repeats}"
    )
    begin = time.monotonic()
    results = measure(arguments, files)
    if arguments.plot:
        plot(results, arguments.plot)
    print_tables(results)
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
