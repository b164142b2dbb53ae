"""Which events belong to one job, where several have written to the same files."""

import collections
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]


class _Groups:
    """Things that belong together because each has something to do with another one (union-find)."""

    def __init__(self) -> None:
        self._towards: dict[Hashable, Hashable] = {}

    def of(self, thing: Hashable) -> Hashable:
        """What stands for all that belong together with a thing."""
        path = []
        while (following := self._towards.setdefault(thing, thing)) != thing:
            path.append(thing)
            thing = following
        for each in path:
            self._towards[each] = thing
        return thing

    def join(self, one: Hashable, other: Hashable) -> None:
        """Says that two things belong together."""
        self._towards[self.of(one)] = self.of(other)


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
    records = list(_by_boot(records))
    # An agent has the name of its job in some of its events only: its environment does not say it.
    names: dict[Hashable, set[str]] = collections.defaultdict(set)
    for record in records:
        if record.get("job") and "host" in record and "pid" in record:
            names[_process(record, "pid")].add(str(record["job"]))
    named: dict[str, list[Record]] = {}
    for record in records:
        name = str(record.get("job", ""))
        if not name and "host" in record and "pid" in record:
            known = names.get(_process(record, "pid"), set())
            name = next(iter(known)) if len(known) == 1 else ""
        named.setdefault(name, []).append(record)
    found: list[tuple[str, list[Record]]] = []
    for name, members in named.items():
        parts = _apart(members)
        found += [(name if number == 1 else f"{name} ({number})".strip(), part) for number, part in parts]
    return found


def _by_boot(records: Iterable[Record]) -> Iterator[Record]:
    """A machine that was started again is another host: its clock and its process numbers begin again."""
    names: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for record in records:
        host, boot = str(record.get("host", "")), str(record.get("boot", ""))
        known = names[host]
        another = f"{host} (boot {len(known) + 1})" if known else host
        name = known.setdefault(boot, another) if boot else host
        yield record if name == host else {**record, "host": name}


def _apart(records: Sequence[Record]) -> list[tuple[int, list[Record]]]:
    """The jobs of one name, numbered by their first events."""
    if not any("nonce" in record for record in records):
        return [(1, list(records))]  # of an older version: there is nothing but the name to go by
    groups = _Groups()
    for record in records:
        process = _process(record, "pid")
        if "child" in record:
            groups.join(process, _process(record, "child"))
        if "nonce" in record:
            groups.join(process, ("iteration", record["nonce"]))
    parts: dict[Hashable, list[Record]] = collections.defaultdict(list)
    for record in records:
        parts[groups.of(_process(record, "pid"))].append(record)
    return list(enumerate(parts.values(), start=1))


def _process(record: Record, field: str) -> Hashable:
    return "process", str(record["host"]), int(record[field])
