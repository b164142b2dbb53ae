"""How a job stands, read from its store, from any shell or host: ``ftrun status``. Writes nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch.distributed import DistError

from .exception import StoreError
from .restart_report import in_words
from .store import Member, StoreMixin, TCPStore, keys
from .store.records import FAULT, split_entry, to_number

STORE_ENV = "FT_WRAPPER_STORE"

NOT_FORMED = "not formed"
RUNNING = "running"
RESTARTING = "restarting"
COMPLETED = "completed"

_TIMEOUT = timedelta(seconds=10)


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """A member of the job.

    Args:
        slot: its rank at the start of the job, which never changes.
        incarnation: which process in a row holds the slot.
        active_rank: its rank in the function; None for a spare, and for one that is not in it yet.
        host: where it is; empty if that is not known.
        pid: its process; None if that is not known.
        has_died: whether it has died in the present iteration.
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
    """

    state: str
    call: int | None
    iteration: int | None
    world_size: int
    active_world_size: int | None
    ranks: tuple[RankStatus, ...]
    last_faults: str | None

    def to_json(self) -> str:
        """All of it, as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def to_text(self) -> str:
        """Some lines for people."""
        if self.iteration is None:
            return f"{self.state}: no wrapped function has been entered by all ranks yet"
        active = "?" if self.active_world_size is None else str(self.active_world_size)
        lines = [
            f"{self.state}: iteration {self.iteration} of call {self.call}, "
            f"{active} of {self.world_size} ranks active"
        ]
        rows = [("slot", "incarnation", "active rank", "host", "pid")]
        for rank in self.ranks:
            place = "died" if rank.has_died else "-" if rank.active_rank is None else str(rank.active_rank)
            pid = "-" if rank.pid is None else str(rank.pid)
            rows.append((str(rank.slot), str(rank.incarnation), place, rank.host or "-", pid))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(("  " + "  ".join(cells)).rstrip())
        if self.last_faults is not None:
            lines.append(f"last fault: {self.last_faults}")
        return "\n".join(lines)


def read_status(store: StoreMixin) -> Status:
    """Reads how a job stands.

    Args:
        store: the job's.

    Raises:
        StoreError: it cannot be read.
    """
    current = store.read_current()
    if current is None:
        return Status(NOT_FORMED, None, None, 0, None, (), None)
    view, _ = current
    n = view.n
    outcome = store.outcome_of(n)
    state = RUNNING if outcome is None else RESTARTING if outcome == FAULT else COMPLETED
    active_world_size = _active_world_size(store, n)
    places = {store.try_get(keys.seat(n, rank)): rank for rank in range(active_world_size or 0)}
    dead = store.deaths_of(n)
    ended = n if outcome == FAULT else n - 1
    faults = store.faults_of(ended) if ended >= view.first else []
    return Status(
        state,
        view.call,
        n,
        len(view.members),
        active_world_size,
        tuple(
            _rank(store, member, places.get(str(member)), has_died=member in dead) for member in view.members
        ),
        in_words(faults) if faults else None,
    )


def _active_world_size(store: StoreMixin, n: int) -> int | None:
    key = keys.world(n)
    sizes = store.try_get(key)
    return None if sizes is None else to_number(split_entry(sizes, 2, key)[1], key)


def watch(store: StoreMixin, longest: float) -> Iterator[Status]:
    """Reads how a job stands whenever that changes: an iteration ends, another one begins.

    Args:
        store: the job's.
        longest: seconds after which to read it in any case.

    Yields:
        What was read, if it differs from the last one. Ends when the job has completed.

    Raises:
        StoreError: the store cannot be read, any more perhaps.
    """
    last = None
    while True:
        status = read_status(store)
        if status != last:
            yield status
        last = status
        if status.state == COMPLETED:
            return
        n = -1 if status.iteration is None else status.iteration
        store.wait_for(keys.wake_end(n) if status.state == RUNNING else keys.wake_head(n + 1), longest)


def _rank(store: StoreMixin, member: Member, active_rank: int | None, *, has_died: bool) -> RankStatus:
    record = store.record_of(member)
    pid = record.get("pid")
    return RankStatus(
        member.slot,
        member.incarnation,
        active_rank,
        str(record.get("host", "")),
        pid if isinstance(pid, int) else None,
        has_died,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """``ftrun status``: prints how a job stands.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Returns:
        0, or 2 if its store cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="ftrun status",
        description="Shows how a job of wrapped ranks stands: its iteration, its ranks, the last fault.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "endpoint",
        nargs="?",
        default=os.environ.get(STORE_ENV),
        metavar="HOST:PORT",
        help=f"of the job's store: what its ranks have in {STORE_ENV}, and ftrun says when it starts",
    )
    parser.add_argument("--watch", action="store_true", help="go on, and print it again when it changes")
    parser.add_argument(
        "--interval",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="read it at least so often (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args(argv)
    host, _, port = (args.endpoint or "").rpartition(":")
    if not host or not port.isdecimal():
        print(f"ftrun status: error: {args.endpoint or 'no endpoint'}: give HOST:PORT", file=sys.stderr)
        return 2
    try:
        store = TCPStore(host, int(port), timeout=_TIMEOUT)
        try:
            for status in watch(store, args.interval) if args.watch else [read_status(store)]:
                print(status.to_json() if args.json else status.to_text(), flush=True)
        finally:
            store.close()
    except (StoreError, DistError) as error:
        print(f"ftrun status: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
