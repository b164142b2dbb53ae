"""What a large job costs its store: heartbeats, the first formation, and restarts of three kinds.

    python benchmarks/scale.py           # 4,096 ranks with all connections, 16,384 on shared ones
    python benchmarks/scale.py --quick   # a few ranks, seconds
    python benchmarks/scale.py --ranks 1024 --shared 64 --parts form train
    python benchmarks/scale.py --plot docs/_static/scale.svg

Simulated ranks run the code of real ones, `ft_wrapper.protocol` and `ft_wrapper.store`, on a client that
speaks the store's language, against one real TCPStore server in a process of its own. Each has a rank's
clients: its own, its monitor thread's, its monitor's, its heart's; each with a connection of its own, or all
on as many as ``--shared`` says where the limit of open files leaves no other way. Nothing is known here of
what they ask: it is counted on the way. Beside it stands what it should be (`scale_expected`).

All clients share the machine with the server. So the wall time is at least that of the slower side and says
what this machine does; what a server alone needs is its CPU time. To measure an earlier version, run this
script of today with that version's package on PYTHONPATH.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the server's words about clients that are gone

import torch
from figures import duration, table
from scale_expected import Expected, expected_form, expected_heartbeats, expected_restart
from scale_plot import Line, Panel, draw
from scale_worker import GO, HOST, Costs, Plan, raise_file_limit, run_connections, run_ranks, run_server

from ft_wrapper.attribution import Interruption
from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.records import Fault, Member
from ft_wrapper.store import TCPStore

PARTS = ("form", "train", "exception", "node", "rack", "barrier", "memory")
NODE, RACK = 8, 256
SHARED = 512  # connections, where ranks share them
SPARE_FILES = 100  # that a process needs beside its connections
CONNECTIONS = 4  # of a rank
BEAT_COST = 0.0005  # upper bound: client CPU seconds for one rank's requests in an interval


@dataclasses.dataclass(frozen=True)
class Sample:
    """One part, done once.

    Args:
        wall: seconds until the last rank was through.
        parts: seconds until the last rank was through each step, by name.
        server: CPU seconds of the server.
        clients: CPU seconds of all ranks.
        operations: requests of a rank, of its process: the median.
        most_operations: of any rank.
        sent: bytes to the server, of a rank, likewise the median.
        received: bytes from the server, likewise.
        most_bytes: both ways, of any rank: of the one that decides.
        looks: waits of a rank that timed out: the median.
        beats: requests of all monitors.
        beat_bytes: bytes of these.
        connections: that all ranks have.
        members: ranks that are there.
    """

    wall: float
    parts: dict[str, float]
    server: float
    clients: float
    operations: float
    most_operations: int
    sent: float
    received: float
    most_bytes: int
    looks: float
    beats: int
    beat_bytes: int
    connections: int
    members: int

    @property
    def bytes(self) -> float:
        """Both ways."""
        return self.sent + self.received


@dataclasses.dataclass
class Result:
    """All samples of one number of ranks and connections.

    Args:
        plan: what was simulated.
        shares: whether its ranks share connections.
        samples: by part.
    """

    plan: Plan
    shares: bool
    samples: dict[str, list[Sample]] = dataclasses.field(default_factory=dict)


def middle(samples: list[Sample], figure: Callable[[Sample], float]) -> float:
    """Returns the median of a figure."""
    return statistics.median(figure(sample) for sample in samples)


class Process:
    """A process of the simulation, and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=target, args=(other, *arguments), daemon=True)
        self._process.start()
        other.close()

    def tell(self, *what: object) -> None:
        """Tells it to do something."""
        self._pipe.send(what)

    def answer(self) -> Any:
        """Waits for what it says."""
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("a process of the simulation has failed; see its traceback above") from None

    @property
    def cpu(self) -> float:
        """Its CPU seconds."""
        # The clock of another process's CPU time, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime((~self._process.pid << 3) | 2)  # type: ignore[operator]

    @property
    def memory(self) -> int:
        """Bytes that it has in memory."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """Ends it."""
        self._pipe.close()
        self._process.join(10.0)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


class Simulation:
    """A server and simulated ranks, in processes of their own.

    Args:
        plan: what is simulated.
        processes: how many processes the ranks are in.
    """

    def __init__(self, plan: Plan, processes: int) -> None:
        self._plan = plan
        with contextlib.ExitStack() as owned:
            self._server = Process(run_server)
            owned.callback(self._server.close)
            port = self._server.answer()
            self._processes: list[Process] = []
            for i in range(processes):
                slots = range(i * plan.ranks // processes, (i + 1) * plan.ranks // processes)
                process = Process(run_ranks, plan, port, slots)
                owned.callback(process.close)
                self._processes.append(process)
            for process in self._processes:
                process.answer()
            self._store = TCPStore(HOST, port)
            owned.callback(self._store.close)
            self._owned = owned.pop_all()
        self._next = 0
        self._barriers = 0

    def form(self) -> Sample:
        """The first formation, up to the moment when every rank may call the function."""
        return self._sample("form", range(0), "entered", lambda: self._store.set(f"{GO}/form", "1"))

    def train(self, seconds: float) -> Sample:
        """Nothing but heartbeats."""
        return self._sample("train", seconds, "", None)

    def exception(self) -> Sample:
        """One restart after an exception on rank 0, until every rank may call the function."""
        n = self._iteration()
        fault = Fault(Member(0, 0), 0, Interruption.EXCEPTION, "raised ValueError: loss is nan", "host", 1)
        return self._sample(
            "restart", range(0), "entered", lambda: Agreement(self._store).ends.report_fault(n, fault)
        )

    def lose(self, number: int) -> Sample:
        """The restart after the loss of some ranks in a row, with their hosts."""
        first = self._plan.ranks // 4 + self._next
        self._next += number
        return self._sample("restart", range(first, first + number), "entered", None)

    def barrier(self) -> Sample:
        """One barrier in which everyone reads the whole list."""
        self._barriers += 1
        key = f"{GO}/barrier/{self._barriers}"
        return self._sample("barrier", range(0), "placed", lambda: self._store.set(key, "1"))

    def close(self) -> None:
        """Ends all processes."""
        self._owned.close()

    def _iteration(self) -> int:
        head = Agreement(self._store).iterations.read_head()
        assert head is not None
        return head.n

    def _sample(self, command: str, argument: object, end: str, go: Callable[[], object] | None) -> Sample:
        server, begin = self._server.cpu, time.monotonic()
        for process in self._processes:
            process.tell(command, argument)
        for process in self._processes:
            process.answer()  # every rank waits
        if go is not None:
            self._store.check(["scale/nothing"])  # the server has dealt with what came before
            server, begin = self._server.cpu, time.monotonic()
            go()
        costs: list[Costs] = [process.answer() for process in self._processes]
        wall = time.monotonic() - begin
        server = self._server.cpu - server
        last = {name: max(getattr(cost.stamps, name) for cost in costs) for name in vars(costs[0].stamps)}
        return _summarize(costs, {name: at - begin for name, at in last.items() if at}, wall, end, server)


def _summarize(costs: list[Costs], parts: dict[str, float], wall: float, end: str, server: float) -> Sample:
    operations = [count for cost in costs for count in cost.operations]
    sent = [count for cost in costs for count in cost.sent]
    received = [count for cost in costs for count in cost.received]
    return Sample(
        wall=parts.get(end, wall),
        parts=parts,
        server=server,
        clients=sum(cost.cpu for cost in costs),
        operations=statistics.median(operations),
        most_operations=max(operations),
        sent=statistics.median(sent),
        received=statistics.median(received),
        most_bytes=max(map(sum, zip(sent, received, strict=True))),
        looks=statistics.median(count for cost in costs for count in cost.looks),
        beats=sum(cost.beats for cost in costs),
        beat_bytes=sum(cost.beat_bytes for cost in costs),
        connections=sum(cost.connections for cost in costs),
        members=len(operations),
    )


@contextlib.contextmanager
def simulation(plan: Plan, processes: int) -> Iterator[Simulation]:
    """A `Simulation` that is ended in the end."""
    running = Simulation(plan, processes)
    try:
        yield running
    finally:
        running.close()


def measure(result: Result, arguments: argparse.Namespace) -> None:
    """Runs all parts for one number of ranks and connections."""
    plan, parts = result.plan, arguments.parts

    def note(part: str, sample: Sample) -> None:
        result.samples.setdefault(part, []).append(sample)
        shown = f"{duration(sample.wall)}, server {duration(sample.server)}, {sample.bytes:,.0f} B a rank"
        print(f"{plan.ranks} ranks, {sample.connections} connections: {part}: {shown}", flush=True)

    with simulation(plan, arguments.processes) as running:
        note("form", running.form())
        if "train" in parts:
            running.train(plan.interval)  # the first beats come early, and rank 0's heart tidies up
            note("train", running.train(arguments.intervals * plan.interval))
        for _ in range(arguments.repeats if "exception" in parts else 0):
            note("exception", running.exception())
        for _ in range(arguments.repeats if "barrier" in parts else 0):
            note("barrier", running.barrier())
        for part, number in (("node", NODE), ("rack", RACK)):
            if part in parts and plan.ranks >= 4 * number:
                note(part, running.lose(number))


def measure_memory(connections: int) -> float:
    """Bytes that a server has more for each connection."""
    server = Process(run_server)
    try:
        port = server.answer()
        first = Process(run_connections, port, 16)  # what is there for any number of them
        try:
            first.answer()
            before = server.memory
            clients = Process(run_connections, port, connections)
            try:
                clients.answer()
                return (server.memory - before) / connections
            finally:
                clients.close()
        finally:
            first.close()
    finally:
        server.close()


def size(count: float) -> str:
    """Returns a number of bytes for people."""
    for unit, over in (("B", 1e4), ("kB", 1e7), ("MB", 1e10)):
        if count < over:
            return f"{count / over * 1e4:,.0f} {unit}"
    return f"{count / 1e9:,.0f} GB"


def _row_of(result: Result) -> list[str]:
    some = next(iter(result.samples.values()))[0]
    kind = "shared" if result.shares else "each its own"
    return [f"{result.plan.ranks:,}", f"{some.connections:,}", kind]


def print_part(results: list[Result], part: str, expected: Callable[[Plan, float], Expected]) -> None:
    """Prints a line for each number of ranks and connections, with what was to be expected."""
    rows = []
    for result in results:
        samples = result.samples.get(part)
        if not samples:
            continue
        due = expected(result.plan, middle(samples, lambda s: s.looks))
        rows.append(
            [
                *_row_of(result),
                duration(middle(samples, lambda s: s.wall)),
                duration(middle(samples, lambda s: s.server)),
                duration(middle(samples, lambda s: s.clients)),
                f"{middle(samples, lambda s: s.operations):.0f}",
                f"{due.operations:.0f}",
                size(middle(samples, lambda s: s.bytes)),
                size(due.bytes),
                size(max(s.most_bytes for s in samples)),
                f"{middle(samples, lambda s: s.looks):.0f}",
            ]
        )
    headers = ["ranks", "connections", "kind", "time", "server's CPU", "clients' CPU", "requests/rank"]
    headers += ["expected", "bytes/rank", "expected bytes", "most of any rank", "looks"]
    if rows:
        print(table(headers, rows))


def print_steps(results: list[Result]) -> None:
    """Prints where the time of the restarts goes."""
    rows = []
    for result in results:
        for part in ("exception", "node", "rack"):
            if samples := result.samples.get(part):
                steps = [
                    duration(middle(samples, lambda s, step=step: s.parts.get(step, 0.0)))
                    for step in ("woken", "placed", "entered")
                ]
                rows.append([*_row_of(result), part, *steps, duration(result.plan.timeout)])
    if rows:
        print("\nUntil the last rank was through each step of a restart, from the exception or the loss on")
        headers = ["told of the end", "know their place", "may call the function", "heartbeat_timeout"]
        print(table(["ranks", "connections", "kind", "after", *headers], rows))


def print_heartbeats(results: list[Result]) -> None:
    """Prints what heartbeats cost, where each rank's heart beats once a second."""
    rows = []
    for result in results:
        for sample in result.samples.get("train", []):
            plan = result.plan
            beats = plan.ranks * sample.wall / plan.interval  # what a second of the real thing has, so often
            due = expected_heartbeats(plan)
            rows.append(
                [
                    *_row_of(result),
                    f"{plan.interval:g} s",
                    f"{sample.beats / beats:.2f}",
                    f"{due.operations:.2f}",
                    size(sample.beat_bytes / beats),
                    size(due.bytes),
                    f"{sample.server / sample.wall:.2f}",
                    f"{sample.server / sample.wall * plan.interval:.2f}",
                ]
            )
    if rows:
        headers = ["measured at", "requests*", "expected", "bytes*", "expected bytes", "server's CPU/s then"]
        print("\nHeartbeats")
        print(table(["ranks", "connections", "kind", *headers, "at one a second**"], rows))
        print(" * of a rank in an interval")
        print("** processor seconds of the server per second: what was measured, times the interval")


def print_tables(results: list[Result]) -> None:
    """Prints what was measured."""
    titles = {
        "form": "The first formation, from nothing until every rank may call the function",
        "exception": "One restart after an exception, until every rank may call the function",
        "node": f"The loss of a node of {NODE} ranks, until every other rank may call the function",
        "rack": f"The loss of a rack of {RACK} ranks, likewise",
    }
    lost = {"exception": 0, "node": NODE, "rack": RACK}
    for part, title in titles.items():
        if any(part in result.samples for result in results):
            print(f"\n{title}")
            print_part(
                results,
                part,
                lambda plan, looks, part=part: (
                    expected_form(plan) if part == "form" else expected_restart(plan, lost[part], looks)
                ),
            )
    print_steps(results)
    print_heartbeats(results)
    rows = [
        [
            *_row_of(result),
            duration(middle(samples, lambda s: s.wall)),
            duration(middle(samples, lambda s: s.server)),
            size(middle(samples, lambda s: s.bytes)),
        ]
        for result in results
        if (samples := result.samples.get("barrier"))
    ]
    if rows:
        print("\nA barrier of NVRx's shape, in which each rank reads the whole list")
        print(table(["ranks", "connections", "kind", "time", "server's CPU", "bytes/rank"], rows))


def plot(results: list[Result], path: Path) -> None:
    """Draws cost against world size."""
    ours, lists = "ft_wrapper: a restart", "NVRx's shape: a barrier"

    def line(name: str, part: str, figure: Callable[[Sample], float]) -> Line:
        return Line(name, [(r.plan.ranks, middle(r.samples[part], figure)) for r in results])

    panels = [
        Panel(title, [line(ours, "exception", figure), line(lists, "barrier", figure)])
        for title, figure in (
            ("bytes per rank", lambda s: s.bytes),
            ("server CPU seconds", lambda s: s.server),
        )
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(panels, "ranks"))


def plans(arguments: argparse.Namespace, files: int) -> list[Result]:
    """What is to be measured: all connections as far as the limit of open files goes, shared ones beyond."""
    results = []
    for ranks in sorted(arguments.ranks):
        interval = arguments.interval or max(1.0, round(ranks * BEAT_COST / arguments.processes, 1))
        timeout = arguments.timeout or 10 * interval
        shares = arguments.shared is not None or CONNECTIONS * ranks + SPARE_FILES > files
        connections = (arguments.shared or SHARED) // arguments.processes if shares else 0
        results.append(Result(Plan(ranks, connections, interval, timeout, arguments.node), shares))
    return results


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[4096, 16384], metavar="N", help="numbers of ranks")
    add("--shared", type=int, metavar="N", help=f"share so many connections (where they must: {SHARED})")
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure (default: all)")
    add(
        "--repeats", type=int, default=3, metavar="N", help="restarts after exceptions (default: %(default)s)"
    )
    add("--intervals", type=int, default=12, metavar="N", help="of heartbeats (default: %(default)s)")
    add("--interval", type=float, metavar="S", help="between heartbeats (default: what these clients can do)")
    add("--timeout", type=float, metavar="S", help="heartbeat_timeout (default: ten intervals)")
    add("--node", type=int, default=1, metavar="N", help="ranks that share a heart, as under an agent")
    add("--processes", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="of ranks")
    add("--plot", type=Path, metavar="FILE", help="draw an SVG picture, too")
    add("--quick", action="store_true", help="32 ranks, and half of the parts: seconds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.interval = [32], 0.2
        arguments.parts, arguments.repeats = ["form", "train", "exception", "node", "barrier"], 2
    if arguments.plot:
        arguments.parts = sorted({*arguments.parts, "exception", "barrier"})
    if arguments.processes < 1 or arguments.repeats < 1 or min(arguments.ranks) < 2 * arguments.processes:
        parser.error("at least one process, one restart, and two ranks in each process")
    if arguments.shared is not None and arguments.shared < arguments.processes:
        parser.error(f"--shared {arguments.shared}: at least one connection in each process")
    files = raise_file_limit()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {files} open files a "
        f"process; ranks in {arguments.processes} processes"
    )
    begin = time.monotonic()
    results = plans(arguments, files)
    for result in results:
        measure(result, arguments)
    if arguments.plot:
        plot(results, arguments.plot)
    print_tables(results)
    if "memory" in arguments.parts:
        connections = min(CONNECTIONS * 4096, files - SPARE_FILES)
        each = measure_memory(connections)
        print(
            f"\nMemory of the server: {each:,.0f} bytes a connection, measured with {connections:,}; by "
            f"that, estimated, {size(each * CONNECTIONS * 16384)} for the connections of 16,384 ranks"
        )
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
