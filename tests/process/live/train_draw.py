"""The ranks of drawn trainings, started by draws.py.

A case is two wrapped calls: without faults, and with them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from draw_cases import POINTS, ROLL, TORN, Case, draw
from draw_parts import build, described, train, update
from torch.distributed.device_mesh import init_device_mesh

from ft_wrapper import CallWrapper, Compose, Limits, LiveState, Wrapper
from ft_wrapper.exception import JobAbort, RestartAbort
from ft_wrapper.live import live_state, performer, wire
from ft_wrapper.live.tree import named
from ft_wrapper.rank_assignment import FillGaps, MaxActiveWorldSize, RankAssignment, ReplicaGroups

SETTINGS: dict[str, Any] = {
    "soft_timeout": 8.0,
    "hard_timeout": 12.0,
    "heartbeat_timeout": 15.0,
    "barrier_timeout": 60.0,
    "completion_timeout": 30.0,
    "heartbeat_interval": 0.2,
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.3,
    "rejoin": True,
    # Ours may be three in a row without progress.
    "limits": Limits(join_window=0.1, rejoin_wait=20.0, max_same_faults=6),
}
EVERY = 2


class Injected(RuntimeError):
    """An exception of ours."""


class Points:
    """What happens in one entry of a case.

    Args:
        case: says what is to happen.
        folder: the case's.
        mode: ``clean`` or ``faulty``.
        place: of this entry, for what is noted.
    """

    def __init__(self, case: Case, folder: Path, mode: str, **place: Any) -> None:
        self.case, self.folder, self.mode, self.place = case, folder, mode, place
        self.step: int | None = None
        self.recovering = True

    def say(self, what: str, **fields: Any) -> None:
        """Notes something, in a line that is written in one piece."""
        record = {"what": what, "mode": self.mode, "pid": os.getpid(), **self.place, **fields}
        line = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(line, (json.dumps(record) + "\n").encode())
        os.close(line)

    def iterations(self) -> set[int]:
        """Of this mode, so far."""
        text = (self.folder / "said").read_text()
        whole = text[: text.rfind("\n") + 1]  # another rank may be in the middle of a line
        said = map(json.loads, whole.splitlines())
        return {one["iteration"] for one in said if one["mode"] == self.mode}

    def before(self, point: str, step: int | None = None) -> None:
        """Has a fault happen that belongs here, unless it has happened."""
        if step is not None:
            self.step = step
        if point == TORN and self.recovering:
            point = ROLL
        for index, fault in enumerate(self.case.faults if self.mode == "faulty" else ()):
            if fault.rank != self.place["rank"] or fault.point != point:
                continue
            if point in (*POINTS, TORN) and point != "entry":
                if fault.step != self.step:
                    continue
            elif index == 0 or not (self.folder / f"fired-{index - 1}").exists():
                continue  # it belongs behind the fault before it, which may have gone back
            with contextlib.suppress(FileExistsError):
                (self.folder / f"fired-{index}").touch(exist_ok=False)
                self.say("fault", kind=fault.kind, point=point, index=index, step=self.step)
                if fault.kind == "sigkill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Injected(f"{point} of step {self.step}")


class Probed(performer.TorchPerformer):
    """Comes to points of votes and recoveries, which the product has no seams for."""

    def make_ready(self) -> None:
        """See `Performer`."""
        super().make_ready()
        before("before vote")

    def vote(self, step: int) -> None:
        """See `Performer`: a step's, and the seal."""
        what = "seal" if points_of_now[-1].recovering else "vote"
        if what == "seal":
            before("before seal")
        super().vote(step)
        before(f"after {what}")

    def gather(self, mine: Any) -> Any:
        """See `Performer`."""
        before("before gather")
        said = super().gather(mine)
        before("after gather")
        return said

    def rebind(self) -> None:
        """See `Performer`: what a rank has stays where it is in memory, unless `build` itself makes some."""
        there = self._addresses()
        super().rebind()
        assert points_of_now[-1].case.deferred or self._addresses() == there

    @torch.no_grad()
    def _addresses(self) -> dict[str, int]:
        """Of all tensors but parameters whose shards FSDP2 pads."""
        described = self._form.describe(self._kept.objects)
        shards = dist.get_world_size() if self._form.is_sharded else 1
        return {
            name: self._form.local(tensor)[0].data_ptr()
            for name, tensor in named(described)
            if tensor.dim() == 0 or tensor.shape[0] % shards == 0
        }

    def adopt(self, received: Any) -> None:
        """See `Performer`."""
        before("adopt")
        super().adopt(received)
        before("adopted")

    def seal(self, plan: Any, register: Any) -> None:
        """See `Performer`."""
        before("before register")
        super().seal(plan, register)
        before("after register")
        points_of_now[-1].recovering = False


def before(point: str) -> None:
    """At a point of the iteration that is on."""
    points_of_now[-1].before(point)


def install() -> None:
    """Puts the points into this process: also into the middle of a vote, and behind each piece of a move."""
    hear = wire.Ballot._hear

    def hears(self: wire.Ballot, since: int, size: int) -> bytes:
        before("in seal" if points_of_now[-1].recovering else "in vote")
        return hear(self, since, size)

    wire.Ballot._hear = hears  # type: ignore[method-assign]
    performer.move = functools.partial(wire.move, at=before)  # type: ignore[attr-defined]
    live_state.TorchPerformer = Probed  # type: ignore[misc]


def run(case: Case, folder: Path, mode: str, call_wrapper: CallWrapper = None) -> None:
    """One entry of one call."""
    call_wrapper.process_group("gloo")
    points = Points(case, folder, mode, iteration=call_wrapper.iteration, rank=dist.get_rank())
    try:
        _run(case, points, call_wrapper)
    except Injected:
        raise
    except (Exception, JobAbort) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
        points.say("error", text=text[:600])
        raise


def _run(case: Case, points: Points, call_wrapper: CallWrapper) -> None:
    folder, mode, rank = points.folder, points.mode, points.place["rank"]
    points.say("called")
    if len(points.iterations()) > len(case.faults) + 2:
        raise JobAbort("there were more entries than faults")
    mesh: Any = None
    options: dict[str, Any] = {"buddies": case.buddies, "copy_every": EVERY} if case.buddies else {}
    if case.form == "hsdp":
        mesh = init_device_mesh("cpu", (2, case.ranks // 2), mesh_dim_names=("replicate", "shard"))
    elif case.form == "fsdp":
        mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("shard",))

    def updated(objects: Any, step: int, loss: float, works: bool) -> None:
        update(case, objects, step, loss, works=works)

    def built() -> dict[str, Any]:
        objects = build(case, mesh, before)
        names[:] = objects
        return objects

    points_of_now[:] = [points]
    live = LiveState(
        call_wrapper,
        built,
        update=updated if case.has_update else None,
        seed=int(case.name.partition(".")[0]),
        mesh=mesh,
        verify_every=case.verify_every,
        **options,
    )
    points.say("entered", rung=live.plan.rung.name, lost=live.plan.lost, step=live.step)
    points.before("entry")
    wrapped: Any = lambda module: module  # noqa: E731
    if mesh is None:
        options = {"find_unused_parameters": True, "broadcast_buffers": case.broadcast}
        wrapped = lambda module: live.data_parallel("model", **options)  # noqa: E731
    train(case, live, names, wrapped, points.before)
    objects = {name: live[name] for name in names}
    for name in ("optimizer", "rest", "second"):
        if name in objects:
            objects[name].zero_grad()
    values = described(objects)
    end = {"values": values, "steps": live.step}
    unfinished = folder / f"{mode}-{rank}.{os.getpid()}"
    unfinished.write_text(json.dumps(end))
    os.replace(unfinished, folder / f"{mode}-{rank}.json")
    points.say("ended")


names: list[str] = []
"""Of the objects that were built in this process last."""

points_of_now: list[Points] = []
"""Those of the iteration that is on; an optimizer may have been built in an earlier one."""


class Moves(RankAssignment):
    """Each process takes the place of the next one."""

    def __call__(self, ctx: Any) -> Any:
        """See `RankAssignment`."""
        ctx.state.rank = (ctx.state.rank + 1) % ctx.state.world_size
        return ctx


def places(case: Case) -> RankAssignment:
    """Who trains."""
    fills = ReplicaGroups(case.ranks // 2) if case.form == "hsdp" else FillGaps()
    # From right to left.
    return Compose(MaxActiveWorldSize(case.ranks), *([Moves()] if case.moves else []), fills)


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--names", required=True, help="of the cases, with commas")
    args = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    install()
    for name in args.names.split(","):
        seed, _, attempt = name.partition(".")
        case = draw(int(seed), int(attempt or 0))
        folder = args.folder / name
        for mode in ("clean", "faulty"):
            wrapped = Wrapper(**SETTINGS, rank_assignment=places(case), min_world_size=case.ranks)(run)
            try:
                wrapped(case, folder, mode)
            except (Exception, RestartAbort):
                traceback.print_exc()
                return  # and is not started again
    print("all cases are through", flush=True)


if __name__ == "__main__":
    main()
