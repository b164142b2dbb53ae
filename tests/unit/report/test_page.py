"""The page and the picture of a report, and the options that write them."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from simulated_job import SimulatedJob, lines, simulate

from ft_wrapper.report import command, make_reports
from ft_wrapper.report.page import STATES, Picture, clean, make_page, moment, per_cent, shortened, ticks

VOID = {"meta", "br"}
HOSTILE = (
    "raised RuntimeError: </title><script>alert(1)</script><img src=x onerror=y> & \x1b[31m \ud800 $x_1$"
)


class Parser(HTMLParser):
    """Reads a page, and holds that it is well-formed.

    Attributes:
        tags: all that were opened.
        text: what a reader sees, and tooltips.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text.append(data)


def page_of(records: Sequence[dict[str, Any]]) -> str:
    return make_page(make_reports(records))


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def written(tmp_path: Path, records: Sequence[dict[str, Any]], name: str = "events") -> str:
    path = tmp_path / name
    path.write_text("".join(lines(records)))
    return str(path)


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """A small job with a fault of each kind."""
    return simulate(4, nodes=3, ranks=2, between=100.0)


def test_the_page_has_each_rank_each_fault_and_all_buckets(records: list[dict[str, Any]]) -> None:
    (report,) = make_reports(records)
    marked = [incident for incident, _ in Picture(report).marks()]
    page = make_page([report])
    text = "\n".join(Parser(page).text)
    for slot in range(6):
        assert f"slot {slot} on gpu00{slot // 2}" in text
    assert len(report.incidents) == 4
    tooltips = [part.text or "" for svg in svgs(page) for part in svg.iter() if part.tag.endswith("}title")]
    for incident in report.incidents:
        assert incident.line in text
        marks = marked.count(incident)
        assert marks and sum(incident.line in tooltip for tooltip in tooltips) == 1 + marks
    for name in report.time.buckets:
        assert name in text and per_cent(report.time.share(name)) in text
    assert report.goodput is not None and per_cent(report.goodput) in text
    assert f"{report.time.steps:,} done, {report.time.steps_again:,} done again" in text
    for restart in report.restarts:
        assert f"{restart.iteration} → {restart.next_iteration}" in text and restart.cause in text
    bar, *_ = (svg for svg in svgs(page) if svg.get("class") == "bar")
    shares = [float(part.get("width", "").rstrip("%")) for part in bar.iter() if part.tag.endswith("rect")]
    assert sum(shares) == pytest.approx(100.0, abs=0.1)


def test_the_page_stands_alone_and_runs_nothing(records: list[dict[str, Any]]) -> None:
    page = page_of(records)
    parser = Parser(page)
    assert not {tag for tag, _ in parser.tags} & {"script", "link", "img", "iframe", "object", "base"}
    links = [
        value
        for _, attributes in parser.tags
        for name, value in attributes.items()
        if name in ("href", "src")
    ]
    assert links and all(link is not None and link.startswith("#") for link in links)
    ids = {attributes["id"] for _, attributes in parser.tags if "id" in attributes}
    assert {link[1:] for link in links if link} <= ids
    assert set(re.findall(r"url\((.)", page)) == {"#"} and "@import" not in page
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert page.isprintable() or not re.search("[\x00-\x08\x0b-\x1f]", page)


def test_a_state_is_told_by_words_and_a_pattern_too(records: list[dict[str, Any]]) -> None:
    page = page_of(records)
    text = "\n".join(Parser(page).text)
    for state in STATES:
        if f'class="s-{state.name}"' in page:
            assert text.count(state.title) >= 2, "in the legend, and as a tooltip"
        assert f'id="p-{state.name}"' in page and f".s-{state.name} {{ fill: url(#p-{state.name}); }}" in page


def test_whatever_a_message_says_is_text() -> None:
    job = SimulatedJob(nodes=2, ranks=2, job="<b>x</b> & y", message=HOSTILE)
    job.train(50.0)
    job.fail("EXCEPTION", 0)
    job.finish()
    for one in job.records:
        one["host"] = one["host"].replace("gpu", '"><i>')
    page = page_of(job.records)
    parser = Parser(page)
    assert not {tag for tag, _ in parser.tags} & {"script", "img", "b>x", "i"}
    assert "onerror" not in {name for _, attributes in parser.tags for name in attributes}
    text = "\n".join(parser.text)
    assert "</title><script>alert(1)</script><img src=x onerror=y> & \ufffd[31m \ufffd $x_1$" in text
    assert "job <b>x</b> & y" in text and 'slot 0 on "><i>000' in text
    assert len(svgs(page)) > 5
    page.encode()


def test_several_jobs_have_a_section_each(records: list[dict[str, Any]]) -> None:
    other = SimulatedJob(nodes=1, ranks=2, spare_nodes=0, job="other")
    other.train(50.0)
    other.finish()
    for record in other.records:
        record["host"] = "elsewhere"
    page = page_of([*records, *other.records])
    parser = Parser(page)
    ids = [attributes["id"] for _, attributes in parser.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and {"job-1", "job-2", "job-1-4"} <= set(ids)
    assert "job other" in parser.text and "job llm-70b" in parser.text


def test_goodput_that_is_not_known_says_why() -> None:
    job = SimulatedJob(nodes=1, ranks=2, spare_nodes=0)
    job.train(50.0)
    job.finish()
    untold = [
        {name: record[name] for name in record if name not in ("step", "began")} for record in job.records
    ]
    text = "\n".join(Parser(page_of(untold)).text)
    assert "unknown" in text and "the function reported no steps, see call_wrapper.ping(step)" in text


def test_events_of_no_rank_make_a_page(tmp_path: Path) -> None:
    agent = {"event": "agent_started", "job": "j", "host": "a", "pid": 1, "monotonic": 1.0}
    events = written(tmp_path, [agent])
    assert command.main([events, "--html", str(tmp_path / "page.html")]) == 0
    assert "job j" in Parser((tmp_path / "page.html").read_text()).text


# Very many ranks -------------------------------------------------------------------------------------------


def test_of_very_many_ranks_those_in_which_something_happened_come_first() -> None:
    (report,) = make_reports(simulate(2, nodes=40, ranks=8, spare_nodes=8))
    picture = Picture(report)
    assert len(report.time.rows) == 320 and len(picture.lines) == 64
    assert {incident.number: line for incident, line in picture.marks()} == {1: 0, 2: 1}
    parser = Parser(make_page([report]))
    assert any("64 of 320 are shown" in text for text in parser.text)


@pytest.mark.nightly("half a million events")
def test_4096_ranks_and_12_faults_of_all_kinds(tmp_path: Path) -> None:
    events = written(tmp_path, simulate(12, nodes=512, ranks=8, spare_nodes=8))
    assert command.main([events, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    Parser(page)
    assert len(page.encode()) < 2_000_000


# Files -----------------------------------------------------------------------------------------------------


def test_the_tables_are_printed_as_without_the_page(
    tmp_path: Path, records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    events = written(tmp_path, records)
    assert command.main([events, "--json"]) == 0
    printed = capsys.readouterr().out
    assert command.main([events, "--json", "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == printed
    assert json.loads(printed)["restarts"][3]["causes"][0].endswith("stopped answering: evicted")
    Parser((tmp_path / "page.html").read_text())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/page.html", "No such file or directory; name a file that can be written"),
        (".", "Is a directory"),
        ("events", "has events of a job, and would be lost"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_with_the_option(
    path: str,
    message: str,
    tmp_path: Path,
    records: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = Path(written(tmp_path, records)).read_bytes()
    assert command.main(["events", "--html", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ftrun report: error: --html {path}: ") and message in error
    assert Path("events").read_bytes() == before and os.listdir(tmp_path) == ["events"]


def test_an_old_page_stays_whole_if_there_is_no_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "page.html"
    old.write_text("old")
    assert command.main(["no-such-events", "--html", str(old)]) == 2
    assert "no-such-events" in capsys.readouterr().err
    assert old.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]


def test_a_new_page_takes_the_place_of_an_old_one(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    old, link = tmp_path / "page.html", tmp_path / "link.html"
    old.write_text("old")
    old.chmod(0o640)
    link.symlink_to(old)
    assert command.main([written(tmp_path, records), "--html", str(link)]) == 0
    assert link.is_symlink() and old.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["events", "link.html", "page.html"]


def test_a_device_is_written_and_not_replaced(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    assert command.main([written(tmp_path, records), "--html", "/dev/null"]) == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_disk_that_is_full_is_told_with_the_option(
    tmp_path: Path, records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([written(tmp_path, records), "--html", "/dev/full"]) == 2
    assert "--html /dev/full: No space left on device" in capsys.readouterr().err


# Words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.004, 0.7, 9.0, 43.0, 119.0, 600.0, 7300.0, 90_000.0, 5e6])
def test_ticks_are_few_and_differ(seconds: float) -> None:
    found = ticks(seconds)
    assert 3 <= len(found) <= 11 and found[0][0] == 0.0 and found[-1][0] <= seconds
    assert len({text for _, text in found}) == len(found)


def test_moments_are_told_as_the_length_of_the_job_asks_for() -> None:
    assert [moment(at, at) for at in (0.25, 43.21, 90.0 * 60, 5 * 3600.0, 50 * 3600.0)] == [
        "0.250 s",
        "43.2 s",
        "90:00 min",
        "5:00 h",
        "2 d 2 h",
    ]


def test_shares_say_when_they_are_more_than_nothing() -> None:
    assert [per_cent(share) for share in (0.0, 0.0001, 0.5816, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "58.2 %",
        "100.0 %",
    ]


def test_long_names_keep_both_ends() -> None:
    assert shortened("ip-10-0-12-34.eu-central-1.compute.internal", 20) == "ip-10-0-1…e.internal"
    assert shortened("short", 20) == "short"


def test_what_no_file_may_have_is_replaced() -> None:
    assert clean("a\x00b\udc80c\td\u00e9") == "a\ufffdb\ufffdc\td\u00e9"
    assert sys.maxunicode > 0xFFFF and clean("\U0001f642") == "\U0001f642"
