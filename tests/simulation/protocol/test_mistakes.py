"""Each mistake that the documentation tells of, put back: it is found, and its shortest schedule shows it."""

from __future__ import annotations

import pytest
import shortest
from loop_mistakes import LOOP_MISTAKES
from mistakes import MISTAKES, Mistake

from ft_wrapper.testing.scheduler import RandomPolicy
from tests.explorer.explore import Explorer
from tests.explorer.failure import SwitchPolicy, attempt

each_mistake = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.row)


@pytest.mark.parametrize("mistake", [*MISTAKES, *LOOP_MISTAKES], ids=lambda mistake: mistake.row)
def test_explorer_finds_it(mistake: Mistake) -> None:
    for scenario, seed in mistake.scenarios():
        failure = attempt(mistake.make, scenario, RandomPolicy(seed))
        if failure is not None and shortest.shows(mistake, failure):
            right = attempt(Explorer().simulation, scenario, RandomPolicy(seed))
            assert right is None, f"it goes wrong without the mistake as well: {right}"
            return
    pytest.fail(f"nothing found: {mistake.row}")


@each_mistake
def test_shortest_schedule_shows_it(mistake: Mistake) -> None:
    kept = shortest.load()
    failure = shortest.replay(mistake, kept)
    assert failure is not None, f"the schedule that is kept does not lead to it any more; {shortest.AGAIN}"
    print(f"{mistake.row}:\n{failure}")
    scenario, switches = shortest.from_json(kept[mistake.row])
    assert len(failure.switches) == len(switches), f"it took other turns than those kept; {shortest.AGAIN}"
    right = attempt(Explorer().simulation, scenario, SwitchPolicy(switches))
    assert right is None, f"it goes wrong without the mistake as well: {right}"


def test_table_in_the_documentation_is_up_to_date() -> None:
    kept = shortest.load()
    assert list(kept) == [mistake.row for mistake in MISTAKES], shortest.AGAIN
    failures = [(mistake, shortest.replay(mistake, kept)) for mistake in MISTAKES]
    told = [(mistake, failure) for mistake, failure in failures if failure is not None]
    assert shortest.PAGE.read_text() == shortest.table(told), shortest.AGAIN
