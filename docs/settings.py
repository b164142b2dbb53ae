"""The table of the wrapper's arguments on the page "Using it", made from the fields of its settings.

    python docs/settings.py

writes the table again.
"""

from __future__ import annotations

import enum
import inspect
import re
from pathlib import Path
from typing import Any

from ft_wrapper import Limits, Wrapper
from ft_wrapper.restart.settings import Settings
from ft_wrapper.settings import about

PAGE = Path(__file__).parent / "usage.md"
BEGIN, END = "<!-- made by docs/settings.py -->\n", "<!-- to here -->\n"
HEAD = "| argument | default | the same on all ranks | meaning |\n| --- | --- | --- | --- |\n"


def table() -> str:
    """One line for each argument, as the docstrings have them: those of `Wrapper`, then those of `Limits`."""
    return f"{_rows(Wrapper, Settings)}\n`Limits` has:\n\n{_rows(Limits, Limits)}"


def _rows(documented: type, fields: type) -> str:
    text, known = HEAD, about(fields)
    for name, meaning in _meanings(documented).items():
        cells = (
            f"`{name}`",
            _shown(getattr(fields, name), known[name].is_duration),
            "yes" if known[name].is_shared else " ",
            meaning.replace("``", "`"),
        )
        text += f"| {' | '.join(cells)} |\n"
    return text.replace("|   |", "| |")


def _meanings(documented: type) -> dict[str, str]:
    """What each setting means, by the docstring."""
    text = inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def on_page() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def _shown(default: Any, is_duration: bool) -> str:
    if isinstance(default, enum.Enum):
        return f'`"{default.value}"`'
    if isinstance(default, str):
        return f'`"{default}"`'
    if is_duration:
        return f"{default:g} s"
    if isinstance(default, type):
        return f"`{default.__name__}`"
    return (
        f"`{default!r}`" if default is None or isinstance(default, (bool, int)) else f"`{_made_of(default)}`"
    )


def _made_of(plug_in: object) -> str:
    parts = ", ".join(f"{type(part).__name__}()" for part in getattr(plug_in, "parts", ()))
    return f"Compose({parts})" if parts else f"{type(plug_in).__name__}()"


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
