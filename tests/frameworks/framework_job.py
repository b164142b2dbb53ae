"""What the fault runs of all frameworks have in common, in a rank: many wrapped calls, and their faults.

A run is one wrapped call with a folder of its own. The first one has no faults, and all others must end with
the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import io
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ft_wrapper import CallWrapper, Limits, Wrapper, events
from ft_wrapper.checkpoints import Checkpoints
from ft_wrapper.protocol.notice import Notice
from ft_wrapper.restart import notices
from ft_wrapper.testing.inject_fault import FaultKind, inject_fault

EVERY = 4
"""Steps between two checkpoints."""
LEAD = 3
"""Steps from the one in which a notice is given to the one at which all ranks see it."""
NOTICE_WITHIN = 60.0
"""Seconds in which an agent passes a notice on."""

SETTINGS: dict[str, Any] = {
    # Long enough that a busy machine, which halts a healthy rank for a second, costs none.
    "soft_timeout": 4.0,
    "hard_timeout": 8.0,
    "heartbeat_timeout": 10.0,
    "barrier_timeout": 60.0,
    "completion_timeout": 60.0,
    "heartbeat_interval": 0.2,
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.5,
    "limits": Limits(join_window=0.1),
    "rejoin": True,
}


@dataclasses.dataclass(frozen=True)
class Planned:
    """A fault that is to happen once.

    Args:
        kind: what happens: a `FaultKind`; or, at the point ``notice``, ``memory``, ``sigusr1``, ``sigterm``.
        point: ``step``, where a step begins; ``write``, in the middle of a file of a checkpoint, or ``write``
            and a file's name, in that one; ``seal``, where this rank has written, and the checkpoint is
            not sealed; or ``notice``: no fault, but a notice, see `Run.announce`.
        step: at this step, or the first time that the point is met after it.
        rank: the active rank.
    """

    kind: str
    point: str
    step: int
    rank: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.point}:{self.step}:{self.rank}"

    @classmethod
    def parse(cls, text: str) -> Planned:
        """Reads what ``str`` made."""
        kind, point, step, rank = text.split(":")
        return cls(kind, point, int(step), int(rank))


@dataclasses.dataclass
class Run:
    """One run of a job.

    Args:
        number: seed of its faults; the first one has none.
        folder: for its checkpoints and marks.
        steps: how many it trains.
        way: what differs between the jobs of a script, such as ``sync`` and ``async``.
        batches: of each step.
        faults: what is to happen.
    """

    number: int
    folder: Path
    steps: int
    way: str
    batches: int
    faults: list[Planned]
    step: int = 0
    rank: int = -1
    _call: Any = None
    _has_begun: bool = False
    _given: list[Planned] = dataclasses.field(default_factory=list)

    def begin(self, call: CallWrapper) -> None:
        """Takes an iteration up."""
        global _current
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rank, self._call, self._has_begun = call.state.active_rank or 0, call, False
        self._say("entered", iteration=call.iteration)
        _current = self

    def at(self, step: int) -> None:
        """A step, or a batch of it, begins."""
        if not self._has_begun:
            self._say("began", iteration=self._call.iteration, step=step)
        self.step, self._has_begun = step, True
        self.announce(step)
        self.check("step")

    def announce(self, step: int) -> None:
        """Gives the notices that all ranks are to see at a step to come: each one once.

        As an agent writes it into the memory of each rank; or an agent does that, since one rank signals it.
        With SIGTERM the job ends by it: that notice comes a second after the first.
        """
        for planned in self.faults:
            if planned.point != "notice" or planned in self._given or step < planned.step - LEAD:
                continue
            self._given.append(planned)
            # The ranks agree on a step that depends on how long steps take.
            notices.step_to_see = functools.partial(_see_at, planned.step)
            memory = self._call.services.notices.memory
            if planned.rank == self.rank:
                self._say("inject", kind=planned.kind, point=planned.point, step=step)
            if planned.kind == "memory":
                memory.give(Notice("node 0", "a test", id=str(planned)))
            elif planned.rank == self.rank:
                ends = planned.kind == "sigterm"
                os.kill(os.getppid() if ends else os.getpid(), signal.SIGTERM if ends else signal.SIGUSR1)
            deadline = time.monotonic() + NOTICE_WITHIN
            while (found := memory.notice) is None or found.ends < (planned.kind == "sigterm"):  # no event
                assert time.monotonic() < deadline, "the agent passes no notice on"
                self._call.ping()
                time.sleep(0.01)

    def check(self, point: str) -> None:
        """Makes a fault happen that belongs here, unless it has happened."""
        fault = self.due(point)
        if fault is not None:
            inject_fault(FaultKind(fault.kind))

    def due(self, point: str) -> Planned | None:
        """The fault that is to happen here; only once."""
        for index, fault in enumerate(self.faults):
            if fault.point != point or fault.rank != self.rank or fault.step > self.step:
                continue
            fired = self.folder / "fired"
            fired.mkdir(exist_ok=True)
            try:
                (fired / str(index)).touch(exist_ok=False)
            except FileExistsError:
                continue
            self._say("inject", kind=fault.kind, point=point, step=self.step)
            return fault
        return None

    def end(self, state: Any) -> None:
        """Says what came out.

        Args:
            state: dictionaries and lists of tensors; all of it must come out the same.
        """
        digest = hashlib.sha256()
        for name, tensor in _tensors("", state):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(name.encode())
            digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self._say("finished", digest=digest.hexdigest(), step=self.step)

    def saved(self, step: int) -> None:
        """A checkpoint is sealed."""
        self._say("saved", iteration=self._call.iteration, step=step)

    def _say(self, event: str, **fields: Any) -> None:
        events.emit(event, run=self.number, rank=self.rank, **fields)


def is_due(point: str) -> bool:
    """Whether this rank is to be killed at this point; only once."""
    return _current is not None and _current.due(point) is not None


_current: Run | None = None
_save, _seal = torch.save, Checkpoints.seal


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _tensors(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}.{index}", each)


def _save_half(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """Writes a file, or half of it and no more: what a SIGKILL in the middle leaves."""
    is_file = not isinstance(f, io.BytesIO)
    fault = _current.due("write") if _current is not None and is_file else None
    if fault is None:
        _save(obj, f, *args, **kwargs)
        if isinstance(f, (str, os.PathLike)):
            cut(f)
        return
    whole = io.BytesIO()
    _save(obj, whole, *args, **kwargs)
    half = whole.getvalue()[: len(whole.getvalue()) // 2]
    if hasattr(f, "write"):
        f.write(half)
        f.flush()
    else:
        Path(f).write_bytes(half)
    os.kill(os.getpid(), signal.SIGKILL)


def cut(path: str | os.PathLike[str]) -> None:
    """Ends this rank, and leaves half of a file, if such a fault is due; call it behind each write."""
    path = Path(path)
    if _current is not None and _current.due(f"write {path.name}") is not None:
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def _seal_late(self: Checkpoints, *args: Any, **kwargs: Any) -> None:
    if _current is not None:
        _current.check("seal")
    _seal(self, *args, **kwargs)
    if _current is not None:
        _current.saved(*args, **kwargs)


def _see_at(planned: int, step: int, _: float) -> int:
    return max(planned, step + 2)  # seen again after a restart


def main(train: Callable[..., None], **settings: Any) -> None:
    """What the scripts do: as many wrapped calls as there are runs.

    Args:
        train: what is wrapped; called with the run.
        settings: of the wrapper, beside those that all have.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--way", default="")
    parser.add_argument("--active", type=int, required=True)
    parser.add_argument("--batches", type=int, default=1, help="of a step")
    parser.add_argument("--faults", nargs="*", default=[], help="of each run: kind:point:step:rank,…")
    args = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.save, Checkpoints.seal = _save_half, _seal_late  # type: ignore[assignment,method-assign]
    numbered = [(-1, ""), *enumerate(args.faults)]
    wrapped = Wrapper(
        **{**SETTINGS, "active_world_size": args.active, "min_world_size": args.active, **settings}
    )(train)
    for number, faults in numbered:
        planned = [Planned.parse(each) for each in faults.split(",") if each]
        folder = args.folder / f"run-{number}"
        wrapped(Run(number, folder, args.steps, args.way, args.batches, planned))
    print("all runs are through", flush=True)


def seed_step(step: int) -> None:
    """Makes a step's random numbers depend on it and the rank alone."""
    torch.manual_seed(10_007 * step + dist.get_rank())
