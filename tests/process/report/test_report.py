"""`ftrun report`: what the events of a job tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import markupsafe
import pytest
from support.warm_ftrun import run_python

from ft_wrapper import events
from ft_wrapper.report import PHASES, command, make_reports

EXAMPLE = Path(__file__).parents[3] / "examples" / "minimal.py"


def records(host: str, rows: list[tuple[float, str, int, int]], **more: Any) -> list[dict[str, Any]]:
    """Records of a host: moment, event, iteration and pid of each."""
    return [
        {"event": event, "iteration": n, "pid": pid, "monotonic": moment, "host": host, **more}
        for moment, event, n, pid in rows
    ]


def two_ranks(host: str = "a", slower: float = 0.0, since: float = 100.0) -> list[dict[str, Any]]:
    """Ten seconds with a restart in which one rank is lost."""
    found = records(host, [(since, "enter", 0, 1), (since + 1, "enter", 0, 2)], slot=0)
    found += records(host, [(since + 4, "fault", 0, 9)], slot=1, kind="TERMINATED")
    found += records(
        host,
        [
            (since + 4.1, "end", 0, 1),
            (since + 4.3, "abort", 0, 1),
            (since + 4.4, "left", 0, 1),
            (since + 4.5, "arrive", 0, 1),
            (since + 4.6, "end", 0, 2),  # of the one that is out
            (since + 4.7, "decided", 1, 1),
            (since + 5.5 + slower, "enter", 1, 1),
            (since + 4.7, "decided", 1, 3),
            (since + 9.0, "enter", 1, 3),  # of a process that joins: it is not back, but new
            (since + 9.5 + slower, "done", 1, 1),
            (since + 10.0 + slower, "left", 1, 1),
        ],
        slot=0,
    )
    return found


def test_phases_of_a_restart() -> None:
    (found,) = make_reports(two_ranks())
    (restart,) = found.restarts
    assert (restart.iteration, restart.next_iteration) == (0, 1)
    assert restart.causes == ("slot 1 (on a) terminated",) and restart.culprits == (1,)
    expected = {"notify": 0.1, "abort": 0.2, "leave": 0.1, "arrive": 0.1, "decide": 0.2, "enter": 0.8}
    assert restart.phases == pytest.approx(expected)
    assert restart.seconds == pytest.approx(1.5)
    assert found.seconds == pytest.approx(10.0)
    assert sum(found.time.buckets.values()) == pytest.approx(found.time.seat_seconds)
    assert found.goodput is None and found.time.buckets["steps_unknown"] > 0  # no steps were told


def test_clocks_of_two_hosts_are_not_compared_and_the_slower_one_is_shown() -> None:
    (found,) = make_reports(two_ranks() + two_ranks("b", slower=2.0, since=5e6))
    assert found.hosts == ("a", "b")
    (restart,) = found.restarts
    assert restart.seconds == pytest.approx(3.5)
    assert restart.cause == "slot 1 (on a) terminated; slot 1 (on b) terminated" and restart.culprits == (1,)
    assert found.seconds == pytest.approx(12.0)


def test_an_iteration_that_nobody_entered_belongs_to_the_restart_around_it() -> None:
    rows = [
        (0.0, "enter", 0, 1),
        (1.0, "fault", 0, 1),
        (1.1, "decided", 1, 1),
        (1.2, "fault", 1, 1),
        (1.3, "decided", 2, 1),
        (2.0, "enter", 2, 1),
    ]
    (found,) = make_reports(records("a", rows, slot=0))
    (restart,) = found.restarts
    assert (restart.iteration, restart.next_iteration) == (0, 2)
    assert restart.seconds == pytest.approx(1.0)


def test_numbers_that_begin_again_in_the_next_call_are_another_iteration() -> None:
    first = [(0.0, "enter", 0, 1), (1.0, "fault", 0, 1), (1.5, "decided", 1, 1), (2.0, "enter", 1, 1)]
    first.append((3.0, "done", 1, 1))
    second = [(moment + 4.0, *rest) for moment, *rest in first]
    found = [{**one, "nonce": f"a{one['iteration']}"} for one in records("a", first, slot=0)]
    found += [{**one, "nonce": f"b{one['iteration']}"} for one in records("a", second, slot=0)]
    (report,) = make_reports(found)
    assert [restart.seconds for restart in report.restarts] == pytest.approx([1.0, 1.0])


def test_calls_without_faults_may_have_the_same_number() -> None:
    one = [(0.0, "enter", 0, 1), (3.0, "done", 0, 1)]
    rows = [*one, *((moment + 4.0, *rest) for moment, *rest in one), (8.0, "left", 0, 1)]
    (found,) = make_reports(records("a", rows, slot=0))
    assert (found.restarts, found.seconds) == ((), 8.0)
    assert found.time.buckets["steps_unknown"] == 6.0


def test_jobs_that_wrote_to_the_same_file_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = records("a", [(300.0, "enter", 0, 7), (302.0, "done", 0, 7)], job="two", slot=0)
    mixed = [record | {"job": "one"} for record in two_ranks()] + other
    one, two = make_reports(mixed)
    assert (one.job, len(one.restarts), one.seconds) == ("one", 1, pytest.approx(10.0))
    assert (two.job, two.restarts, two.seconds) == ("two", (), pytest.approx(2.0))
    path = tmp_path / "events-a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in mixed))
    assert command.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job one:" and lines[4] == "1 restart in 10.0 s on a"
    second = lines.index("job two:")
    assert lines[second + 1] == "0 restarts in 2.0 s on a"
    assert lines[second - 1].endswith("the function reported no steps, see call_wrapper.ping(step)")
    assert command.main(["--json", str(path)]) == 0
    assert [json.loads(line)["job"] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]


def test_a_host_that_was_started_again_has_another_clock() -> None:
    def life(host: str, boot: str, n: int, *moments: tuple[float, str]) -> list[dict[str, Any]]:
        told = [(at, event, n, 7) for at, event in moments]
        return records(host, told, job="j", boot=boot, nonce=f"of {n}", slot=int(host == "b"), incarnation=n)

    stayed = life("a", "x", 0, (500.0, "register"), (501.0, "enter"))
    stayed += life("a", "x", 1, (1100.0, "decided"), (1500.0, "done"))
    lost = life("b", "y", 0, (1e6, "register"), (1e6 + 1, "enter"))  # its process 7 goes with the machine
    back = life("b", "z", 1, (30.0, "register"), (31.0, "enter"), (430.0, "done"))
    (found,) = make_reports([*stayed, *lost, *back])
    assert found.seconds == pytest.approx(1000.0)
    assert [row.host for row in found.time.rows] == ["a", "b", "b (boot 2)"]
    assert found.time.seat_seconds == pytest.approx(1000.0 + 1.0 + 400.0)


def test_processes_of_two_starts_of_a_machine_are_none_that_two_jobs_share() -> None:
    one = records("a", [(100.0, "enter", 0, 7)], nonce="of one", boot="x", slot=0)
    other = records("a", [(50.0, "enter", 0, 7)], nonce="of other", boot="y", slot=0)
    assert len(make_reports([*one, *other])) == 2


def test_events_tell_the_starts_of_a_machine_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(events.ENV, str(tmp_path / "events"))
    events.emit("done")
    (record,) = events.load(str(tmp_path / "events"))
    assert Path("/proc/sys/kernel/random/boot_id").read_text().startswith(record["boot"]) and record["boot"]


def test_the_report_of_a_real_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events"
    words = ["-m", "ft_wrapper.run", "--nproc-per-node", "2", EXAMPLE]
    done = run_python(words, 100, {"FT_WRAPPER_EVENTS": str(events)})
    assert done.returncode == 0, done.stderr
    assert command.main([str(events), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (restart,) = found["restarts"]
    assert (restart["kind"], restart["culprits"]) == ("exception", [1])
    assert restart["causes"][0].startswith("rank 1 (slot 1 on ")
    assert list(restart["phases"]) == list(PHASES)
    assert min(restart["phases"].values()) >= 0 and found["goodput"] is None
    assert sum(found["time"].values()) == pytest.approx(found["seat_seconds"])
    assert 2 * found["seconds"] == pytest.approx(found["seat_seconds"])
    assert command.main([str(events)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["iteration", *PHASES, "in", "all"]
    assert said[2].startswith("  rank 1 (slot 1 on ") and all(len(line) <= 80 for line in said)
    assert any(line.startswith("1 restart in ") for line in said) and " of 2 ranks;" in said[-2]
    written = [json.loads(line) for line in events.read_text().splitlines()]
    (job,) = {record["job"] for record in written}
    assert job
    (restarted,) = (record for record in written if record["event"] == "restarted")
    assert restarted["line"].startswith("restart 1: rank 1 (slot 1 on ") and restarted["iteration"] == 1
    (fault,) = (record for record in written if record["event"] == "fault" and record["slot"] == 1)
    assert fault["message"].startswith("raised ")
    page = tmp_path / "page.html"
    assert command.main([str(events), "--html", str(page)]) == 0
    assert page.read_text().count(markupsafe.escape(restarted["line"])) == 3  # list, number and mark


@pytest.mark.parametrize(
    "line", ["[" * 200_000, '{"event": ' + "9" * 5000 + "}", '{"event": "b", "ho{"e": "c"}', "7"]
)
def test_damaged_lines_are_left_out(line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A machine that crashed has cut one short, and goes on behind it; bytes of another file are in one."""
    path = tmp_path / "events"
    first, last = (json.dumps(records("h", [(1.0, event, 0, 1)])[0]) for event in "ad")
    path.write_bytes(f"{first}\n{line}\n".encode() + b"\xff\xfe\n" + f"{last}\n".encode())
    assert [record["event"] for record in events.load(str(path))] == ["a", "d"]
    assert f"2 damaged lines are left out, the first is {path}:2: " in caplog.text


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    """Nor Jinja2, but for the page; there the error names what to install."""
    path = tmp_path / "events"
    path.write_text("".join(json.dumps(record) + "\n" for record in two_ranks()))
    program = f"""
import sys, types
for name in ("torch", "jinja2"):
    sys.modules[name] = None
package = types.ModuleType("ft_wrapper")
package.__path__ = [{str(Path(events.__file__).parent)!r}]
sys.modules["ft_wrapper"] = package
from ft_wrapper.report.command import main
assert main([{str(path)!r}]) == 0
assert main([{str(path)!r}, "--html", {str(tmp_path / "page")!r}]) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.startswith("iteration ") and "pip install jinja2" in done.stderr
    assert os.listdir(tmp_path) == ["events"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "there are no events: was the job started with --events DIR"),
        ("{", "1 record left out, the first at "),
        ("{", ":1: no JSON record of an event"),
        ('{"event": "enter"}', ":1: host is missing"),
        ('{"event": "enter", "host": "a", "pid": NaN, "monotonic": 1}', ":1: pid is nan"),
    ],
)
def test_files_that_are_none(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events"
    if text is not None:
        path.write_text(text)
    assert command.main([str(path)]) == 2
    assert message in capsys.readouterr().err
