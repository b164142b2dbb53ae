"""The page of ``ftrun report --html``: one file, which needs no network and runs no script.

It is built as a tree, so that every text in it is escaped.
"""

import importlib.resources
from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from .._text import duration, plural
from . import PHASES, Report
from .drawing import add, draw_bar, draw_swatch, draw_timeline, patterns
from .goodput import BUCKETS
from .look import LOOKS, moment, per_cent, shape_of, summary
from .timeline import STATE_OF, Timeline, shares_of

_UNKNOWN = "the function told no steps, see call_wrapper.step(n)"


def make_page(jobs: Sequence[tuple[Report, Timeline]]) -> str:
    """Makes the page.

    Args:
        jobs: a section for each.
    """
    page = Element("html", lang="en")
    head = add(page, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    # Nothing is loaded and nothing runs, whatever stands in a message.
    rule = "default-src 'none'; style-src 'unsafe-inline'"
    add(head, "meta", http_equiv="Content-Security-Policy", content=rule)
    add(head, "meta", name="color-scheme", content="light dark")
    add(head, "title", ", ".join(f"{_name(report)}: {_goodput(report)} goodput" for report, _ in jobs[:4]))
    add(head, "style", _style())
    body = add(page, "body")
    body.append(patterns())
    main = add(body, "main")
    if len(jobs) > 1:
        _contents(main, jobs)
    for number, (report, timeline) in enumerate(jobs, start=1):
        _section(main, f"job-{number}", report, timeline)
    return f"<!doctype html>\n{ElementTree.tostring(page, encoding='unicode', method='html')}\n"


def _name(report: Report) -> str:
    return f"job {report.job}" if report.job else "job without a name"


def _goodput(report: Report) -> str:
    return "unknown" if report.goodput is None else per_cent(report.goodput)


def _contents(main: Element, jobs: Sequence[tuple[Report, Timeline]]) -> None:
    found = add(add(main, "nav"), "ul")
    for number, (report, timeline) in enumerate(jobs, start=1):
        entry = add(found, "li")
        add(entry, "a", _name(report), href=f"#job-{number}")
        add(entry, "span", f" {_goodput(report)} goodput in {duration(timeline.seconds)}")


def _section(main: Element, name: str, report: Report, timeline: Timeline) -> None:
    section = add(main, "section", id=name)
    add(section, "h1", _name(report))
    _head(section, report, timeline)
    if timeline.ranks:
        add(section, "h2", "Where the time went")
        _legend(section, report)
        add(section, "h2", "What each rank did" if not timeline.is_folded else "What the ranks did")
        section.append(draw_timeline(timeline, name))
        add(section, "p", _explanation(report, timeline), class_="note")
    if timeline.incidents:
        add(section, "h2", "What happened")
        _incidents(section, name, timeline)
    if report.restarts:
        add(section, "h2", "Restarts")
        _restarts(section, report)
    if timeline.ranks:
        add(section, "h2", "Time of all ranks")
        _buckets(section, report)


def _head(section: Element, report: Report, timeline: Timeline) -> None:
    head = add(section, "div", class_="head")
    big = add(head, "div", class_="big")
    add(big, "strong", _goodput(report))
    time = report.time
    add(big, "span", "goodput")
    if report.goodput is None:
        add(big, "span", _UNKNOWN, class_="note")
    elif "idle_spare" in time.buckets:
        add(big, "span", f"{per_cent(time.without_spares)} without spares", class_="note")
    facts = add(head, "dl")
    said = summary(timeline, report.hosts)
    if report.goodput is not None:
        said.append(("steps", f"{time.steps:,} done, {time.steps_again:,} done again"))
    count = len(report.restarts)
    again = f" ({report.started_again} processes started again)" if report.started_again else ""
    said.append(("restarts", f"{count}{again}"))
    for name, value in said:
        fact = add(facts, "div")
        add(fact, "dt", name)
        add(fact, "dd", value)


def _legend(section: Element, report: Report) -> None:
    shares = shares_of(report.time)
    section.append(draw_bar(shares))
    legend = add(section, "ul", class_="legend")
    for state, share in shares:
        entry = add(legend, "li")
        entry.append(draw_swatch(state.name))
        add(entry, "b", per_cent(share))
        add(entry, "span", state.title)


def _explanation(report: Report, timeline: Timeline) -> str:
    said = ["A row is a rank." if not timeline.is_folded else _FOLDED]
    if timeline.incidents:
        said.append("Numbers and marks are explained below.")
    if len(report.hosts) > 1:
        said.append("Clocks of hosts are set by what all of them heard at once: the decisions who goes on.")
    return " ".join(said)


_FOLDED = (
    "A row is a node, or several of them, and shows the share of its ranks in each state. Nodes in which "
    "something happened come first."
)


def _incidents(section: Element, name: str, timeline: Timeline) -> None:
    found = add(section, "ol", class_="incidents")
    for incident in timeline.incidents:
        entry = add(found, "li", id=f"{name}-{incident.number}")
        add(entry, "b", str(incident.number))
        entry.append(draw_swatch(shape_of(incident.kind)))
        add(entry, "time", moment(incident.at, timeline.seconds))
        add(entry, "span", incident.line)


def _restarts(section: Element, report: Report) -> None:
    numbers = [f"{phase}, ms" for phase in PHASES]
    rows = _table(section, ["iteration", "cause", *numbers, "in all"], "restarts")
    for restart in report.restarts:
        which = f"{restart.iteration} → {restart.next_iteration}"
        times = [f"{1e3 * restart.phases[phase]:.1f}" for phase in PHASES]
        _row(rows, [which, restart.cause, *times, duration(restart.seconds)])


def _buckets(section: Element, report: Report) -> None:
    rows = _table(section, ["", "time", "share", "went to", "which is"], "buckets")
    time = report.time
    for name, seconds in time.buckets.items():
        row = _row(rows, ["", duration(seconds), per_cent(time.share(name)), name, BUCKETS[name]])
        row[0].append(draw_swatch(STATE_OF[name].name))
    in_all = f"{len(time.rows)} {plural(len(time.rows), 'rank')}"
    _row(rows, ["", duration(time.seat_seconds), per_cent(1.0), "in all", in_all])


def _table(section: Element, titles: Sequence[str], kind: str) -> Element:
    table = add(add(section, "div", class_="scroll"), "table", class_=kind)
    head = add(add(table, "thead"), "tr")
    for title in titles:
        add(head, "th", title)
    return add(table, "tbody")


def _row(rows: Element, cells: Sequence[str]) -> Element:
    row = add(rows, "tr")
    for cell in cells:
        add(row, "td", cell)
    return row


def _style() -> str:
    light = "".join(f"--{name}:{look.light};" for name, look in LOOKS.items())
    dark = "".join(f"--{name}:{look.dark};" for name, look in LOOKS.items())
    rules = [f":root{{{light}}}", f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"]
    for name, look in LOOKS.items():
        rules.append(f".c-{name}{{fill:var(--{name})}}.s-{name}{{fill:url(#p-{name})}}")
        if look.ink:
            rules.append(f".i-{name}{{stroke:{look.ink};fill:none}}")
    sheet = importlib.resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return "\n".join([sheet, *rules])
