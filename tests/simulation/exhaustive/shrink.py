"""Makes a failure smaller with a search: for the fewest places where its schedule departs from running on."""

from __future__ import annotations

import functools

from ft_wrapper.testing.scheduler import ReplayPolicy, SchedulerError
from tests.explorer.failure import Shrinker, SwitchPolicy, attempt, elsewhere
from tests.explorer.scenario import Scenario

from .search import Branch, Search

_MOST_DEPARTURES = 3


class SearchingShrinker(Shrinker):
    """Tries every schedule with fewer departures as well, perhaps with one of the faults at another step."""

    def drop_switches(self) -> None:
        """See `Shrinker`."""
        super().drop_switches()
        for departures in range(min(len(self.failure.switches), _MOST_DEPARTURES)):
            if any(self._search(scenario, departures) for scenario in elsewhere(self.failure.scenario)):
                break

    def _search(self, scenario: Scenario, departures: int) -> bool:
        search = Search(functools.partial(self.make, scenario), departures)
        start: list[Branch] | None = None
        before = self.runs
        while self.runs < self.most_runs:
            try:
                search.run(start, most=self.most_runs - before)
            except SchedulerError:
                found = attempt(self.make, scenario, ReplayPolicy(search.choices, SwitchPolicy(())))
                if found is not None and self.same(found):
                    self.failure = found
                    return True
                start = search.pending  # another way of going wrong
            else:
                return False
            finally:
                self.runs = before + search.count.schedules
        return False
