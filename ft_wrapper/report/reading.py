"""Events files as the records of jobs, without lines that are not records of events."""

import collections
import glob
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Any

from .. import events
from ..events import Record

_MOST = 6e10  # a time of day beyond that is in no year that a date allows


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value  # no half characters


def _is_whole(value: object) -> bool:
    return type(value) is int and abs(value) < _MOST


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and abs(value) < _MOST)


# What the fields that the report uses have to be.
_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ["event", "job", "host", "boot", "nonce", "after", "kind", "cause", "message", "line"], _is_text
    ),
    **dict.fromkeys(["monotonic", "time", "started", "began", "since", "share", "cost"], _is_number),
    **dict.fromkeys(
        ["pid", "child", "slot", "rank", "incarnation", "iteration", "call", "step", "committed"], _is_whole
    ),
    "culprits": lambda value: isinstance(value, list) and all(type(part) is int for part in value),
    "ends": lambda value: isinstance(value, bool),
}
#: Events of agents, each with a line for people.
NOTES = ("notice", "kept_out", "result")
_NEEDED = ("event", "host", "pid", "monotonic")
_NEEDED_BY = {
    "register": ("slot", "incarnation"),
    "decided": ("iteration",),
    "fault": ("slot",),
    **dict.fromkeys(NOTES, ("line",)),
    "rank_started": ("child",),
    "rank_ended": ("child",),
    "restarted": ("kind", "cause", "culprits", "line"),
    "slow": ("slot", "since", "cost"),
    "step": ("step", "began"),
}


def read_files(paths: Iterable[str]) -> tuple[list[Record], list[str]]:
    """Reads events files.

    Args:
        paths: files of all hosts, in any order, or folders that ``ftrun --events`` named.

    Returns:
        The records; and of each line that is left out, its file, its number and what is wrong with it.
    """
    records, left_out = [], []
    for path in chain.from_iterable(map(_files, paths)):
        for number, found in enumerate(events.read_lines(path), start=1):
            if isinstance(found, ValueError):
                left_out.append(str(found))
            elif wrong := _wrong(found):
                left_out.append(f"{path}:{number}: {wrong}")
            else:
                records.append(found)
    return records, left_out


def _files(path: str) -> list[str]:
    """The events files in a folder; a file is itself."""
    return sorted(glob.glob(glob.escape(path) + "/events-*.jsonl")) if os.path.isdir(path) else [path]


def _wrong(record: Record) -> str:
    """What is wrong with a record; empty if its fields are what the report expects."""
    missing = [name for name in (*_NEEDED, *_NEEDED_BY.get(record["event"], ())) if name not in record]
    if missing:
        return f"{missing[0]} is missing"
    wrong = (name for name in _FITS.keys() & record.keys() if not _FITS[name](record[name]))
    return next((f"{name} is {record[name]!a:.40}" for name in wrong), "")


def by_job(records: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """Sorts events into jobs, in the order of their first events.

    Two jobs may have the same name, or none: torchrun without ``--rdzv-id`` calls all of them ``none``. So
    events belong to one job if they are about the same iteration (by its nonce, which is unique), or about
    the same process, which goes on from one iteration to the next.

    Args:
        records: of all hosts, in any order.

    Returns:
        For each job its name, followed by a number if several have that name, and its events.
    """
    import networkx  # type: ignore[import-untyped]  # only here: it takes a while

    records = list(_by_boot(records))
    # An agent has the name of its job in some of its events only: its environment does not name it.
    names: dict[Hashable, set[str]] = collections.defaultdict(set)
    for record in records:
        names[record["host"], record["pid"]].update({record.get("job", "")} - {""})
    processes = []
    for record in records:
        others = names[record["host"], record["pid"]]
        name = record.get("job") or (min(others) if len(others) == 1 else "")
        processes.append((name, record["host"], record["pid"]))
    with_nonces = {
        process[0] for process, record in zip(processes, records, strict=True) if "nonce" in record
    }
    graph = networkx.Graph()
    for process, record in zip(processes, records, strict=True):
        graph.add_node(process)
        if "nonce" in record:
            graph.add_edge(process, (process[0], record["nonce"]))
        elif process[0] not in with_nonces:
            graph.add_edge(process, process[0])  # before the first iteration there is nothing but the name
        if "child" in record:
            graph.add_edge(process, (*process[:2], record["child"]))
    part = {one: number for number, nodes in enumerate(networkx.connected_components(graph)) for one in nodes}
    found: dict[int, tuple[str, list[Record]]] = {}
    called: collections.Counter[str] = collections.Counter()
    for process, record in zip(processes, records, strict=True):
        number, name = part[process], process[0]
        if number not in found:
            called[name] += 1
            title = name if called[name] == 1 else f"{name} ({called[name]})".strip()
            found[number] = title, []
        found[number][1].append(record)
    return list(found.values())


def _by_boot(records: Iterable[Record]) -> Iterator[Record]:
    """A machine that was started again is another host: its clock and its process numbers begin again."""
    names: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for record in records:
        host, boot = record["host"], record.get("boot", "")
        known = names[host]
        another = f"{host} (boot {len(known) + 1})" if known else host
        name = known.setdefault(boot, another) if boot else host
        yield record if name == host else {**record, "host": name}
