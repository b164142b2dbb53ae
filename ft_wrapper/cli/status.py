"""``ftrun status``: a job's nodes and ranks, read from its store, from any shell or host. Writes nothing."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch.distributed import DistError

from .._text import without_secrets
from ..exception import StoreError
from ..protocol import Agreement, keys
from ..protocol.operations import Operations, read
from ..protocol.records import FAULT
from ..rendezvous.backends import RENDEZVOUS, workers_namespace
from ..rendezvous.keys import RECORD_KEY, endpoint_key, version_key
from ..rendezvous.record import Node, NodePlace, QuarantinedNode, RendezvousRecord
from ..report import table
from ..restart.report import describe_faults, host_and_pid
from ..store import StoreMixin, connect
from ..store.address import EtcdAddress, is_etcd
from ..store.bounded import call_in_thread
from ..store.plan import ANNOUNCED, connector
from ..store.secret import found_seal

# Where a job's stores are, by what a user calls the job -----------------------------------------------------


TIMEOUT = timedelta(seconds=10)
#: What a user calls a job.
ENDPOINT = "HOST:PORT, or etcd://HOST:PORT/PREFIX"


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError unless this may be what a user calls a job."""
    try:
        connector(endpoint, TIMEOUT)
    except ValueError:
        raise ValueError(f"{endpoint or 'no endpoint'}: give {ENDPOINT}") from None


def read_record(store: Operations) -> RendezvousRecord | None:
    """The record of the nodes; None if there is none in this store."""
    text = read(store, RECORD_KEY)
    try:
        return None if text is None else RendezvousRecord.from_text(text)
    except ValueError as error:
        raise StoreError(f"store key {RECORD_KEY!r}: {error}") from error


def meeting_place(endpoint: str) -> str:
    """Where the record is, by what a user calls the job: on etcd the job's prefix is enough."""
    if not is_etcd(endpoint) or EtcdAddress.parse(endpoint).namespace:
        return endpoint
    return str(EtcdAddress.parse(endpoint).within(RENDEZVOUS))


def ranks_store(endpoint: str, store: Operations, record: RendezvousRecord) -> str:
    """Address of the store in which wrapped ranks agree; empty if there is none yet."""
    if not is_etcd(endpoint):
        return read(store, endpoint_key(record.round)) or ""
    if not record.complete:
        return ""
    return str(EtcdAddress.parse(endpoint).within(workers_namespace(record.round)))


def open_store(address: str, opened: contextlib.ExitStack) -> StoreMixin:
    """Connects to a store, for as long as the stack is open."""
    store = opened.enter_context(contextlib.closing(connect(address, TIMEOUT)))
    store.seal = store.seal or found_seal(store)
    return store


NOT_FORMED = "not formed"
RUNNING = "running"
RESTARTING = "restarting"
COMPLETED = "completed"
LOST = "lost"
KEPT_OUT = "kept out"


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """A node.

    Args:
        id: names the node.
        place: ``seat``, ``waiting`` for the next round, ``spare``; ``lost`` if its seat is empty; ``kept
            out`` if it has not passed its check.
        group_rank: its number; None if it has no seat, or its round is not complete.
        slots: the first and the last slot of its ranks; None without a seat in a complete round.
        incarnation: how many agents had this id before; None for a lost one.
        address: where the others reach it; empty if that is not known.
        reason: why it is kept out.
        since: for how long it has been, in seconds since the epoch by its own clock.
    """

    id: str
    place: str
    group_rank: int | None
    slots: tuple[int, int] | None
    incarnation: int | None
    address: str
    reason: str = ""
    since: float | None = None


#: The nodes, and whether the job has ended.
NodesSeen = tuple[tuple[NodeStatus, ...], bool]


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """A member of the job.

    Args:
        slot: its rank at the start of the job, which never changes.
        incarnation: which process in a row holds the slot.
        active_rank: its rank in the function; None for a spare, and for one that is not in it yet.
        host: where it runs; empty if that is not known.
        pid: its process; None if that is not known.
        has_died: whether it has died in this iteration.
    """

    slot: int
    incarnation: int
    active_rank: int | None
    host: str
    pid: int | None
    has_died: bool


@dataclasses.dataclass(frozen=True)
class Status:
    """A job.

    Args:
        state: ``not formed``, ``running``, ``restarting`` or ``completed``.
        call: number of the wrapped call; None before the job has formed.
        iteration: number of the global iteration; None before the job has formed.
        world_size: how many ranks there are, spares included.
        active_world_size: how many of them are in the function; None while that is being agreed on.
        ranks: all of them, by slot.
        last_faults: what ended the iteration before, or the present one if it has ended; in words.
        nodes: all nodes that have or had a place in the rendezvous, and those that are kept out; none if its
            store was not asked.
    """

    state: str
    call: int | None
    iteration: int | None
    world_size: int
    active_world_size: int | None
    ranks: tuple[RankStatus, ...]
    last_faults: str | None
    nodes: tuple[NodeStatus, ...] = ()

    def to_json(self) -> str:
        """All of it, as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def to_text(self) -> str:
        """Some lines for people, without what a terminal obeys, such as in a host's name."""
        lines = "\n".join([*self._of_the_ranks(), *self._of_the_nodes()])
        return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in lines)

    def _of_the_ranks(self) -> list[str]:
        if self.iteration is None:
            return [f"{self.state}: no wrapped function has been entered by all ranks yet"]
        active = "?" if self.active_world_size is None else str(self.active_world_size)
        lines = [
            f"{self.state}: iteration {self.iteration} of call {self.call}, "
            f"{active} of {self.world_size} ranks active"
        ]
        rows: list[tuple[object, ...]] = [("slot", "incarnation", "active rank", "host", "pid")]
        for rank in self.ranks:
            place = "died" if rank.has_died else rank.active_rank
            rows.append((rank.slot, rank.incarnation, place, rank.host, rank.pid))
        lines += table(rows, "  ")
        if self.last_faults is not None:
            lines.append(f"last fault: {self.last_faults}")
        return lines

    def _of_the_nodes(self) -> list[str]:
        if not self.nodes:
            return []
        rows: list[tuple[object, ...]] = [("node", "place", "group rank", "slots", "address")]
        for node in self.nodes:
            slots = node.slots and f"{node.slots[0]}..{node.slots[1]}"
            rows.append((node.id, node.place, node.group_rank, slots, node.address))
        return ["nodes:", *table(rows, "  "), *self.kept_out()]

    def kept_out(self) -> list[str]:
        """Which nodes are kept out, since when and why: a line for each."""
        lines = []
        for node in self.nodes:
            if node.reason and node.since is not None:
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node.since))
                lines.append(f"node {node.id} is {node.place} since {when}: {node.reason}")
        return lines


def read_status(store: StoreMixin) -> Status:
    """Reads how a job stands.

    Args:
        store: the job's.

    Raises:
        StoreError: it cannot be read.
    """
    agreement = Agreement(store)
    view = agreement.iterations.read_current()
    if view is None:
        return Status(NOT_FORMED, None, None, 0, None, (), None)
    n = view.n
    outcome = agreement.ends.outcome_of(n)
    state = RUNNING if outcome is None else RESTARTING if outcome == FAULT else COMPLETED
    places = {str(one): entered.active_rank for one, entered in agreement.entering.entered_in(n).items()}
    dead = agreement.ends.deaths_of(n)
    ended = n if outcome == FAULT else n - 1
    faults = agreement.ends.faults_of(ended) if ended >= view.decision.first else []
    ranks = []
    for member in view.members:
        host, pid = host_and_pid(store, member)
        place = places.get(str(member))
        ranks.append(RankStatus(member.slot, member.incarnation, place, host, pid or None, member in dead))
    return Status(
        state,
        view.call,
        n,
        len(view.members),
        agreement.entering.active_in(n) or None,
        tuple(ranks),
        describe_faults(faults) if faults else None,
    )


def watch(
    store: StoreMixin, longest: float, read_nodes: Callable[[], NodesSeen | None] = lambda: ((), False)
) -> Iterator[Status]:
    """Reads how a job stands whenever that changes: an iteration ends, another one begins.

    Args:
        store: the job's.
        longest: seconds after which to read it, and the nodes, in any case.
        read_nodes: reads the nodes, and whether they have ended the job; None if they have begun another
            round, whose ranks use another store.

    Yields:
        What was read, if it differs from the last one. Ends when the job has ended, or begun another round.

    Raises:
        StoreError: the store cannot be read, or no longer.
    """
    last = None
    while True:
        # Nodes first: once the job has ended, the ranks write no more.
        if (found := read_nodes()) is None:
            return
        nodes, has_ended = found
        status = dataclasses.replace(read_status(store), nodes=nodes)
        if status != last:
            yield status
        last = status
        if has_ended or status.state == COMPLETED:
            return
        n = -1 if status.iteration is None else status.iteration
        store.wait_for(keys.wake_end(n) if status.state == RUNNING else keys.wake_head(n + 1), longest)


def _nodes(record: RendezvousRecord) -> tuple[NodeStatus, ...]:
    found = []
    outside = {one.node.id: _outside(one) for one in record.quarantine if _is_outside(record, one.node)}
    for seat in record.seats:
        rank = seat.group_rank if record.complete else None
        slots = (seat.base_slot, seat.base_slot + seat.nproc - 1) if record.complete else None
        node = seat.occupant
        if node is not None:
            found.append(
                NodeStatus(node.id, NodePlace.SEAT.value, rank, slots, node.incarnation, node.address)
            )
        elif seat.last in outside:  # it has given this seat up
            found.append(dataclasses.replace(outside.pop(seat.last), group_rank=rank, slots=slots))
        else:
            found.append(NodeStatus(seat.last, LOST, rank, slots, None, ""))
    waiting = ((one.node, NodePlace.WAITING.value) for one in record.waiting)
    for node, place in [*waiting, *((node, NodePlace.SPARE.value) for node in record.spares)]:
        found.append(NodeStatus(node.id, place, None, None, node.incarnation, node.address))
    return (*found, *outside.values())


def _is_outside(record: RendezvousRecord, node: Node) -> bool:
    """Whether it has no place, nor has a later agent of its id."""
    inside = record.find(node.id)
    return inside is None or inside.incarnation < node.incarnation


def _outside(one: QuarantinedNode) -> NodeStatus:
    node = one.node
    return NodeStatus(node.id, KEPT_OUT, None, None, node.incarnation, node.address, one.reason, one.since)


def main(argv: Sequence[str] | None = None) -> int:
    """``ftrun status``: prints how a job stands.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Returns:
        0, or 2 if its store cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="ftrun status",
        description="Shows the state of a wrapped job: its iteration, its ranks, the last fault.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "endpoint",
        nargs="?",
        default=os.environ.get(ANNOUNCED),
        metavar="ENDPOINT",
        help=f"{ENDPOINT}: where the nodes meet, or the store of the ranks, which have it in {ANNOUNCED}; "
        "ftrun prints it at the start",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="keep running, and print the status again when it changes",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="read the status at least this often (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args(argv)
    try:
        check_endpoint(args.endpoint or "")
        with contextlib.ExitStack() as opened:
            seen = itertools.groupby(_follow(args.endpoint, args.interval, opened))
            statuses = _interruptible(status for status, _ in seen)
            for status in statuses if args.watch else itertools.islice(statuses, 1):
                print(status.to_json() if args.json else status.to_text(), flush=True)
    except (StoreError, DistError, ImportError, ValueError) as error:  # the last two: how etcd is reached
        print(f"ftrun status: error: {without_secrets(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _interruptible(statuses: Iterator[Status]) -> Iterator[Status]:
    """The same, so that ctrl-C is obeyed at once: in a call of torch's stores it would have to wait."""
    while (status := call_in_thread(lambda: next(statuses, None), "reading the status")) is not None:
        yield status


def _follow(endpoint: str, longest: float, opened: contextlib.ExitStack) -> Iterator[Status]:
    """Reads how the job stands whose store, or nodes' rendezvous, is at an endpoint; round after round."""
    meeting = meeting_place(endpoint)
    store = open_store(meeting, opened)
    status: Status | None = None
    watched: int | None = None  # the last round whose ranks' store was read to its end
    while True:
        record = read_record(store)
        if record is None:
            # No nodes met there: the ranks agree at the endpoint itself, as they do under any other launcher.
            yield from watch(store if meeting == endpoint else open_store(endpoint, opened), longest)
            return
        if record.closed and record.round == watched:
            return
        if address := ranks_store(endpoint, store, record):
            try:
                with contextlib.ExitStack() as of_round:
                    nodes = functools.partial(_nodes_in, store, record.round)
                    for status in watch(open_store(address, of_round), longest, nodes):
                        yield status
            except (StoreError, DistError):
                if status is None:
                    raise
                # The ranks' store has ended with its round, and the next one may take a while.
            watched = record.round
            if status is not None and status.state == COMPLETED:
                return
        else:
            yield (status := Status(NOT_FORMED, None, None, 0, None, (), None, _nodes(record)))
        if record.closed:
            return
        store.wait_for(version_key(record.version + 1), longest)


def _nodes_in(store: StoreMixin, number: int) -> NodesSeen | None:
    """The nodes, as long as they are in this round, and whether the job has ended; None after that."""
    record = read_record(store) or RendezvousRecord(1, 1)
    return (_nodes(record), record.closed) if record.round == number else None


if __name__ == "__main__":
    sys.exit(main())
