"""How the page of a report looks: colours, marks, ticks, words."""

import dataclasses
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from .._text import duration, plural
from .timeline import Timeline

# What no XML may have, and what no file can: a message may have been cut in the middle of a character.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclasses.dataclass(frozen=True)
class Look:
    """How a state is drawn. No two are told apart by their colour alone.

    Args:
        light: its colour on a light ground: of Okabe and Ito, who chose them for all kinds of sight.
        dark: its colour on a dark one.
        ink: the colour of its pattern.
        pattern: lines of a tile of 8 by 8, as the path of an SVG; empty if it is plain.
    """

    light: str
    dark: str
    ink: str = ""
    pattern: str = ""


_UP = "M-2 10L10 -2M-2 2L2 -2M6 10L10 6"
_DOWN = "M-2 -2L10 10M6 -2L10 2M-2 6L2 10"
LOOKS = {
    "new": Look("#009e73", "#00a97b"),
    "untold": Look("#56b4e9", "#56b4e9"),
    "again": Look("#e69f00", "#e69f00", "#7a4f00", _UP),
    "start": Look("#0072b2", "#2b8fd0", "#9fd0f0", "M0 4H8"),
    "hang": Look("#d55e00", "#e8701a", "#5a1c00", f"{_UP}{_DOWN}"),
    "restart": Look("#cc79a7", "#d78bb5", "#5c1f40", "M4 0V8"),
    "waiting": Look("#f0e442", "#f0e442", "#8a7f00", _DOWN),
    "spare": Look("#d3d7dc", "#4a525c", "#8d96a1", "M2 2h1M6 6h1"),
    "gone": Look("#2b2f36", "#07090c", "#8d96a1", _DOWN),
    "over": Look("#eceef1", "#272c33"),
}

#: The mark of an incident: its shape, as a path around 0, by what happened.
SHAPES = {
    "raised": "M0 -5L5.5 4.5H-5.5Z",
    "died": "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "hung": "M0 -6L6 0L0 6L-6 0Z",
    "joined": "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0 -5 0Z",
}
#: Which of `SHAPES` an incident has, by its kind.
SHAPE_OF = {
    "EXCEPTION": "raised",
    "OUT_OF_MEMORY": "raised",
    "BASE_EXCEPTION": "raised",
    "SOFT_TIMEOUT": "hung",
    "HARD_TIMEOUT": "hung",
    "TERMINATED": "died",
    "UNRESPONSIVE": "died",
    "MONITOR_PROCESS_EXCEPTION": "died",
    "DRAINED": "joined",
    "REQUESTED": "joined",
    "JOINED": "joined",
}
SHAPE_TITLES = {
    "raised": "raised an exception",
    "died": "died or was lost",
    "hung": "hung",
    "joined": "a process joined",
}


def shape_of(kind: str) -> str:
    """Which of `SHAPES` an incident has.

    Args:
        kind: of its likeliest cause.
    """
    return SHAPE_OF.get(kind, "died")


def clean(text: object) -> str:
    """A text without what no file may have in it."""
    return _UNFIT.sub("\ufffd", str(text))


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters: what is too much is left out in the middle."""
    if len(text) <= most:
        return text
    left = (most - 1) // 2
    return f"{text[:left]}…{text[len(text) - (most - 1 - left) :]}"


def per_cent(share: float) -> str:
    """A share in words, with as many digits as say something."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %"


def summary(timeline: Timeline, hosts: Sequence[str]) -> list[tuple[str, str]]:
    """What is said of a job beside its goodput: names and values.

    Args:
        timeline: of the job.
        hosts: where its events were written.
    """
    found = [("took", duration(timeline.seconds))]
    if timeline.began is not None:
        began = datetime.fromtimestamp(timeline.began, UTC)
        found.append(("began", f"{began:%Y-%m-%d %H:%M:%S} UTC"))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    found.append(("ran on", f"{timeline.ranks} {plural(timeline.ranks, 'rank')}, {where}"))
    return found


# The axis of time ------------------------------------------------------------------------------------------

_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def ticks(seconds: float, most: int = 11) -> list[tuple[float, str]]:
    """Moments to be named on the axis of time.

    Args:
        seconds: how long it is.
        most: so many at most.
    """
    if seconds <= 0:
        return [(0.0, "0")]
    least = seconds / (most - 1)
    if least < 1:
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    elif least > _DAY:
        step = float(math.ceil(least / _DAY) * _DAY)
    else:
        step = float(next(step for step in _STEPS if step >= least))
    count = math.floor(seconds / step + 1e-9)
    found = (min(number * step, seconds) for number in range(count + 1))
    return [(at, f"{at:.3g} s" if seconds <= 2 * _MINUTE else moment(at, seconds)) for at in found]


def moment(at: float, seconds: float) -> str:
    """A moment, as its place in a job of so many seconds asks for.

    Args:
        at: seconds since the begin.
        seconds: how long it all took.
    """
    if seconds <= 2 * _MINUTE:
        return f"{at:.1f} s" if seconds > 5 else f"{at:.3f} s"
    whole = round(at)
    if seconds <= 2 * _HOUR:
        return f"{whole // _MINUTE}:{whole % _MINUTE:02} min"
    if seconds <= 2 * _DAY:
        return f"{whole // _HOUR}:{whole % _HOUR // _MINUTE:02} h"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"
