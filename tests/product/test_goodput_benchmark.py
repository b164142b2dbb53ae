"""`benchmarks/goodput.py`: what it counts, and a short run without peers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "goodput.py"
sys.path.insert(0, str(SCRIPT.parent))

from goodput import KINDS, Records, outcome, schedule  # noqa: E402


def test_a_schedule_has_a_fault_in_each_window_and_as_many_of_each_kind() -> None:
    faults = schedule(seed=3, seconds=600.0, every=20.0, ranks=4)
    assert [int(fault.at / 20.0) for fault in faults] == list(range(30))
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 10)
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    assert faults == schedule(3, 600.0, 20.0, 4) != schedule(4, 600.0, 20.0, 4)


def records(folder: Path, *ranks: list[tuple[float, int] | int]) -> Records:
    """Writes what ranks have done: the pid of a process that enters, or a moment and a step."""
    for rank, lines in enumerate(ranks):
        written: list[dict[str, Any]] = [
            {"event": "enter", "pid": line}
            if isinstance(line, int)
            else {"event": "step", "monotonic": line[0], "step": line[1]}
            for line in lines
        ]
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    return Records(folder, len(ranks))


def test_a_step_counts_once_and_when_all_ranks_have_done_it(tmp_path: Path) -> None:
    found = records(
        tmp_path,
        [10, (1.0, 0), (2.0, 1), (3.0, 2), 10, (7.0, 1), (8.0, 2), (9.0, 3)],
        [11, (1.5, 0), (2.5, 1), 12, (7.5, 1), (8.5, 2), (9.5, 3)],
    )
    moments = (0.9, 1.0, 1.5, 2.9, 3.0, 8.4, 8.5, 9.4, 9.5)
    assert [found.useful(moment) for moment in moments] == [0, 0, 1, 2, 2, 2, 3, 3, 4]
    assert found.again(0.0, 10.0) == 2, "rank 0 did steps 1 and 2 again, rank 1 only step 1"
    assert found.again(7.0, 10.0) == 1


def test_a_rank_that_goes_on_behind_a_step_has_done_it(tmp_path: Path) -> None:
    """A killed rank's next process gets the state of a peer, with the step that it had not told of."""
    found = records(tmp_path, [10, (1.0, 0), (2.0, 1), 10, (3.0, 2)], [11, (1.0, 0), 12, (3.5, 2)])
    assert [found.useful(moment) for moment in (2.0, 3.0, 3.5)] == [1, 1, 3]
    assert found.again(0.0, 10.0) == 0


def test_what_faults_cost_adds_up(tmp_path: Path) -> None:
    calm = [(float(i + 1), i) for i in range(10)]
    one = [10, *calm, (11.0, 10), 10, (15.0, 11), 20, (25.0, 11), (26.0, 12)]
    two = [11, *calm, (11.0, 10), 11, (15.0, 11), 11, (25.0, 11), (26.0, 12)]
    happened = [(11.0, "exception"), (15.0, "sigkill")]
    found = records(tmp_path, one, two)
    done = outcome(found, 1.5, 10.5, 30.5, happened, ended=False)
    assert (done.step, found.when(1), found.when(12)) == (1.0, 1.0, 15.0)
    assert (done.useful, done.again) == (3, 1)
    assert done.goodput == pytest.approx(3 / 20)
    assert done.lost == {"exception": [3.0], "sigkill": [14.5]}
    assert (done.faults, done.restarts, done.processes) == (2, 2, 1)


@pytest.mark.nightly("what its jobs do under faults is tested in tests/process/live and tests/process/faults")
def test_it_goes_through_a_fault_of_each_kind_and_prints_the_table(tmp_path: Path) -> None:
    options = ["--only", "ft_wrapper", "--at-once", "--keep", str(tmp_path), "--ranks", "2", "--step", "0.05"]
    options += ["--minutes", "0.4", "--every", "8", "--calm", "2", "--hang-timeout", "3", "--seed", "3"]
    command = [sys.executable, str(SCRIPT), *options, "--checkpoint-every", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    printed = "".join(path.read_text() for path in sorted(tmp_path.glob("*/output.txt")))
    assert done.returncode == 0, done.stderr + printed
    title, headers, _, *rows = (re.split(r"\s{2,}", line) for line in done.stdout.splitlines()[-5:])
    assert "seed 3, all at once: medians of 1 run" in title[0]
    live, checkpoints = (dict(zip(headers, row, strict=True)) for row in rows)
    assert (live["system"], checkpoints["system"]) == ("ft_wrapper, live state", "ft_wrapper, checkpoints")
    for row in (live, checkpoints):
        assert (row["faults"], row["ended by itself"]) == ("3", "no"), printed
        assert int(row["restarts"]) >= 3 and int(row["new processes"]) >= 2, "SIGKILL and the hang"
        assert 0 < float(row["goodput"].rstrip("%")) < 100
    assert live["done again"] == "0" != checkpoints["done again"]
