"""`ftrun report` of a file with a record that no process of ours has written so."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from simulated_job import simulate
from support.nightly import at_night

from ft_wrapper.report import command

ODD = (None, -1, "x", "", [], {}, [1], 1e308, True, 10**30, "\ud800", float("nan"), 2.5, -1e14, "\x00\x1b[2J")


def odd_line(chance: random.Random, record: dict[str, Any]) -> str:
    """A line that a crash, another program or another version may leave in a file."""
    text = json.dumps(record)
    field = chance.choice(sorted(record))
    changed = [
        json.dumps({name: value for name, value in record.items() if name != field}),
        json.dumps(record | {field: chance.choice(ODD)}),
        json.dumps(record | {field: chance.choice(ODD)}),
        text[: chance.randrange(len(text))],
        "".join(chr(chance.choice([1, 27, *range(32, 0x300)])) for _ in range(chance.randrange(1, 50))),
        chance.choice(
            ['"a"', "7", "null", "[]", "{}", '{"event": {}}', '{"step": 3, "loss": 0.1}', "[" * 9000]
        ),
    ]
    return chance.choice(changed)


@pytest.mark.parametrize("draws", [40, *at_night("40 draws are made always", [500])])
def test_an_odd_record_is_left_out_counted_and_named(
    draws: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is that of the other records; stderr names the file and the line of the odd one."""
    found = simulate(4, nodes=2, ranks=2, spare_nodes=0, between=20.0)
    path, left_out = tmp_path / "events", 0
    for seed in range(draws):
        chance = random.Random(seed)
        place = chance.randrange(len(found))
        lines = [json.dumps(record) for record in found]
        lines[place] = odd_line(chance, found[place])
        path.write_text("\n".join(lines) + "\n", errors="replace")
        assert command.main([str(path), *(["--html", str(tmp_path / "page")] if seed % 25 == 0 else [])]) == 0
        said = capsys.readouterr()
        assert (
            said.err.startswith(f"ftrun report: 1 record left out, the first at {path}:{place + 1}: ")
            or not said.err
        )
        if said.err:
            left_out += 1
            path.write_text("\n".join(lines[:place] + lines[place + 1 :]) + "\n")
            assert command.main([str(path)]) == 0
            assert capsys.readouterr().out == said.out
    assert left_out > draws / 2
