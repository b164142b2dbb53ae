"""The shortest failing schedule of each mistake: kept in ``shortest.json``, shown in ``mistakes.md``.

``python tests/simulation/protocol/shortest.py`` looks for those that fail no more, and writes both files;
``--anew`` looks for all. That takes a minute or two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is run as a program, too

from mistakes import MISTAKES, Mistake

from ft_wrapper.testing.scheduler import RandomPolicy
from tests.explorer.explore import without_logging
from tests.explorer.failure import Failure, Shrinker, Switch, SwitchPolicy, attempt
from tests.explorer.scenario import Disturbance, Scenario

DATA = Path(__file__).with_name("shortest.json")
PAGE = Path(__file__).with_name("mistakes.md")
AGAIN = "look for it again: python tests/simulation/protocol/shortest.py"

STARTS = 3
"""How many failures are made smaller, of which the smallest is kept."""

_HEADER = """\
```{list-table}
:header-rows: 1
:widths: 22 26 52

* - the mistake
  - what happens
  - the shortest failing schedule found
"""


# Finding them


def find(mistake: Mistake) -> Failure:
    """The smallest failure that a mistake was found to lead to."""
    found: list[Failure] = []
    for scenario, seed in mistake.scenarios():
        failure = attempt(mistake.make, scenario, RandomPolicy(seed))
        if failure is not None and shows(mistake, failure):
            shrinker = Shrinker(mistake.make, failure, same=lambda smaller: shows(mistake, smaller))
            found.append(shrinker.shrink())
            if len(found) == STARTS:
                break
    if not found:
        raise LookupError(f"nothing found: {mistake.row}")
    return min(found, key=_size)


def shows(mistake: Mistake, failure: Failure) -> bool:
    """Whether a failure is what the mistake leads to."""
    return mistake.finds in failure.what


def _size(failure: Failure) -> tuple[int, ...]:
    scenario = failure.scenario
    return len(scenario.disturbances), scenario.members, len(failure.switches), failure.steps


# Keeping them


def load() -> dict[str, Any]:
    """The schedules that are kept, by the mistakes' rows."""
    kept: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return kept


def replay(mistake: Mistake, kept: dict[str, Any]) -> Failure | None:
    """The failure that a mistake's schedule leads to; None if it leads to none any more."""
    schedule = kept.get(mistake.row)
    if schedule is None:
        return None
    scenario, switches = from_json(schedule)
    failure = attempt(mistake.make, scenario, SwitchPolicy(switches))
    return failure if failure is not None and shows(mistake, failure) else None


def from_json(schedule: dict[str, Any]) -> tuple[Scenario, list[Switch]]:
    """A scenario, and the switches of its schedule."""
    disturbances = tuple(Disturbance(**disturbance) for disturbance in schedule["disturbances"])
    switches = [Switch(**switch) for switch in schedule["switches"]]
    return Scenario(**schedule["scenario"], disturbances=disturbances), switches


def to_json(failure: Failure) -> dict[str, Any]:
    """What `from_json` reads: only what is not as usual."""
    scenario = _unusual(failure.scenario)
    scenario.pop("disturbances", None)
    return {
        "scenario": scenario,
        "disturbances": [_unusual(disturbance) for disturbance in failure.scenario.disturbances],
        "switches": [_unusual(dataclasses.replace(switch, before="")) for switch in failure.switches],
    }


def _unusual(record: Any) -> dict[str, Any]:
    fields = dataclasses.fields(record)
    return {
        field.name: getattr(record, field.name)
        for field in fields
        if getattr(record, field.name) != field.default
    }


# Showing them


def table(failures: Iterable[tuple[Mistake, Failure]]) -> str:
    """The table for the documentation."""
    rows = "".join(_row(mistake, failure) for mistake, failure in failures)
    note = "% Written by tests/simulation/protocol/shortest.py. A test checks that it is up to date.\n\n"
    return f"{note}{_HEADER}{rows}```\n"


def _row(mistake: Mistake, failure: Failure) -> str:
    members, active = failure.scenario.members, failure.scenario.active
    ranks = f"{members} ranks" if active >= members else f"{members} ranks, {active} of them active"
    story = [f"{number}. {sentence}" for number, sentence in enumerate(failure.story, 1)]
    lines = [
        f"* - {mistake.row}",
        f"  - {mistake.effect}",
        f"  - {ranks}:",
        "",
        *story,
        "",
        _verdict(failure),
    ]
    return "\n".join(lines[:3] + [f"    {line}".rstrip() for line in lines[3:]]) + "\n"


def _verdict(failure: Failure) -> str:
    """What the checker says, for people."""
    what = failure.what
    for pattern, replacement in _FOR_PEOPLE:
        what = re.sub(pattern, replacement, what)
    return f"*{what}*"


_FOR_PEOPLE = (
    (r"^Violation(?: in '.*?')?: ", ""),
    (r" in 'rank \w+'(?=:)", ""),
    (r"more than \d+ virtual seconds; ", ""),
    (r"ft_wrapper/1/", ""),
    (r"\b(?:heart|report) (\w+)", r"the monitor of rank \1"),
    (r" is failed,", " gives up,"),
    (r"^I4: (\d+) ended", r"I4: iteration \1 was ended"),
    (r"(though nothing was done to it|no one went on|another rank [\d ]+\d)[:;].*", r"\1"),
)


def main(arguments: list[str] | None = None) -> int:
    """Looks for schedules, and writes them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anew", action="store_true", help="look for all of them, whether they fail or not")
    options = parser.parse_args(arguments)
    kept = {} if options.anew else load()
    failures = []
    with without_logging():
        for mistake in MISTAKES:
            failure = replay(mistake, kept)
            if failure is None:
                print(f"looking for: {mistake.row}", flush=True)
                failure = find(mistake)
                print(failure, flush=True)
            failures.append((mistake, failure))
    data = {mistake.row: to_json(failure) for mistake, failure in failures}
    DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(table(failures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
