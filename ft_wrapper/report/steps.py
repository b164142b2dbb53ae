"""Which steps of a job were new and which were done again, from what its ranks have told."""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

from .rows import Record, Row, iteration_name

Key = tuple[str, int]  # an iteration; and how often its function had gone back


@dataclasses.dataclass
class Told:
    """The steps that one process told in an iteration, until its function went back.

    Args:
        points: when a step began, and its number: the first one, the last one, and some between.
        has_returned: whether the function returned after the last one.
    """

    points: list[tuple[float, int]]
    has_returned: bool = False

    @property
    def first(self) -> int:
        """The first step."""
        return self.points[0][1]

    @property
    def last(self) -> int:
        """The last step that has begun."""
        return self.points[-1][1]

    def began(self, step: int) -> float:
        """When a step between the first and the last one began; between two points as if all took equally."""
        after = bisect.bisect_left(self.points, step, key=lambda point: point[1])
        at, number = self.points[after]
        if number == step:
            return at
        before, lower = self.points[after - 1]
        return before + (at - before) * (step - lower) / (number - lower)


@dataclasses.dataclass
class Part:
    """An iteration, or what of it came before or after its function went back.

    Args:
        begun: the steps below this one were done before, by earlier iterations; None if there was none.
        first: the first step.
        done: the steps from the first one to below this one were done here.
    """

    begun: int | None
    first: int
    done: int

    @property
    def again(self) -> int:
        """How many steps were done again."""
        return 0 if self.begun is None else max(0, min(self.done, self.begun) - self.first)

    @property
    def new(self) -> int:
        """How many steps were done that no one had done before."""
        return max(0, self.done - self.first - self.again)


@dataclasses.dataclass
class Steps:
    """The steps of a job.

    Args:
        told: by process (host, slot, incarnation) and iteration, in order.
        parts: what was new in it and what was not.
        calls: the wrapped call of each iteration.
    """

    told: dict[tuple[str, int, int], dict[str, list[Told]]]
    parts: dict[Key, Part]
    calls: dict[str, str]

    @functools.cached_property
    def telling(self) -> set[str]:
        """The calls in which any rank told steps."""
        return {self.calls.get(n, "") for n, _ in self.parts}

    @functools.cached_property
    def _told_in(self) -> set[tuple[str, int, str | None]]:
        """Each rank, with each call in which it told steps."""
        told = ((who, n) for who, iterations in self.told.items() for n in iterations)
        return {(host, slot, self.calls.get(n)) for (host, slot, _), n in told}

    def had_none_yet(self, host: str, slot: int, iteration: str) -> bool:
        """Whether a rank that told no step in an iteration was not that far yet; else it tells none."""
        call = self.calls.get(iteration, "")
        if call in self.telling and (iteration, 0) in self.parts:
            return (host, slot, call) in self._told_in
        return call in self.telling


def read_steps(records: Sequence[Record], rows: Sequence[Row]) -> Steps:
    """Reads what the ranks have told.

    Args:
        records: of one job, in any order.
        rows: of it.
    """
    names = {
        (row.host, life.pid): (row.host, row.slot, life.incarnation) for row in rows for life in row.lives
    }
    points: dict[tuple[str, int, int], dict[str, list[tuple[float, int]]]] = {}
    returned: set[tuple[tuple[str, int, int], str]] = set()
    for record in records:
        who = (str(record["host"]), int(record.get("slot", -1)), int(record.get("incarnation", 0)))
        who = names.get((who[0], int(record["pid"])), who)
        n = iteration_name(record)
        if record["event"] in ("returned", "done"):
            returned.add((who, n))
        if "step" in record and "began" in record:
            points.setdefault(who, {}).setdefault(n, []).append((float(record["began"]), int(record["step"])))
    told = {
        who: {n: _in_order(found, (who, n) in returned) for n, found in iterations.items()}
        for who, iterations in points.items()
    }
    order, calls = _iterations(records)
    return Steps(told, _parts(told, order, calls, records), calls)


def _in_order(points: Iterable[tuple[float, int]], has_returned: bool) -> list[Told]:
    found: list[Told] = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1].last:
            found.append(Told([point]))
        elif point[1] > found[-1].last:
            found[-1].points.append(point)
    found[-1].has_returned = has_returned
    return found


def _iterations(records: Iterable[Record]) -> tuple[list[str], dict[str, str]]:
    """The iterations in their order, and the wrapped call of each."""
    seen: dict[str, tuple[float, int]] = {}
    calls: dict[str, str] = {}
    after: dict[str, str] = {}
    for record in records:
        if not isinstance(record.get("iteration"), int) or record["iteration"] < 0:
            continue
        if record["event"] not in ("decided", "enter", "spare", "step"):
            continue
        n = iteration_name(record)
        moment = float(record["time"] if "time" in record else record["monotonic"])
        seen[n] = min(seen.get(n, (moment, 0)), (moment, record["iteration"]))
        if "after" in record:
            after[n] = str(record["after"])
        calls[n] = str(record.get("call", 0))
    for n in calls:  # where each call has a store of its own, all of them have the number 0
        root = n
        while root in after and after[root] in calls:
            root = after[root]
        calls[n] = f"{root}/{calls[n].rpartition('/')[2]}"
    return sorted(seen, key=lambda n: seen[n]), calls


def _parts(
    told: dict[tuple[str, int, int], dict[str, list[Told]]],
    order: Sequence[str],
    calls: dict[str, str],
    records: Iterable[Record],
) -> dict[Key, Part]:
    committed: dict[str, int] = collections.defaultdict(int)
    complete: set[str] = set()
    for record in records:
        n = iteration_name(record)
        committed[n] = max(committed[n], int(record.get("committed", 0)))
        if record["event"] == "done":
            complete.add(calls.get(n, ""))
    parts: dict[Key, Part] = {}
    call, begun = "", None
    newest: tuple[Part, int] | None = None  # and the last step that has begun there
    for n in order:
        if calls[n] != call:
            if call in complete:
                begun, newest = None, None  # else the job went on there with what had not come to its end
            call = calls[n]
        ranks = [iterations[n] for iterations in told.values() if n in iterations]
        for place in range(max(map(len, ranks), default=0)):
            here = [rank[place] for rank in ranks if place < len(rank)]
            first, last = min(each.first for each in here), max(each.last for each in here)
            if newest is not None and first == newest[1] + 1 and newest[0].done < first:
                newest[0].done = first  # it came to its end, though no one had begun the next one
                begun = max(begun or 0, first)
            is_last = place == max(map(len, ranks)) - 1
            done = max(each.last + each.has_returned for each in here)
            parts[n, place] = part = Part(begun, first, max(done, committed[n] if is_last else 0, first))
            newest, begun = (part, last), max(begun or 0, part.done)
    return parts
