"""Text for people: with units, without passwords, cut to fit."""

import re
from collections.abc import Sequence

#: Most bytes of a user's text in one value of the store, and in one log line.
IN_STORE, IN_LINE = 16 << 10, 2 << 10

_HIDDEN = "…"
# Up to the last @: hiding more than the secret does no harm.
_IN_URL = re.compile(r"""(?<=://)[^\s'"/]+@""")
# First the part before the last @ of a word, then the user in it. Searching from each comma of a text would
# take quadratic time.
_BEFORE_HOST = re.compile(r"""(?:/|(?<![^\s'"/]))[^\s'"/]*@(?=[^\s'"])""")
_USER = re.compile(r"(?<![^=,(])[^=,(/:@]+:[^/]+@$")
_NAMED = re.compile(r"(?i)((?:password|passwd|secret|token|api_?key)=)[^\s&,;'\"]+")


def without_secrets(text: str) -> str:
    """A text without what looks like a secret: ``user:password@`` before a host, ``password=…``, ``token=…``.

    Args:
        text: any text: a URL, a line of a log, a command line.
    """
    if "@" in text:
        text = _IN_URL.sub(f"{_HIDDEN}@", text)
        text = _BEFORE_HOST.sub(lambda word: _USER.sub(f"{_HIDDEN}@", word[0]), text)
    return _NAMED.sub(rf"\1{_HIDDEN}", text) if "=" in text else text


def cut(text: str, most: int) -> str:
    """The beginning of a text, with "…" in place of the rest.

    Lone surrogates, which no store accepts, are escaped as in a Python literal.

    Args:
        text: any text from a user.
        most: the most bytes that it may have, as UTF-8.
    """
    data = text.encode(errors="backslashreplace")
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "…"


def duration(seconds: float) -> str:
    """Describes a duration in the unit that a person would choose.

    Args:
        seconds: how long.
    """
    if seconds < 0.9995:
        return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def place(slot: int, rank: int | None, host: str, pid: int = 0) -> str:
    """Names a process as all log lines do: ``rank 2 (slot 2 on node7 pid 4711)``.

    Args:
        slot: its slot.
        rank: its rank; None if it has none, or if that is not known.
        host: its host; empty if it is not known.
        pid: its process; 0 if it is not known.
    """
    where = f"on {host}" + (f" pid {pid}" if pid else "") if host else ""
    if rank is not None:
        return f"rank {rank} ({f'slot {slot} {where}'.rstrip()})"
    return f"slot {slot} ({where})" if where else f"slot {slot}"


def plural(count: int, noun: str) -> str:
    """A noun, in the plural unless ``count`` is 1."""
    return noun if count == 1 else noun + "s"


def table(rows: Sequence[Sequence[object]], indent: str = "") -> list[str]:
    """Lines of a table with aligned columns; the first row is its header. A dash stands for an empty cell.

    Args:
        rows: the cells of each.
        indent: what each line begins with.
    """
    texts = [["-" if cell in (None, "") else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in texts)
    return [f"{indent}{'  '.join(cells)}".rstrip() for cells in padded]
