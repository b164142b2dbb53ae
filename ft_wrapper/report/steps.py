"""Which steps of a job were done again, from what its ranks have told."""

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Mapping

from .timeline import Iteration, Seat, Timeline, nonce_of

Key = tuple[str, int]  # an iteration; and how often its function had gone back
Process = tuple[str, int, int]  # a host, a slot, an incarnation


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

    told: dict[Process, dict[str, list[Told]]]
    parts: dict[Key, Part]
    calls: dict[str, str]

    @functools.cached_property
    def _reporting(self) -> dict[str, set[Seat]]:
        """By call, the seats that reported steps in it."""
        seats: dict[str, set[Seat]] = {}
        for (host, slot, _), iterations in self.told.items():
            for call in {self.calls[n] for n in iterations if n in self.calls}:
                seats.setdefault(call, set()).add((host, slot))
        return seats

    def had_none_yet(self, host: str, slot: int, iteration: str) -> bool:
        """Whether a rank that told no step in an iteration was not that far yet; else it tells none."""
        seats = self._reporting.get(self.calls.get(iteration, ""), set())
        return (host, slot) in seats if (iteration, 0) in self.parts else bool(seats)


def read_steps(timeline: Timeline) -> Steps:
    """Reads what the ranks have told.

    Args:
        timeline: of a job.
    """
    rows = timeline.rows
    names = {
        (row.host, life.pid): (row.host, row.slot, life.incarnation) for row in rows for life in row.lives
    }
    points: dict[Process, dict[str, list[tuple[float, int]]]] = {}
    returned: set[tuple[Process, str]] = set()
    for host, records in timeline.hosts.items():
        for record in records:
            unknown = host, record.get("slot", -1), record.get("incarnation", 0)
            who, n = names.get((host, record["pid"]), unknown), nonce_of(record)
            if record["event"] in ("returned", "done"):
                returned.add((who, n))
            if "step" in record and "began" in record:
                points.setdefault(who, {}).setdefault(n, []).append((record["began"], record["step"]))
    told = {
        who: {n: _in_order(found, (who, n) in returned) for n, found in iterations.items()}
        for who, iterations in points.items()
    }
    calls = _calls(timeline.iterations)
    return Steps(told, _parts(told, timeline.iterations, calls), calls)


def _in_order(points: Iterable[tuple[float, int]], has_returned: bool) -> list[Told]:
    found: list[Told] = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1].last:
            found.append(Told([point]))
        elif point[1] > found[-1].last:
            found[-1].points.append(point)
    found[-1].has_returned = has_returned
    return found


def _calls(iterations: Mapping[str, Iteration]) -> dict[str, str]:
    """The wrapped call of each iteration, with its first iteration: each call may have a store of its own."""
    calls = {}
    for name, one in iterations.items():
        root = one
        while root.after in iterations and iterations[root.after].began is not None:
            root = iterations[root.after]
        if one.began is not None:
            calls[name] = f"{root.name}/{one.call}"
    return calls


def _parts(
    told: Mapping[Process, Mapping[str, list[Told]]],
    iterations: Mapping[str, Iteration],
    calls: Mapping[str, str],
) -> dict[Key, Part]:
    complete = {calls.get(one.name, "") for one in iterations.values() if one.of("done")}
    parts: dict[Key, Part] = {}
    call, begun = "", None
    newest: tuple[Part, int] | None = None  # and the last step that has begun there
    for n in calls:
        if calls[n] != call:
            if call in complete:
                begun, newest = None, None  # else the job went on there with what had not come to its end
            call = calls[n]
        ranks = [own[n] for own in told.values() if n in own]
        for place in range(max(map(len, ranks), default=0)):
            here = [rank[place] for rank in ranks if place < len(rank)]
            first, last = min(each.first for each in here), max(each.last for each in here)
            if newest is not None and first == newest[1] + 1 and newest[0].done < first:
                newest[0].done = first  # it came to its end, though no one had begun the next one
                begun = max(begun or 0, first)
            is_last = place == max(map(len, ranks)) - 1
            done = max(each.last + each.has_returned for each in here)
            parts[n, place] = part = Part(
                begun, first, max(done, iterations[n].committed if is_last else 0, first)
            )
            newest, begun = (part, last), max(begun or 0, part.done)
    return parts
