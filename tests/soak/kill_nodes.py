"""Trains `train_lm.py` on several nodes, all on this machine, while ranks and nodes are lost at random.

    python tests/soak/kill_nodes.py                                      a minute
    python tests/soak/kill_nodes.py --minutes 10 --seed 7                `make soak-nodes`
    python tests/soak/kill_nodes.py --etcd --minutes 10                  `make soak-etcd`

Each node is an `ftrun` with three ranks; three of the six ranks train. Every ``--every`` seconds, more or
less, a random rank is killed or stopped, or all of node 1 is lost: its `ftrun` with everything that it has
started. The same node comes back a little later. Between these, ranks meet exceptions and hangs inside the
function. Node 0 hosts the stores, so it stays; and one of its ranks is spared, which goes through every
restart in the same process, unless it hangs: in a held GIL, or in a write to a peer that has just died, which
gloo may lose. Then `hard_timeout` ends it.

With ``--etcd`` there are three nodes of two ranks, four of which train, and three members of etcd, where the
nodes meet and the ranks agree. Then any node may be lost, the first one too, and any member: one at a time of
each.

At the end of ``--minutes`` the training may finish, and the same number of steps is trained without faults.
What must hold then:

- the final weights are the same, bit for bit;
- no iteration number was used twice;
- of a node that was lost, no process was left;
- each `ftrun` tells Prometheus what can be read, and no counter goes down;
- keys in the stores, processes, memory, file descriptors and threads are what they were in the first minute
  (from three minutes on).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from scrapes import Scrapes
from soak import (
    FINISH,
    RESTART,
    SAMPLE_EVERY,
    Hammer,
    Record,
    Run,
    Samples,
    folder_of,
    make_parser,
    send,
    soak,
    train,
)

# isort: split
from launcher import run_program
from table import show_table

from ft_wrapper import events
from ft_wrapper.store import connect
from ft_wrapper.store.address import DEFAULT_PREFIX, EtcdAddress
from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.store.plan import connect_etcd
from ft_wrapper.testing import EtcdServer
from ft_wrapper.testing.etcd_server import free_port

LOST_AFTER = 4.0  # seconds of silence until the other node takes a node out
CONF = f"keep_alive_interval={LOST_AFTER / 8},keep_alive_max_attempt=8"
STORE_TIMEOUT = timedelta(seconds=30)
SETTLES = 10.0  # seconds from the start of a node until its ranks take part, on a busy machine
LEFT = 10.0  # seconds in which all processes of a lost node must have gone
MORE_PROCESSES = 3

# What happens, and how often by comparison.
KINDS = {
    "SIGKILL": 6,
    "SIGABRT": 3,
    "SIGSEGV": 3,
    "SIGSTOP, short": 2,  # shorter than any timeout
    "SIGSTOP, long": 2,  # longer than every timeout: its monitor ends it
    "node lost": 2,  # everything at once: no one can tell the others
    "SIGKILL of ftrun": 2,  # its ranks have to notice
}
MEMBER = "member of etcd lost"
# What the ranks meet inside the function, in some iterations.
FAULTS = {"exception": 4, "sleep": 1, "gil": 1}
FAULT_EVERY = 3  # iterations
MARK = "FT_WRAPPER_SOAK_NODE"
METRICS = "TORCHELASTIC_HEALTH_CHECK_PORT"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What trains.

    Args:
        nodes: how many.
        ranks: of each node.
        active: ranks that train.
        weights: how often each rank is hit, by comparison: the first ones train, unless they are away.
        lost: the nodes that are lost now and again.
        spared: a rank that is hit by nothing, and always trains, since ranks before it may be lost.
        etcd: where the nodes meet; a store on node 0 when None.
    """

    nodes: int
    ranks: int
    active: int
    weights: Sequence[int]
    lost: Sequence[int]
    spared: int | None = None
    etcd: EtcdServer | None = None

    @property
    def size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks


def two_nodes() -> Shape:
    """Node 0 hosts the stores."""
    return Shape(2, 3, 3, (4, 4, 0, 1, 1, 1), (1,), spared=2)


def three_nodes(etcd: EtcdServer) -> Shape:
    """No node is needed more than another one."""
    return Shape(3, 2, 4, (3, 3, 3, 3, 1, 1), (0, 1, 2), etcd=etcd)


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of etcd that is away."""

    server: EtcdServer
    index: int


class Node:
    """An `ftrun` with its ranks, in the place of a machine.

    Args:
        name: its node id.
        command: all of it but that.
        output: what it and its ranks print goes there.
        environment: what it finds in its environment beside what we have in ours.

    Attributes:
        port: where it tells its metrics.
    """

    def __init__(self, name: str, command: Sequence[str], output: int, environment: dict[str, str]) -> None:
        self.name = name
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._command = [*command[:3], "--node-id", name, *command[3:]]
        self._output = output
        self._environment = {**environment, METRICS: f"127.0.0.1:{self.port}"}
        self._mark = ""

    def start(self) -> None:
        """Starts it, for the first time or again."""
        self.takes_part = time.monotonic() + SETTLES
        self._mark = f"{MARK}={self.name}-{uuid.uuid4()}"
        self.process = subprocess.Popen(
            self._command,
            env={**os.environ, **self._environment, MARK: self._mark.partition("=")[2]},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C is meant for us
        )

    @property
    def pid(self) -> int:
        """The process of `ftrun`."""
        assert self.process is not None
        return self.process.pid

    def processes(self) -> list[psutil.Process]:
        """All that it has started, and itself: also those whose parents have died."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if entry.isdigit() and self._mark.encode() in Path("/proc", entry, "environ").read_bytes():
                    found.append(psutil.Process(int(entry)))
        return found

    def lose(self, *, wholly: bool) -> list[psutil.Process]:
        """Kills it; returns what is left of it after `LEFT` seconds.

        Args:
            wholly: everything at once, not only `ftrun`.
        """
        assert self.process is not None
        processes = self.processes()
        if wholly:
            send(self.pid, signal.SIGSTOP)
            for process in processes:
                if process.pid != self.pid:
                    send(process.pid, signal.SIGKILL)
        send(self.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        _, left = psutil.wait_procs(processes, timeout=LEFT)
        return [*left, *self.processes()]

    def end(self) -> None:
        """Ends what still runs."""
        if self.process is not None and self.process.poll() is None:
            for process in self.processes():
                send(process.pid, signal.SIGCONT)  # it could not be ended where it is stopped
            self.process.terminate()
            try:
                self.process.wait(LEFT)
            except subprocess.TimeoutExpired:
                self.lose(wholly=True)


class NodesRun(Run):
    """A training run on several nodes.

    Args:
        folder: for checkpoints, events and the output; must not exist yet.
        shape: what trains.
        options: of the training.
    """

    def __init__(self, folder: Path, shape: Shape, options: Sequence[str]) -> None:
        super().__init__(folder, shape.active)
        self.shape = shape
        self.left: list[str] = []
        self.ranks: dict[int, psutil.Process] = {}  # the newest process of each
        self.scrapes = Scrapes()
        self._output = open(folder / "output", "ab")  # noqa: SIM115  # until `close`
        self._events_read = 0
        self.port = free_port()
        command = [sys.executable, "-m", "ft_wrapper.run", "--nnodes", str(shape.nodes)]
        command += ["--nproc-per-node", str(shape.ranks), "--max-rank-restarts", "100000"]
        if shape.etcd is None:
            command += ["--rdzv-endpoint", f"localhost:{self.port}"]
        else:
            command += ["--rdzv-backend", "etcd", "--rdzv-endpoint", shape.etcd.endpoints]
            command += ["--rdzv-id", self.job]
        environment = {events.ENV: str(folder / "events"), "OMP_NUM_THREADS": "1"}
        self.nodes = []
        for number in range(shape.nodes):
            conf = CONF if shape.etcd is not None else f"{CONF},is_host={number == 0}"
            whole = [*command, "--rdzv-conf", conf, *train(folder, shape.active, options)]
            self.nodes.append(Node(str(number), whole, self._output.fileno(), environment))

    @property
    def job(self) -> str:
        """What it is called."""
        return self.folder.name

    def close(self) -> None:
        """Ends what still runs."""
        for node in reversed(self.nodes):
            node.end()
        self._output.close()

    def start(self) -> None:
        """Starts all nodes."""
        for node in self.nodes:
            node.start()

    def wait(self, seconds: float) -> None:
        """Waits a while; ends the program if a node ends meanwhile."""
        for node in self._ended(seconds):
            self.fail(f"node {node.name} has ended ({node.process and node.process.returncode}), unasked")

    def finish(self, seconds: float) -> None:
        """Waits until all nodes have ended well."""
        deadline = time.monotonic() + seconds
        running = [node for node in self.nodes if node.process is not None]
        while running:
            if time.monotonic() >= deadline:
                self.fail(f"the training did not finish within {seconds:.0f} s")
            for node in self._ended(max(0.0, deadline - time.monotonic())):
                running.remove(node)
                assert node.process is not None
                if node.process.returncode != 0:
                    self.fail(f"node {node.name} ended with exit code {node.process.returncode}")
                node.process = None

    def await_all(self) -> None:
        """Waits until the ranks of all nodes take part: who comes after the end is turned away."""
        deadline = time.monotonic() + FINISH
        while not self._all_take_part():
            if time.monotonic() >= deadline:
                self.fail("not all ranks take part again")
            self.wait(SAMPLE_EVERY)

    def _all_take_part(self) -> bool:
        records = events.load(str(self.folder / "events"))
        # One that is not needed now has joined, and waits for the next iteration.
        here = {record["pid"] for record in records if record["event"] in ("join", "decided", "enter")}
        ranks = [process.pid for node in self.nodes for process in self.ranks_of(node).values()]
        return len(ranks) == self.shape.size and here.issuperset(ranks)

    def _ended(self, seconds: float) -> list[Node]:
        pidfds: dict[int, Node] = {}
        try:
            for node in self.nodes:
                if node.process is not None:
                    pidfds[os.pidfd_open(node.pid)] = node
            ended = [pidfds[fd] for fd in select.select(list(pidfds), [], [], seconds)[0]]
        finally:
            for fd in pidfds:
                os.close(fd)
        for node in ended:
            assert node.process is not None
            node.process.wait()
        return ended

    def ranks_of(self, node: Node) -> dict[int, psutil.Process]:
        """The processes of the ranks that run on a node, as the events tell."""
        path = self.folder / "events"
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as lines:
            lines.seek(self._events_read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._events_read += len(line)
                record = json.loads(line)
                if record["event"] == "rank_started":
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self.ranks[record["rank"]] = psutil.Process(record["child"])
        found = {}
        for rank, process in self.ranks.items():
            # Still a child of this ftrun, so it is not another one with the same number.
            with contextlib.suppress(psutil.NoSuchProcess):
                alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
                if alive and node.process is not None and process.ppid() == node.pid:
                    found[rank] = process
        return found

    def wrong(self, records: Sequence[Record], steps: int) -> list[str]:
        """Says what was left of nodes and in etcd, who was killed though spared, which metrics are odd."""
        shape, wrong = self.shape, [f"left of a lost node: {process}" for process in self.left]
        pids = {record["pid"] for record in self.entered() if record["slot"] == shape.spared}
        if shape.spared is not None and len(pids) > 1 + self._hung(records):
            wrong.append(f"rank {shape.spared}, which no one killed, had the processes {sorted(pids)}")
        wrong += [f"left in etcd: {key}" for key in left_in(shape.etcd)]
        lines, counted = len(RESTART.findall(self.printed())), self.scrapes.restarts()
        if self.scrapes.count and not 0 < counted <= lines:
            wrong.append(f"the agents have counted {counted} restarts, and there are {lines} lines of them")
        return [*wrong, *self.scrapes.wrong]

    def _hung(self, records: Sequence[Record]) -> int:
        """How often the spared rank was ended because it hung."""
        ended = [r["slot"] for r in records if r["event"] == "fault" and r["kind"] == "HARD_TIMEOUT"]
        return ended.count(self.shape.spared)

    def tell(self, records: Sequence[Record], steps: int) -> None:
        """Prints what happened, and how often."""
        kinds = collections.Counter(strike.kind for strike in self.strikes)
        kinds.update(f"{record['kind']} in the function" for record in records if record["event"] == "inject")
        show_table(("what happened", "times"), [[kind, str(count)] for kind, count in kinds.items()])
        iterations = max(record["iteration"] for record in self.entered()) + 1
        started = sum(record["event"] == "rank_started" for record in records) - self.shape.size
        print(f"{started} processes were started again; {iterations} iterations, {steps} steps")
        print(f"{self.scrapes.count} scrapes of metrics, {self.scrapes.restarts()} restarts in the last ones")
        if self.shape.spared is not None:
            print(f"the spared rank was ended {self._hung(records)} times at hard_timeout")


class NodeSamples(Samples):
    """What the processes of all nodes have, and the stores."""

    def __init__(self, run: NodesRun) -> None:
        self._run = run
        if run.shape.etcd is not None:
            every = EtcdAddress(run.shape.etcd.endpoints, f"{DEFAULT_PREFIX}/{run.job}".strip("/"))
            super().__init__([connect_etcd(every, STORE_TIMEOUT)])
            return
        (workers,) = set(re.findall(r"ftrun status (\S+)", run.printed()))
        super().__init__([connect(address, STORE_TIMEOUT) for address in (f"localhost:{run.port}", workers)])

    def take(self) -> None:
        """Takes one of each."""
        super().take()
        run, shape, now = self._run, self._run.shape, time.monotonic()
        first = run.nodes[0]
        ranks = {rank: process for node in run.nodes for rank, process in run.ranks_of(node).items()}
        if len(ranks) == shape.size and first.process is not None:  # it has connections to all that are there
            self._note_processes("ftrun of node 0, and what it hosts", [psutil.Process(first.pid)])
            self._note("processes of node 0", len(first.processes()), MORE_PROCESSES, "{:.0f}")
        if shape.spared in ranks:
            self._note_processes(f"spared rank {shape.spared}", [ranks.pop(shape.spared)])
        self._note_processes("other ranks", list(ranks.values()))
        for node in run.nodes:
            if node.process is not None:
                run.scrapes.take(node.pid, node.port, is_starting=now < node.takes_part)


class NodeHammer(Hammer):
    """What happens. It cannot where the rank is dead or stopped, or the node or member lost."""

    def __init__(self, run: NodesRun, seed: int) -> None:
        super().__init__(seed)
        self._run = run
        self._kinds = KINDS if run.shape.etcd is None else {**KINDS, MEMBER: 3}
        self._members_away = 0

    def _resume(self, who: Any) -> None:
        if isinstance(who, Node):
            who.start()
            print(f"  node {who.name} is started again", flush=True)
        elif isinstance(who, Member):
            who.server.restart(who.index)
            self._members_away -= 1
            print(f"  member {who.index} of etcd is started again", flush=True)
        else:
            super()._resume(who)

    def try_to_strike(self) -> bool:
        """Does the next thing of the plan, if it can happen now."""
        shape = self._run.shape
        kind = self._choose.choices(list(self._kinds), list(self._kinds.values()))[0]
        slot, seconds = self._choose.choices(range(shape.size), shape.weights)[0], self._choose.random()
        if kind == MEMBER:
            if self._members_away or shape.etcd is None:
                return False
            self._lose_member(shape.etcd, seconds)
        elif "node" in kind or "ftrun" in kind:
            node = self._run.nodes[self._choose.choice(shape.lost)]
            # One at a time. Now and then while it starts; it has to take part, too.
            is_new = any(time.monotonic() < other.takes_part for other in self._run.nodes)
            all_there = all(other.process is not None for other in self._run.nodes)
            if not all_there or (is_new and seconds < 0.8):
                return False
            self._lose_node(node, kind, seconds)
        else:
            process = self._run.ranks_of(self._run.nodes[slot // shape.ranks]).get(slot)
            if process is None or process.pid in self._stopped:
                return False
            self._hit(self._run.strike(kind, [process.pid]), slot, seconds)
        return True

    def _lose_member(self, server: EtcdServer, seconds: float) -> None:
        index = server.leader() if seconds < 0.5 else self._choose.randrange(3)
        strike = self._run.strike(MEMBER, [])
        server.kill(index)
        self._members_away += 1
        self._resume_after(strike, 5.0 * seconds, Member(server, index))
        print(f"  {MEMBER}, member {index}", flush=True)

    def _lose_node(self, node: Node, kind: str, seconds: float) -> None:
        pids = [process.pid for process in node.processes()]
        strike = self._run.strike(kind, pids)
        left = node.lose(wholly=kind == "node lost")
        self._run.left += [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in left]
        self._stopped.difference_update(pids)
        self._later = [one for one in self._later if not isinstance(one[2], list) or one[2][0] not in pids]
        heapq.heapify(self._later)
        # Before the others have noticed its silence, or after that.
        self._resume_after(strike, 2 * LOST_AFTER * seconds, node)
        print(f"  {kind}, node {node.name} with {len(pids)} processes", flush=True)


def faults(seed: int, minutes: float, active: int) -> str:
    """Returns what goes wrong inside the function, for `train_lm.py`."""
    choose = random.Random(f"faults {seed}")
    specs = []
    for iteration in range(FAULT_EVERY, int(60 * minutes) + FAULT_EVERY, FAULT_EVERY):
        kind = choose.choices(list(FAULTS), list(FAULTS.values()))[0]
        specs.append(f"{kind}:rank={choose.randrange(active)}:iteration={iteration}")
    return ",".join(specs)


def left_in(etcd: EtcdServer | None) -> list[str]:
    """Returns the keys that jobs which have ended have left in etcd."""
    if etcd is None:
        return []
    with contextlib.closing(etcd.get_client()) as client:
        every = client.read(Range.prefix(DEFAULT_PREFIX.strip("/").encode()))
        return [kv.key.decode(errors="replace") for kv in every]


def main() -> None:
    """Runs it."""
    parser = make_parser(__doc__, every=3.0)
    parser.add_argument(
        "--etcd", action="store_true", help="three nodes that meet in etcd, of which all may be lost"
    )
    args = parser.parse_args()
    with folder_of(args), contextlib.ExitStack() as exits:
        shape = three_nodes(exits.enter_context(EtcdServer(members=3))) if args.etcd else two_nodes()
        print(
            f"{shape.nodes} nodes of {shape.ranks} ranks, {shape.active} of {shape.size} active, something "
            f"every {args.every:g} s for {args.minutes:g} minutes (seed {args.seed})",
            flush=True,
        )

        def make(name: str, options: Sequence[str]) -> NodesRun:
            return NodesRun(args.folder / name, shape, options)

        def play(run: NodesRun) -> tuple[NodeHammer, NodeSamples]:
            for node in run.nodes:
                node.takes_part = time.monotonic()
            return NodeHammer(run, args.seed), NodeSamples(run)

        soak(args, make, play, "--faults", faults(args.seed, args.minutes, shape.active))


if __name__ == "__main__":
    run_program(main)
