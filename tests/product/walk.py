"""One restart of one rank on the main thread, as a reader meets it: `test_walk` limits how far that is.

``python tests/product/walk.py`` prints the walk, file by file, and its figures as JSON in the last line. A
call that calls nothing else of the package, such as a key's name or a property, is a leaf: nobody goes there
to understand the restart, so it does not count. ``--all`` counts leaves too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType

import ft_wrapper
from ft_wrapper.testing.etcd_server import free_port

ROOT = f"{Path(ft_wrapper.__file__).parent}/"


@dataclasses.dataclass
class Call:
    """A call of a function of the package."""

    file: str
    name: str
    is_leaf: bool = True


calls: list[Call] = []
_stack: list[Call] = []
_entries = 0


def _note(frame: FrameType, event: str, _: object) -> None:
    if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOT):
        return
    if event == "return":
        if _stack:
            _stack.pop()
        return
    if _stack:
        _stack[-1].is_leaf = False
    calls.append(Call(frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_name))
    _stack.append(calls[-1])


@ft_wrapper.Wrapper(rejoin=True)
def function() -> None:
    """Fails twice. From the second failure to the entry after it every call is noted."""
    global _entries
    _entries += 1
    if _entries == 1:
        raise KeyError("the first restart imports what a later one finds")
    if _entries == 2:
        sys.setprofile(_note)
        raise ValueError("the fault")
    sys.setprofile(None)


def _moves(places: list[str]) -> int:
    return sum(here != there for here, there in pairwise(places))


if __name__ == "__main__":
    port = free_port(2)  # the job's store takes the next one
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    function()
    counted = [call for call in calls if "--all" in sys.argv or not call.is_leaf]
    for before, call in pairwise([Call("", ""), *counted]):
        print("" if before.file == call.file else f"\n{call.file}:", call.name, end="")
    files = [call.file for call in counted]
    packages = [file.split("/")[0] if "/" in file else "top" for file in files]
    figures = {
        "moves": _moves(files),
        "moves between packages": _moves(packages),
        "files": len(set(files)),
        "calls": len(counted),
    }
    print(f"\n\n{json.dumps(figures)}")
