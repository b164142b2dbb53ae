"""The pictures in the page of a report, as SVG in the page. Their colours are in its style sheet."""

from collections.abc import Iterable, Iterator
from xml.etree.ElementTree import Element, SubElement

from .._text import duration
from .look import LOOKS, SHAPE_TITLES, SHAPES, clean, moment, per_cent, shape_of, shortened, ticks
from .timeline import STATES, Activity, Line, Mark, Timeline

_SVG = "http://www.w3.org/2000/svg"
_TITLES = {state.name: state.title for state in STATES}

# All in pixels.
_WIDTH = 1224  # of a timeline
_BEFORE, _BEHIND = 8, 26  # and beside it
_BADGES, _NUMBERS, _AXIS = 26, 16, 26  # heights of what is above the rows, and below them
_CHARACTER = 6.7  # of a name
_MOST_CHARACTERS = 26
_NARROW = 140  # names that may stay in sight on a telephone
_BADGE = 7.2  # of a digit, in the numbers of what happened


def add(parent: Element, tag: str, text: object = "", **attributes: object) -> Element:
    """Adds an element to the tree of a page.

    Args:
        parent: where to.
        tag: its name.
        text: what stands in it.
        attributes: its own; ``_`` stands for ``-``, and ``class_`` for ``class``.
    """
    names = {name.rstrip("_").replace("_", "-"): clean(value) for name, value in attributes.items()}
    element = SubElement(parent, tag, names)
    element.text = clean(text) or None
    return element


def _svg(width: object, height: object, **attributes: str) -> Element:
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    return Element("svg", {"xmlns": _SVG, "width": str(width), "height": str(height), **names})


def patterns() -> Element:
    """What the states are filled with, once for a whole page."""
    svg = _svg(0, 0, class_="patterns", aria_hidden="true")
    defs = add(svg, "defs")
    for name, look in LOOKS.items():
        tile = add(defs, "pattern", id=f"p-{name}", width=8, height=8, patternUnits="userSpaceOnUse")
        add(tile, "rect", width=8, height=8, class_=f"c-{name}")
        if look.pattern:
            add(tile, "path", d=look.pattern, class_=f"i-{name}")
    return svg


def draw_swatch(name: str) -> Element:
    """A sample of a state, or the mark of something that happened.

    Args:
        name: of the state, or of the shape.
    """
    is_state = name in _TITLES
    svg = _svg(16, 16, class_="swatch", role="img")
    add(svg, "title", _TITLES[name] if is_state else SHAPE_TITLES[name])
    if is_state:
        add(svg, "rect", x=0.5, y=0.5, width=15, height=15, class_=f"s-{name} edge")
    else:
        add(svg, "path", d=SHAPES[name], transform="translate(8 8)", class_="mark")
    return svg


def draw_bar(shares: Iterable[tuple[Activity, float]]) -> Element:
    """All time as one bar.

    Args:
        shares: of each state, from 0 to 1.
    """
    svg = _svg("100%", 34, class_="bar", role="img")
    add(svg, "title", "Where the time of all ranks went")
    at = 0.0
    for state, share in shares:
        part = add(
            svg,
            "rect",
            x=f"{100 * at:.3f}%",
            width=f"{100 * share:.3f}%",
            height=34,
            class_=f"s-{state.name}",
        )
        add(part, "title", f"{state.title}: {per_cent(share)}")
        at += share
    return svg


# The timeline ----------------------------------------------------------------------------------------------


class _Plan:
    """Where things are in a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.names = [shortened(line.name, _MOST_CHARACTERS) for line in timeline.lines]
        sizes = max((len(line.size) + 2 for line in timeline.lines if line.size), default=0)
        self.narrow = round(max(map(len, self.names)) * _CHARACTER) + 10  # of the names alone
        self.left = self.narrow + round(sizes * _CHARACTER)  # of the time
        self.width = _WIDTH - self.left - _BEFORE - _BEHIND
        self.row = 18 if timeline.is_folded or len(timeline.lines) <= 24 else 14
        self.pitch = self.row + (4 if self.row == 18 else 3)
        self.top = _BADGES + _NUMBERS
        self.bottom = self.top + self.pitch * len(timeline.lines)
        self.height = self.bottom + _AXIS

    def x(self, at: float) -> float:
        """Where a moment is."""
        seconds = self.timeline.seconds
        return _BEFORE + self.width * (min(max(at / seconds, 0.0), 1.0) if seconds else 0.0)

    def y(self, line: int) -> int:
        """Where a row begins."""
        return self.top + self.pitch * line + 2


def draw_timeline(timeline: Timeline, name: str) -> Element:
    """Draws a timeline: the names of the rows, which stay where they are, and beside them what is scrolled.

    Args:
        timeline: of a job.
        name: of its section.
    """
    plan = _Plan(timeline)
    box = Element("div", {"class": "scroll timeline", "tabindex": "0"})
    box.append(_names(plan))
    svg = _svg(_WIDTH - plan.left, plan.height, class_="plot", role="img")
    box.append(svg)
    add(svg, "title", "What each row did, from left to right")
    _bands(svg, plan)
    _axis(svg, plan)
    for number, line in enumerate(timeline.lines):
        _line(add(svg, "g", class_="row"), plan, number, line)
    _incidents(svg, plan, name)
    for mark in timeline.marks:
        _mark(svg, plan, mark)
    return box


def _names(plan: _Plan) -> Element:
    kind = "names" if plan.narrow <= _NARROW else "names wide"
    svg = _svg(plan.left, plan.height, class_=kind, style=f"--narrow:{plan.narrow}px")
    for number, (name, line) in enumerate(zip(plan.names, plan.timeline.lines, strict=True)):
        y = plan.y(number) + plan.row / 2 + 4
        text = add(svg, "text", name, x=0, y=y)
        add(text, "title", line.name)
        if line.size:
            add(svg, "text", line.size, x=plan.left - 8, y=y, class_="size")
    return svg


def _bands(svg: Element, plan: _Plan) -> None:
    free_from = 0.0
    for place, band in enumerate(plan.timeline.bands):
        begin, end = plan.x(band.begin), plan.x(band.end)
        stripe = add(
            svg,
            "rect",
            x=f"{begin:.1f}",
            y=_BADGES,
            width=f"{end - begin:.1f}",
            height=plan.bottom - _BADGES,
            class_="band odd" if place % 2 else "band",
        )
        times = f"{_moment(band.begin, plan)} to {_moment(band.end, plan)}"
        add(stripe, "title", f"iteration {band.number}: {times}")
        text = f"iteration {band.number}" if end - begin > 80 else str(band.number)
        if begin + 3 >= free_from:
            add(svg, "text", text, x=f"{begin + 3:.1f}", y=_BADGES + 12, class_="number")
            free_from = begin + 3 + _CHARACTER * len(text) + 4


def _axis(svg: Element, plan: _Plan) -> None:
    for at, text in ticks(plan.timeline.seconds):
        x = f"{plan.x(at):.1f}"
        add(svg, "path", d=f"M{x} {plan.top}V{plan.bottom + 5}", class_="grid")
        add(svg, "text", text, x=x, y=plan.bottom + 19, class_="tick" if at else "tick first")


def _line(group: Element, plan: _Plan, number: int, line: Line) -> None:
    """A row: one path for each state, or for each span of it where there are few."""
    y = plan.y(number)
    bottoms = [0.0] * len(line.segments)
    for state in STATES:
        parts = []
        for place, segment in enumerate(line.segments):
            share = segment.shares.get(state.name, 0.0)
            begin, end = (f"{plan.x(at):.1f}" for at in (segment.begin, segment.end))
            if not share or begin == end:
                continue
            low = bottoms[place]
            bottoms[place] = low + share
            upper, lower = (f"{y + plan.row * (1 - min(at, 1.0)):.4g}" for at in (low + share, low))
            path = f"M{begin} {upper}H{end}V{lower}H{begin}Z"
            parts.append(
                (path, f"{duration(segment.end - segment.begin)} from {_moment(segment.begin, plan)} on")
            )
        what = f"{line.name}: {state.title}"
        if parts and len(line.seats) > 1:
            whole = "".join(path for path, _ in parts)
            add(add(group, "path", d=whole, class_=f"s-{state.name}"), "title", what)
        elif parts:
            for path, when in parts:
                add(add(group, "path", d=path, class_=f"s-{state.name}"), "title", f"{what}, {when}")


def _incidents(svg: Element, plan: _Plan, name: str) -> None:
    for incident in plan.timeline.incidents:
        add(svg, "path", d=f"M{plan.x(incident.at):.1f} {_BADGES - 4}V{plan.bottom}", class_="moment")
    for x, width, first, last in _badges(plan):
        link = add(svg, "a", href=f"#{name}-{plan.timeline.incidents[first].number}")
        together = plan.timeline.incidents[first : last + 1]
        said = [f"{one.number}, at {_moment(one.at, plan)}: {one.line}" for one in together[:5]]
        more = len(together) - len(said)
        add(link, "title", "\n".join([*said, f"and {more} more"] if more else said))
        add(
            link,
            "rect",
            x=f"{x - width / 2:.1f}",
            y=3,
            width=f"{width:.1f}",
            height=19,
            rx=9.5,
            class_="badge",
        )
        add(link, "text", _numbers(plan, first, last), x=f"{x:.1f}", y=17, class_="badge")


def _numbers(plan: _Plan, first: int, last: int) -> str:
    incidents = plan.timeline.incidents
    one, other = incidents[first].number, incidents[last].number
    return str(one) if first == last else f"{one}-{other}"


def _badges(plan: _Plan) -> Iterator[tuple[float, float, int, int]]:
    """Where the numbers are: middle, width, and which incidents; those that would overlap are one."""
    found: list[tuple[float, float, int, int]] = []
    for place, incident in enumerate(plan.timeline.incidents):
        first = place
        while True:
            x = (plan.x(plan.timeline.incidents[first].at) + plan.x(incident.at)) / 2
            width = max(19.0, 10 + _BADGE * len(_numbers(plan, first, place)))
            if not found or found[-1][0] + found[-1][1] / 2 + 1 <= x - width / 2:
                break
            first = found.pop()[2]
        found.append((x, width, first, place))
    yield from found


def _mark(svg: Element, plan: _Plan, mark: Mark) -> None:
    incident = mark.incident
    x, y = plan.x(incident.at), plan.y(mark.line) + plan.row / 2
    shape = add(
        svg,
        "path",
        d=SHAPES[shape_of(incident.kind)],
        transform=f"translate({x:.1f} {y:g})",
        class_="mark",
    )
    who = ", ".join(f"slot {slot} on {host}" for host, slot in mark.seats)
    add(shape, "title", f"{incident.number}, at {_moment(incident.at, plan)}, {who}: {incident.line}")


def _moment(at: float, plan: _Plan) -> str:
    return moment(at, plan.timeline.seconds)
