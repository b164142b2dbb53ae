"""Fault runs of the frameworks with real processes.

    python tests/frameworks/framework_runs.py --job lightning --runs 10 --seed 0

A job is one ftrun with many wrapped calls. Each call is a run: it trains a small model through an exception,
a SIGKILL, a SIGKILL in the middle of a checkpoint and a hang, three ranks and a spare, which moves ranks. The
first run has no faults, and all others must end with its bits. Prints a table; ends with 1 if anything is
wrong, and keeps that job's files.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from support import warm_ftrun  # noqa: E402
from support.many_runs import digest_of, run_ftrun  # noqa: E402

BEGIN, END = "<!-- written by make test-frameworks -->", "<!-- to here -->"
STEPS = 24
CLEAN = -1
START, A_RUN = 240.0, 120.0
"""Seconds in which a job starts, and in which a run of it ends."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

Record = dict[str, Any]
Place = tuple[int, int, int]
"""An iteration of a run, from 0; a rank; a step."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of job.

    Args:
        about: what it is, for the docs.
        script: what its ranks run.
        packages: what has to be installed for it.
        way: passed on to the script.
        processes: how many.
        active: how many of them train.
        saves: points in mid-save where one of its ranks can be killed; see `framework_job.Planned`.
        writers: so many ranks write; 0: all of them.
    """

    about: str
    script: str
    packages: tuple[str, ...] = ()
    way: str = ""
    processes: int = 4
    active: int = 3
    saves: tuple[str, ...] = ("write", "seal")
    writers: int = 0

    def missing(self) -> str | None:
        """What of it is not installed."""
        installed = {each.metadata["Name"] for each in importlib.metadata.distributions()}
        return next((each for each in self.packages if each not in installed), None)

    def versions(self) -> str:
        """What it was run with."""
        return ", ".join(f"{each} {importlib.metadata.version(each)}" for each in ("torch", *self.packages))


KINDS = {
    "fsdp2-sync": Kind("FSDP2, `dcp.save`", "train_torch.py"),
    "fsdp2-async": Kind("FSDP2, `dcp.async_save` in a thread", "train_torch.py", way="async"),
    # Another process writes.
    "fsdp2-process": Kind(
        "FSDP2, `dcp.async_save` in a process", "train_torch.py", way="process", saves=("seal",)
    ),
    "hsdp": Kind("HSDP 2 x 2, `dcp.save`", "train_torch.py", way="hsdp", processes=5, active=4),
    "tp": Kind("tensor parallel, `dcp.save`", "train_torch.py", way="tp"),
    # One rank writes.
    "compiled": Kind(
        "compiled DDP that asks for its rank", "train_torch.py", way="compiled", saves=("seal",)
    ),
    "transformers": Kind(
        "Hugging Face Trainer, evaluation, two workers",
        "train_huggingface.py",
        ("transformers", "accelerate"),
        way="trainer",
    ),
    "accelerate": Kind(
        "Accelerate, shuffled, dropout, three epochs",
        "train_huggingface.py",
        ("accelerate",),
        way="accelerate",
    ),
    "accelerate-live": Kind(
        "Accelerate with `LiveState`, random crops, two workers",
        "train_huggingface.py",
        ("accelerate",),
        way="live",
        saves=("step",),  # it saves nothing: one more kill
    ),
    "lightning": Kind(
        "Lightning Trainer, evaluation, `StatefulDataLoader` with two workers",
        "train_lightning.py",
        ("lightning", "torchdata"),
        way="epochs",
        writers=1,
    ),
    "lightning-steps": Kind(
        "Lightning Trainer with `max_steps`",
        "train_lightning.py",
        ("lightning", "torchdata"),
        way="steps",
        writers=1,
    ),
    "lightning-stream": Kind(
        "Lightning Trainer with an endless `IterableDataset`",
        "train_lightning.py",
        ("lightning", "torchdata"),
        way="stream",
        writers=1,
    ),
    "lightning-fabric": Kind(
        "Lightning Fabric, `StatefulDataLoader` with two workers",
        "train_lightning.py",
        ("lightning", "torchdata"),
        way="fabric",
        writers=1,
    ),
    "megatron": Kind(
        "Megatron-core, tensor parallel 2 x data parallel 2",
        "train_recipes.py",
        ("megatron-core",),
        way="megatron",
        processes=5,
        active=4,
        writers=2,
    ),
    "deepspeed": Kind(
        "DeepSpeed ZeRO-1, its own checkpoints", "train_recipes.py", ("deepspeed",), way="deepspeed"
    ),
    "loader": Kind("`StatefulDataLoader`, two workers", "train_torch.py", ("torchdata",), way="loader"),
}


@dataclasses.dataclass
class Verdict:
    """What became of a run.

    Args:
        number: of the run.
        faults: kind and point of those that happened.
        restarts: of the function.
        digest: of what came out.
        began: the iterations, in order, the ranks, and the first step of each.
        saved: the same, and the step of each checkpoint.
        wrong: what must not be.
    """

    number: int
    faults: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    restarts: int = 0
    digest: str = ""
    began: list[Place] = dataclasses.field(default_factory=list)
    saved: list[Place] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


def random_faults(seed: int, kind: Kind) -> str:
    """Chooses a run's faults, one of each kind, in random order: ``kind:point:step:rank,…``."""
    choose = random.Random(seed)
    save = choose.choice(kind.saves)
    kinds = [("exception", "step"), ("sigkill", "step"), ("sigkill", save), ("sleep", "step")]
    choose.shuffle(kinds)
    part, planned = STEPS // len(kinds), []
    for index, (what, point) in enumerate(kinds):
        step, rank = index * part + choose.randint(1, part - 2), choose.randrange(kind.active)
        if point == "write" and kind.writers:
            rank %= kind.writers
        planned.append(f"{what}:{point}:{step}:{rank}")
    return ",".join(planned)


def judge(number: int, records: list[Record], active: int, reference: str | None, planned: int) -> Verdict:
    """Judges a run by its events.

    Args:
        number: of the run.
        records: those of its iterations, in order.
        active: number of active ranks.
        reference: digest of the clean run; None: this is it.
        planned: how many faults must have happened.
    """
    verdict = Verdict(number)
    verdict.faults = [(each["kind"], each["point"]) for each in records if each["event"] == "inject"]
    iterations = {each["iteration"] for each in records if each["event"] == "entered"}
    verdict.restarts = len(iterations) - 1
    order = sorted(iterations)
    for event, places in (("began", verdict.began), ("saved", verdict.saved)):
        found = [each for each in records if each["event"] == event]
        places += sorted((order.index(each["iteration"]), each["rank"], each["step"]) for each in found)
    finished = [each for each in records if each["event"] == "finished"]
    verdict.digest = next((each["digest"] for each in finished), "")
    digests = {each["digest"] for each in finished} | ({reference} if reference else set())
    if {each["rank"] for each in finished} != set(range(active)):
        verdict.wrong.append(f"finished on ranks {sorted({each['rank'] for each in finished})} only")
    if len(digests) != 1:
        verdict.wrong.append(f"{len(digests)} different digests")
    if len(verdict.faults) != planned:
        verdict.wrong.append(f"{len(verdict.faults)} faults happened, and {planned} were planned")
    # A rank that was hung or killed may fail once more in what it left; but none restarts again and again.
    if verdict.restarts > 2 * planned:
        verdict.wrong.append(f"{verdict.restarts} restarts after {planned} faults")
    return verdict


def run_job(
    kind: Kind,
    folder: Path,
    faults: list[str],
    temporary: Path | None = None,
    *,
    steps: int = STEPS,
    batches: int = 1,
    options: Sequence[str] = (),
) -> list[Verdict]:
    """Runs a job to its end.

    Args:
        kind: of job.
        folder: for its files.
        faults: of each run, after the clean one.
        temporary: folder for temporary files; by default one of its own.
        steps: of each run.
        batches: of each step.
        options: of ftrun.

    Returns:
        A verdict on each run; what is wrong with the job counts for its last one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [*options, "--nproc-per-node", kind.processes, "--max-rank-restarts", 100 * (len(faults) + 1)]
    words += [HERE / kind.script, "--folder", folder, "--steps", steps, "--way", kind.way]
    words += ["--active", kind.active, "--batches", batches, "--faults", *faults]
    # With a short name: a loader's workers have sockets there, whose names have to fit into 108 bytes.
    with tempfile.TemporaryDirectory(prefix="ft-") as short:
        environment = {**ENVIRONMENT, "TMPDIR": str(temporary or short)}
        records, trouble = run_ftrun(words, folder, environment, START + A_RUN * (len(faults) + 1))
    reference = digest_of(records.get(CLEAN, []))
    verdicts = [
        judge(
            number,
            records[number],
            kind.active,
            reference,
            0 if number < 0 else len(faults[number].split(",")) - (not faults[number]),
        )
        for number in sorted(records)
    ]
    missing = len(faults) + 1 - len(verdicts)
    trouble += [f"{missing} runs did not begin"] * bool(missing)
    verdicts = verdicts or [Verdict(CLEAN)]
    verdicts[-1].wrong += trouble
    return verdicts


def row(name: str, kind: Kind, verdicts: list[Verdict]) -> list[str]:
    """What the docs' table says of a job."""
    runs = [each for each in verdicts if each.number != CLEAN]
    wrong = sum(bool(each.wrong) for each in verdicts)
    faults = sum(len(each.faults) for each in runs)
    restarts = sum(each.restarts for each in runs)
    result = f"{wrong} of {len(verdicts)} wrong" if wrong else "the same bits"
    return [f"{kind.about} (`{name}`)", kind.versions(), str(len(runs)), str(faults), str(restarts), result]


def table(rows: list[list[str]]) -> str:
    """The rows as Markdown."""
    head = ["job", "versions", "runs", "faults", "restarts", "result"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def write_table(path: Path, rows: list[list[str]]) -> None:
    """Puts the rows into a page of the docs, in the place of those of the same jobs."""
    before, begin, rest = path.read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}")
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in old.strip().splitlines()[2:]]
    merged = {each[0]: each for each in [*cells, *rows]}
    path.write_text(f"{before}{begin}\n{table([*merged.values()])}\n{end}{after}")


def main() -> int:
    """Runs jobs, and prints what became of them."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--job", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--runs", type=int, default=2, help="with faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next")
    parser.add_argument("--faults", nargs="*", help="kind:point:step:rank,… of each run (default: by seed)")
    parser.add_argument("--folder", type=Path, help="for files of jobs in which something is wrong")
    parser.add_argument("--docs", type=Path, help="a page whose table gets the rows")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("FT_WRAPPER_TEST_ENDS", "quick")
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="framework-runs-"))).resolve()
    rows, is_wrong = [], False
    with warm_ftrun.warm():
        for name in args.job:
            kind = KINDS[name]
            if (missing := kind.missing()) is not None:
                print(f"{name}: {missing} is not installed")
                continue
            seeds = range(args.seed, args.seed + args.runs)
            faults = args.faults or [random_faults(seed, kind) for seed in seeds]
            verdicts = run_job(kind, folder / name, faults)
            bad = [verdict for verdict in verdicts if verdict.wrong]
            for verdict in verdicts:
                told = ", ".join(f"{what} at {point}" for what, point in verdict.faults)
                ending = "; ".join(verdict.wrong) or verdict.digest[:12]
                print(f"{name} run {verdict.number}: {told or 'clean'}: {ending}", flush=True)
            if bad:
                print(f"  see {folder / name}", flush=True)
            else:
                shutil.rmtree(folder / name)
            rows.append(row(name, kind, verdicts))
            is_wrong |= bool(bad)
    print(f"\n{table(rows)}")
    if args.docs is not None:
        write_table(args.docs, rows)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
