"""The page "How ranks agree" and its diagrams speak of the keys that there are."""

from __future__ import annotations

import inspect
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ft_wrapper.store import keys

DOCS = Path(__file__).parent.parent / "docs"
PREFIX = f"ft_wrapper/{keys.THIS_VERSION}/"
LOOKUPS = ("iteration_of", "member_of", "call_of")
NO_KEYS = {"fault", "done", "heartbeat_timeout"}


def kinds() -> set[str]:
    """What the keys' names begin with, up to the first number or name of somebody."""
    names = [keys.VERSION, *(text for text in vars(keys).values() if str(text).startswith(PREFIX))]
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if name not in LOOKUPS:
            names.append(function(*"123456789"[: len(inspect.signature(function).parameters)]))
    return {re.split(r"/\d", name.removeprefix(PREFIX).removeprefix("ft_wrapper/"))[0] for name in names}


def diagrams(monkeypatch: pytest.MonkeyPatch) -> tuple[object, dict[str, object]]:
    """The module that draws, and the diagrams."""
    monkeypatch.syspath_prepend(str(DOCS))
    for name in ("sequence", "sequences"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import sequence
    import sequences

    return sequence, sequences.SEQUENCES


def test_page_explains_every_kind_of_key() -> None:
    page = (DOCS / "agreement.md").read_text()
    cells = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    explained = set(re.findall(r"`([a-z_]+)", cells))
    assert {kind.split("/")[0] for kind in kinds()} <= explained


def test_diagrams_name_keys_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sequences = diagrams(monkeypatch)
    named = set()
    for drawn in sequences.values():
        for row in drawn.rows:
            named |= set(re.findall(r"`([a-z_][^`]*)`", row.text))
    named -= NO_KEYS
    assert len(named) > 15
    assert {re.split(r"/[\d…]", name)[0] for name in named} - {"x", "w"} <= kinds()


def test_page_shows_every_diagram(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence, sequences = diagrams(monkeypatch)
    page = (DOCS / "agreement.md").read_text()
    assert set(re.findall(r"```\{sequence\} (\S+)", page)) == set(sequences)
    for drawn in sequences.values():
        assert ElementTree.fromstring(sequence.draw(drawn)).tag.endswith("svg")
