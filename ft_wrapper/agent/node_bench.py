"""The benchmark of all nodes before their ranks are first started: it finds nodes that fail or are slow."""

import contextlib
import dataclasses
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from ..exception import StoreError
from ..rendezvous import moves
from ..rendezvous.handler import FtRendezvousHandler
from ..store import TCPStore, TCPStoreServer
from .bench import FAILS, SLOW, Figures, node_table, verdict_on
from .node_check import NodeCheck
from .signals import signal_name

log = logging.getLogger(__name__)

Process = subprocess.Popen[str]

#: How many times the median of the other nodes is slow, by default.
SLOWER_THAN = 1.5
#: Seconds for the process of a node, by default; each of its steps has a limit of its own.
_LONGEST = 150.0
_LOOK_AGAIN = 5.0  # seconds after which a node that waits for another one looks whether that is lost
_END_TIMEOUT = 5.0  # seconds that a killed process may take to vanish
_OPTION = "--node-bench"
_BOOT = "import sys; sys.path.append(sys.argv[1]); from ft_wrapper.agent.bench_process import main; main()"


@dataclasses.dataclass(frozen=True)
class NodeBench(NodeCheck):
    """How the nodes are measured; and a check for a node that comes later, or is kept out.

    Args:
        command: why this node is kept out; empty if it is not.
        slower_than: a node that takes this many times the median of the other nodes is slow.
        keeps_out_slow: whether a slow node is kept out, as one that fails.
    """

    command: str = ""
    timeout: float = _LONGEST
    slower_than: float = SLOWER_THAN
    keeps_out_slow: bool = False

    def failure(self) -> str:
        """Measures this node alone, unless it is kept out: alone it cannot show that it is no longer slow."""
        if self.command:
            return self.command
        with begun() as process:
            why = self.measure(process, {}).why
        return why and f"{_OPTION}: {why}"

    def measure(self, process: Process, order: dict[str, object]) -> Figures:
        """Has the process of `begun` measure this node; returns what it has found.

        Args:
            process: not used after this.
            order: arguments of `bench_process`.
        """
        try:
            said, _ = process.communicate(json.dumps(order) + "\n", self.timeout)
        except subprocess.TimeoutExpired:
            return Figures(f"no import of torch within {self.timeout:g} s")
        last, code = ["import of torch", *said.splitlines()][-1], process.returncode
        if code:
            how = f"killed by {signal_name(-code)}" if code < 0 else f"exit status {code}"
            return Figures(f"{last} ({'takes too long' if code == -signal.SIGALRM else how})")
        return Figures("", *json.loads(last))


@contextlib.contextmanager
def begun() -> Iterator[Process]:
    """Within it, the process that measures this node runs. It imports torch, and waits for its order."""
    command = [sys.executable, "-P", "-c", _BOOT, str(Path(__file__).resolve().parents[2])]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging driver holds it
            process.wait(_END_TIMEOUT)


def measure_all(
    bench: NodeBench, handler: FtRendezvousHandler, store: Store, process: Process | None
) -> dict[int, str] | None:
    """Takes part in the benchmark of a round's nodes. Blocks.

    Group rank 0 says whether there is one: not if it has had ranks. It decides, too, and takes nodes that are
    kept out of the round: if another node left before them, that would count as a restart.

    Args:
        bench: how the nodes are measured.
        handler: has a seat for this node.
        store: shared by the agents of the round.
        process: measures this node; None if this node has had ranks.

    Returns:
        Why nodes are kept out, by group rank; None if nothing was measured.
    """
    assert handler.joined is not None and handler.node is not None
    seats, own = handler.joined.seats, handler.joined.seat_of(handler.node)
    assert own is not None
    names, rank = [(seat.last, (seat.occupant or seat).address) for seat in seats], own.group_rank
    with contextlib.ExitStack() as cleanup:
        if rank == 0 and process is not None:
            server = cleanup.enter_context(contextlib.closing(TCPStoreServer(0, names[0][1])))
            store.set("bench/port", str(server.port))
        elif rank == 0:
            store.set("bench/port", "0")
        try:
            if not (port := int(_read(handler, store, "bench/port"))):
                return None
            order = {"host": names[0][1], "port": port, "rank": rank, "size": len(seats)}
            figures = bench.measure(process or cleanup.enter_context(begun()), order)
            if figures.why:  # otherwise its partners would wait for it
                with contextlib.suppress(StoreError):
                    client = cleanup.enter_context(contextlib.closing(TCPStore(names[0][1], port)))
                    client.multi_set([f"{at}/{rank}" for at in ("here", 0, 1, 2)], [""] * 4)
            store.set(f"bench/{rank}", json.dumps(dataclasses.astuple(figures)))
            if rank == 0:
                out = _decide(bench, handler, store, names)
                nodes = [node for each in out if (node := seats[each].occupant) is not None]
                handler.change(lambda record: moves.remove_nodes(record, nodes)[0])
                store.set("bench/out", json.dumps([*out.items()]))
            return dict(json.loads(_read(handler, store, "bench/out")))
        except DistStoreError:
            log.warning("group rank 0, node %s (%s), has not decided about the benchmark", *names[0])
            return {0: ""}


def _decide(
    bench: NodeBench, handler: FtRendezvousHandler, store: Store, names: list[tuple[str, str]]
) -> dict[int, str]:
    """Waits for the figures of all nodes, and logs them; returns why nodes are kept out."""
    found = []
    for rank in range(len(names)):
        try:
            found.append(Figures(*json.loads(_read(handler, store, f"bench/{rank}", rank))))
        except DistStoreError:
            found.append(Figures("its agent has reported nothing"))
    verdicts = [verdict_on(found, rank, bench.slower_than) for rank in range(len(found))]
    log.info("benchmark of the nodes:\n%s", node_table(found, verdicts, names))
    for name, verdict in zip(names, verdicts, strict=True):
        if verdict.startswith(SLOW):
            log.warning("node %s (%s) is %s", *name, verdict)
    is_out = (FAILS, SLOW) if bench.keeps_out_slow else FAILS
    return {rank: f"{_OPTION}: {said}" for rank, said in enumerate(verdicts) if said.startswith(is_out)}


def _read(handler: FtRendezvousHandler, store: Store, key: str, rank: int = 0) -> str:
    """Waits for what the node of a group rank writes; DistStoreError: it is lost, or takes too long."""
    joined, until = handler.joined, time.monotonic() + _LONGEST
    while True:
        try:
            store.wait([key], timedelta(seconds=_LOOK_AGAIN))
            return store.get(key).decode()
        except DistStoreError:
            record = handler.record
            assert record is not None and joined is not None
            is_on = record.round == joined.round and not record.closed
            if not is_on or record.seats[rank].occupant is None or time.monotonic() > until:
                raise
