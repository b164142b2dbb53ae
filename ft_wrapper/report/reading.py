"""Events files as the records of jobs, without lines that are no record of an event."""

import collections
import glob
import os
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain

from .. import events
from ..events import Record

# The types of the fields that the report uses, as JSON has them.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("event", "job", "host", "boot", "nonce", "after", "kind", "cause", "message", "line"), (str,)
    ),
    **dict.fromkeys(("monotonic", "time", "started", "began", "since"), (int, float)),
    **dict.fromkeys(
        ("pid", "child", "slot", "rank", "incarnation", "iteration", "call", "step", "committed"), (int,)
    ),
    "culprits": (list,),
    "ends": (bool,),
}
_MOST = 6e10  # a time of day beyond that is in no year that a date can have
_NEEDED = ("event", "host", "pid", "monotonic")
_NEEDED_BY = {
    "register": ("slot", "incarnation"),
    "decided": ("iteration",),
    "fault": ("slot",),
    "rank_started": ("child",),
    "rank_ended": ("child",),
    "restarted": ("kind", "cause", "culprits", "line"),
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
    """What a folder has of a job's hosts; a file is itself."""
    return sorted(glob.glob(glob.escape(path) + "/events-*.jsonl")) if os.path.isdir(path) else [path]


def _wrong(record: Record) -> str:
    """What is wrong with a record; empty if its fields are what the report expects."""
    missing = [name for name in (*_NEEDED, *_NEEDED_BY.get(record["event"], ())) if name not in record]
    if missing:
        return f"{missing[0]} is missing"
    for name in _TYPES.keys() & record.keys():
        value = record[name]
        is_right = type(value) in _TYPES[name]
        if is_right and isinstance(value, str):
            is_right = value.encode(errors="ignore").decode() == value  # JSON can have half a character
        elif is_right and isinstance(value, list):
            is_right = all(type(part) is int for part in value)
        elif is_right:
            is_right = abs(value) < _MOST
        if not is_right:
            return f"{name} is {value!a:.40}"
    return ""


def by_job(records: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """Sorts events into jobs, in the order of their first events.

    Two jobs may have the same name, or none: torchrun without ``--rdzv-id`` calls all of them ``none``. So
    those events are one job's that tell of the same iteration (by its nonce, which no other one has), or
    of the same process, which goes on from one iteration to the next.

    Args:
        records: of all hosts, in any order.

    Returns:
        Of each job the name, with a number behind it if there are several of that name, and its events.
    """
    import networkx  # type: ignore[import-untyped]  # only here: it takes a while

    records = list(_by_boot(records))
    # An agent has the name of its job in some of its events only: its environment does not say it.
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
