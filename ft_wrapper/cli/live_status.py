"""The live table of ``ftrun status --watch`` on a terminal; `rich` draws it, an extra."""

import collections
import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .._text import plural
from ..report.look import clean

if TYPE_CHECKING:
    from .status import RankStatus, Status

_STDERR = 2
_BESIDE = 8  # lines of the table that are no rows, and of the prompt


def show(statuses: Iterable["Status"], console: Console) -> None:
    """Shows how a job stands, in the same place again and again; the last table stays.

    Args:
        statuses: drawn as they come.
        console: where.
    """
    # Nothing is drawn but when there is something new: no thread refreshes it.
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    with _without_stderr(), live:
        for status in statuses:
            live.update(draw(status, console.height), refresh=True)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Keeps what torch's own code says of each wait that ends without news out of the table."""
    if not os.isatty(_STDERR):
        yield
        return
    before = os.dup(_STDERR)
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, _STDERR)
        os.close(null)
        yield
    finally:
        os.dup2(before, _STDERR)
        os.close(before)


def draw(status: "Status", height: int) -> Group:
    """Draws how a job stands.

    Args:
        status: of the job.
        height: lines that there are. If the ranks take more, a row is a host.
    """
    parts: list[Text | Table] = [_head(status)]
    nodes = _nodes(status, max(height // 3, 5))
    kept_out = status.kept_out()[:_REASONS]
    free = max(height - _BESIDE - (nodes.row_count + 1 if nodes else 0) - len(kept_out), 5)
    if status.ranks:
        parts.append(_ranks(status) if len(status.ranks) <= free else _hosts(status, free))
    if nodes:
        parts.append(nodes)
    parts += [_text(said) for said in kept_out]
    if status.last_faults is not None:
        parts.append(Text.assemble(("last fault: ", "bold"), clean(status.last_faults)))
    return Group(*parts)


_REASONS = 3  # so many nodes that are kept out are told about
_LAST = {"waiting": 1, "spare": 2, "seat": 3}  # what is more urgent comes before
_STYLES = {"running": "bold green", "restarting": "bold yellow", "completed": "bold"}


def _head(status: "Status") -> Text:
    state = (status.state, _STYLES.get(status.state, "bold"))
    if status.iteration is None:
        return Text.assemble(state, ": no wrapped function has been entered by all ranks yet")
    active = "?" if status.active_world_size is None else str(status.active_world_size)
    where = (
        f": iteration {status.iteration} of call {status.call}, {active} of {status.world_size} ranks active"
    )
    return Text.assemble(state, where)


def _place(rank: "RankStatus") -> Text:
    if rank.has_died:
        return Text("died", "bold red")
    return Text("spare", "dim") if rank.active_rank is None else Text(f"rank {rank.active_rank}", "green")


def _ranks(status: "Status") -> Table:
    table = _table("slot", "is", "incarnation", "host", "pid")
    for rank in status.ranks:
        pid = "-" if rank.pid is None else str(rank.pid)
        table.add_row(str(rank.slot), _place(rank), str(rank.incarnation), _text(rank.host), pid)
    return table


def _hosts(status: "Status", most: int) -> Table:
    """A row for each host; those with dead ranks first."""
    by_host: dict[str, list[RankStatus]] = collections.defaultdict(list)
    for rank in status.ranks:
        by_host[rank.host].append(rank)
    table = _table("host", "ranks", "active", "spare", "died")
    rows = sorted(by_host.items(), key=lambda item: -sum(rank.has_died for rank in item[1]))
    for host, ranks in rows[:most]:
        died = sum(rank.has_died for rank in ranks)
        active = sum(rank.active_rank is not None and not rank.has_died for rank in ranks)
        spare = len(ranks) - died - active
        table.add_row(
            _text(host),
            str(len(ranks)),
            str(active),
            str(spare),
            Text(str(died), "bold red" if died else "dim"),
        )
    _count_the_rest(table, len(rows) - most, "host")
    return table


def _nodes(status: "Status", most: int) -> Table | None:
    """The nodes; of many, first those that are not in the job."""
    if not status.nodes:
        return None
    table = _table("node", "place", "group rank", "slots", "address")
    for node in sorted(status.nodes, key=lambda node: _LAST.get(node.place, 0))[:most]:
        slots = f"{node.slots[0]}..{node.slots[1]}" if node.slots else "-"
        group_rank = "-" if node.group_rank is None else str(node.group_rank)
        place = Text(node.place, "" if node.place in _LAST else "bold red")
        table.add_row(_text(node.id), place, group_rank, slots, _text(node.address))
    _count_the_rest(table, len(status.nodes) - most, "node")
    return table


def _count_the_rest(table: Table, count: int, noun: str) -> None:
    if count > 0:
        table.add_row(f"and {count} more {plural(count, noun)}", *[""] * (len(table.columns) - 1))


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _text(text: str) -> Text:
    # A text, and no markup, whatever a host is called.
    return Text(clean(text) or "-")
