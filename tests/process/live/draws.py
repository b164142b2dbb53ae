"""Draws trainings, and runs each without and with faults: the same bits must come out.

    python tests/process/live/draws.py SEED...

A case is drawn from its seed: optimizer and options, type of the weights, buffers, memory format, optimizers
that rest, groups added later, schedulers, scaler, averages, wrapped layers, ways to train in parallel, ranks,
and one to three faults in steps, votes and updates, with replicas most of them followed by another one in the
recovery. What torch cannot compute is drawn again:
each case is tried here first, alone, without LiveState. A job is one ftrun for many cases, since starting
costs most; a case that ends or blocks it leaves those behind it without a result.

A case is right if all ranks end with the bits of the run without faults (parameters, all buffers, the
optimizers' states with their types and shapes, everything else), no step was lost, and no entry is without a
fault of ours. With full shards a kill may go back to copies, and the steps are done again.

Not promised, and so not drawn: state in Python attributes that a forward pass changes, large buffers that
are written without a trace in their version, an optimizer that is differentiable, random numbers without a
seed, and collectives in an update (LBFGS, whose closure calls the model, goes with DDP only). torch's fused
SGD with momentum in bf16 or fp16 on the CPU is left out, too: it reads memory that nothing has written.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for place in (str(HERE), str(HERE.parents[1])):
    if place not in sys.path:
        sys.path.insert(0, place)

from draw_cases import STEPS, Case, draw  # noqa: E402
from support import warm_ftrun  # noqa: E402
from support.many_runs import run_ftrun  # noqa: E402

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "use-vc timeout:1 attempts:1"}
EVERY = 2
ATTEMPTS = 60
START, A_CASE = 120.0, 30.0
"""Seconds in which a job starts, and in which a case of it ends."""
PER_JOB = 20
BEHIND_A_VOTE = ("after vote", "in update", "after commit")


@dataclasses.dataclass
class Verdict:
    """What became of a case.

    Args:
        case: which one.
        wrong: what must not be; "": nothing.
    """

    case: Case
    wrong: str = ""


# Drawing -------------------------------------------------------------------------------------------------


def drawn(seed: int) -> Case:
    """The first case of a seed that torch can compute."""
    for attempt in range(ATTEMPTS):
        case = draw(seed, attempt)
        if why_not(case) is None:
            return case
    raise RuntimeError(f"seed {seed}: torch can compute none of {ATTEMPTS} cases")


class Alone:
    """What stands in for a `LiveState` where a case is tried."""

    def __init__(self, case: Case, objects: dict[str, Any]) -> None:
        self._case, self._objects = case, objects
        self.step = 0

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]

    def steps(self, total: int) -> Iterator[int]:
        """All of them."""
        import torch

        for self.step in range(total):
            torch.manual_seed(self.step)
            yield self.step

    def commit(self, step: int = 0, loss: float = 0.0, works: bool = True) -> None:
        """Updates."""
        from draw_parts import REST, update

        works = not self._case.second or self.step % REST == 1
        update(self._case, self._objects, self.step, loss, works=works)


def why_not(case: Case) -> Exception | None:
    """Computes a case without LiveState, as one of some ranks that are not there; returns what torch says.

    Such ranks do not go with DDP: the module is called as it is.
    """
    import draw_parts
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if case.optimizer == "SGD" and {"fused", "momentum"} <= dict(case.options).keys() and "16" in case.dtype:
        return ValueError("torch does not compute the same twice")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    try:
        mesh = None
        if case.form == "hsdp":
            mesh = init_device_mesh("cpu", (2, case.ranks // 2), mesh_dim_names=("replicate", "shard"))
        elif case.form == "fsdp":
            mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("shard",))
        if mesh is not None:  # docs/live.md says so
            with torch.device("meta"):
                draw_parts.build(case, mesh, lambda point: None)
        objects = draw_parts.build(case, mesh, lambda point: None)
        live = Alone(case, objects)
        draw_parts.train(case, live, list(objects), lambda module: module, lambda point, step: None)
        draw_parts.described(objects)
        # Ranks that are not there give no shards that say anything.
        if mesh is None and not draw_parts.is_finite(objects):
            return ValueError("the weights do not stay finite")
    except Exception as error:
        return error
    finally:
        dist.destroy_process_group()
    return None


# Judging -------------------------------------------------------------------------------------------------


def judge(case: Case, folder: Path) -> Verdict | None:
    """Judges a case by what its ranks have noted; None if it has not come to its end."""
    said = _said(folder)
    faults = [one for one in said if one["what"] == "fault"]
    asked = {one["iteration"] for one in faults}
    errors = [  # others come in the wake of our faults
        f"{one['mode']} run, rank {one['rank']}: {one['text']}"
        for one in said
        if one["what"] == "error" and one["iteration"] not in asked
    ]
    ends = {
        mode: {
            int(path.stem.partition("-")[2]): json.loads(path.read_text())
            for path in folder.glob(f"{mode}-*.json")
        }
        for mode in ("clean", "faulty")
    }
    is_whole = all(len(each) == case.ranks for each in ends.values())
    if not is_whole and not errors:
        return None
    wrong = [*dict.fromkeys(errors)][:2]
    if not is_whole:
        wrong.append("the job ended in this case")
    else:
        wrong += _differences(case, ends)
        missing = len(case.faults) - len(faults)
        wrong += [f"{missing} faults did not happen"] * bool(missing)
    return Verdict(case, "; ".join(wrong + _wrong_entries(case, said)))


def _said(folder: Path) -> list[dict[str, Any]]:
    path = folder / "said"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _differences(case: Case, ends: dict[str, dict[int, Any]]) -> list[str]:
    clean, faulty, wrong = ends["clean"], ends["faulty"], []
    replicas = {"ddp": case.ranks, "hsdp": 2, "fsdp": 1}[case.form]
    apart = case.ranks // replicas
    for rank in range(apart, case.ranks):
        if clean[rank]["values"] != clean[rank % apart]["values"]:
            what = first_difference(clean[rank % apart]["values"], clean[rank]["values"])
            wrong.append(f"without faults, ranks {rank % apart} and {rank} differ: {what}")
            break
    for rank in range(case.ranks):
        if clean[rank]["values"] != faulty[rank]["values"]:
            what = first_difference(clean[rank]["values"], faulty[rank]["values"])
            wrong.append(f"rank {rank} ends with other bits: {what}")
            break
    steps = {end["steps"] for each in ends.values() for end in each.values()}
    return wrong + [f"ended after steps {sorted(steps)}"] * (steps != {STEPS})


def first_difference(one: dict[str, str], other: dict[str, str]) -> str:
    """Names what differs first of two ends, and how much does."""
    paths = [path for path in dict.fromkeys([*one, *other]) if one.get(path) != other.get(path)]
    first = paths[0]
    there, here = one.get(first, "nothing"), other.get(first, "nothing")
    return f"{first} is {there}, and then {here} ({len(paths)} of {len(one)} values)"


def _wrong_entries(case: Case, said: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for mode in ("clean", "faulty"):
        entered = [one for one in said if one["what"] == "entered" and one["mode"] == mode]
        iterations = sorted({one["iteration"] for one in said if one["mode"] == mode})
        asked = {one["iteration"] for one in said if one["what"] == "fault"}
        for number in iterations[:-1]:
            if number not in asked:
                where = number - iterations[0]
                wrong.append(f"{mode} run: iteration {where} ended without a fault of ours")
        for one in entered:
            again = one["iteration"] != iterations[0]
            most = EVERY if case.may_go_back else 0
            # The seal of the first recovery may still be unknown.
            is_right = one["rung"] == "CHECKPOINT" if not again or one["step"] == 0 else False
            is_right = is_right or (again and one["rung"] in ("PEERS", "COPIES" if case.may_go_back else ""))
            reached = [
                (each["step"] or 0) + (each["point"] in BEHIND_A_VOTE)  # which has ended, so all can do it
                for each in said
                if each["what"] == "fault" and each["iteration"] < one["iteration"] and mode == "faulty"
            ]
            again_done = max(reached, default=0) - one["step"]
            if not is_right or max(one["lost"] or 0, again_done) > most:
                where = one["iteration"] - iterations[0]
                lost = f"{one['lost']} steps lost, {again_done} done again, from {one['rung']}"
                wrong.append(f"{mode} run, iteration {where}: {lost}")
    return [*dict.fromkeys(wrong)][:3]


# Running -------------------------------------------------------------------------------------------------


def run_all(cases: list[Case], folder: Path) -> Iterator[Verdict]:
    """Runs cases in few jobs; keeps the files of those in which something is wrong."""
    for number, job in enumerate(in_jobs(cases)):
        place = folder / f"job-{number}"
        verdicts = run_job(job, place)
        if not any(verdict.wrong for verdict in verdicts):
            shutil.rmtree(place)
        yield from verdicts


def in_jobs(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases by job: those of a job have the same ranks and spares."""
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.ranks, case.spares), []).append(case)
    return [each[at : at + PER_JOB] for each in groups.values() for at in range(0, len(each), PER_JOB)]


def run_job(cases: list[Case], folder: Path) -> list[Verdict]:
    """Runs cases of the same number of processes; what is wrong with the job counts for its last one."""
    for case in cases:
        (folder / case.name).mkdir(parents=True)
    processes = cases[0].ranks + cases[0].spares
    words = ["--nproc-per-node", processes, "--max-rank-restarts", 100 * len(cases), HERE / "train_draw.py"]
    words += ["--folder", folder, "--names", ",".join(case.name for case in cases)]
    _, trouble = run_ftrun(words, folder, ENVIRONMENT, START + A_CASE * len(cases))
    verdicts = []
    for case in cases:
        said = _said(folder / case.name)
        unfinished = Verdict(case, f"it did not end; last: {said[-1] if said else 'nothing'}")
        verdicts.append(judge(case, folder / case.name) or unfinished)
    verdicts[-1].wrong = "; ".join(filter(None, (verdicts[-1].wrong, *trouble)))
    return verdicts


def main() -> None:
    """Runs the cases of some seeds, and prints what became of them."""
    seeds = map(int, sys.argv[1:])
    with warm_ftrun.warm():
        for verdict in run_all([drawn(seed) for seed in seeds], Path(tempfile.mkdtemp())):
            print(verdict)


if __name__ == "__main__":
    main()
