"""Stand-ins for a Trainer's tests on one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ft_wrapper.checkpoints import Checkpoint
from ft_wrapper.protocol.notice import Notice


class FakeCheckpoints:
    """Notes what is sealed, and what was there then."""

    def __init__(self, call_wrapper: Any, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep
        self.sealed: dict[int, set[str]] = {}

    def path(self, step: int) -> Path:
        return self.root / f"checkpoint-{step}"

    def newest(self) -> Checkpoint | None:
        step = max(self.sealed, default=None)
        return None if step is None else Checkpoint(self.path(step), step)

    def seal(self, step: int) -> None:
        assert step not in self.sealed, f"step {step} is saved twice"
        self.sealed[step] = {path.name for path in self.path(step).iterdir()}


class FakeCall:
    """In the place of a `CallWrapper`."""

    rank = 0
    state = SimpleNamespace(active_rank=0)
    notice: Notice | None = None
    noticed_at: int | None = None
    """The step at which all ranks see a notice."""

    def __init__(self) -> None:
        self.pings = 0
        self.steps: list[int] = []

    def ping(self, step: int | None = None) -> None:
        self.pings += 1
        if step is None:
            return
        self.steps.append(step)
        if step == self.noticed_at:
            self.notice = Notice("node 0", "a test", id="a")
