"""Stand-ins for a Trainer's tests on one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class FakeCheckpoints:
    """Notes what is sealed, and what was there then."""

    def __init__(self, call_wrapper: Any, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep
        self.sealed: dict[int, set[str]] = {}

    def folder(self, step: int) -> Path:
        return self.root / f"checkpoint-{step}"

    def newest(self) -> Path | None:
        return self.folder(max(self.sealed)) if self.sealed else None

    def seal(self, step: int) -> None:
        self.sealed[step] = {path.name for path in self.folder(step).iterdir()}


class FakeCall:
    """In the place of a `CallWrapper`."""

    state = SimpleNamespace(active_rank=0)

    def __init__(self) -> None:
        self.pings = 0

    def ping(self, step: int | None = None) -> None:
        self.pings += 1
