"""How soon a job trains again once a spare has taken over: from SIGKILL to the first optimizer step after it.

    python benchmarks/first_step.py              # under six minutes on two cores
    python benchmarks/first_step.py --quick      # fewer jobs

Three ranks train a small transformer with DistributedDataParallel and AdamW, a fourth one is a spare. The
driver kills an active rank when the spare waits: in turn of a job whose spare warms up (the default) and of
one whose spare does not (``warm_up=False``). The victim stamps the time just before its end; each rank stamps
the function's first line and the end of each entry's first step. Figures are medians; times are of this
machine, the ratio is what to compare.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each wait that times out would print two warnings

from figures import median, ratio, spread, table
from jobs import job, own_all_descendants
from restart_latency import await_key
from torch._C._distributed_c10d import TCPStore

WORKER = Path(__file__).resolve().parent / "first_step_worker.py"
FORMATION_TIMEOUT = 120.0  # seconds for all ranks to have trained a step, and for the spare to be warm
RETURN_TIMEOUT = 120.0  # seconds for all ranks to have trained another one
ACTIVE = 3
COLD, WARM = "spare as it was started", "spare warmed up"
NAMES = (COLD, WARM)
BACK, STEP, SPARES_BACK, SPARES_STEP = (
    "last rank in the function",
    "its first step done",
    "the spare in the function",
    "the spare's first step done",
)


def run(folder: Path, name: str, seed: int) -> dict[str, float]:
    """Runs one job, one of whose active ranks is killed.

    Args:
        folder: for the job's files.
        name: how its spare waits.
        seed: decides the victim and the moment.

    Returns:
        Seconds from the kill, by what they led to.

    Raises:
        RuntimeError: the job did not start, or did not come back; the message holds the end of its output.
    """
    chance = random.Random(seed)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with job(folder) as job_:
        limit = round(FORMATION_TIMEOUT + RETURN_TIMEOUT) + 60
        how = "warm" if name == WARM else "cold"
        victim, pause = 1 + seed % (ACTIVE - 1), 0.2 + chance.random()  # rank 0's monitor hosts the store
        worker = [str(WORKER), f"127.0.0.1:{store.port}", str(job_.log), str(limit), how]
        job_.start_ranks([sys.executable, *worker, str(victim), str(pause)], ACTIVE + 1)
        for key in ("stepped/0", *(["warm"] if name == WARM else [])):
            if not await_key(store, key, FORMATION_TIMEOUT, job_):
                raise RuntimeError(f"{name}: no {key}:\n{job_.complaint()}")
        store.set("fault", "")
        if not await_key(store, "stepped/1", RETURN_TIMEOUT, job_):
            raise RuntimeError(f"{name}: no step {RETURN_TIMEOUT:.0f} s after the kill:\n{job_.complaint()}")
        records = job_.records()
    at = next(record["monotonic"] for record in records if record["event"] == "fault")
    after = {
        (record["event"], record["slot"]): record["monotonic"] - at
        for record in records
        if record["event"] != "fault" and record["iteration"] == 1
    }
    last = {event: max(at for (what, _), at in after.items() if what == event) for event in ("enter", "step")}
    return {
        BACK: last["enter"],
        STEP: last["step"],
        SPARES_BACK: after["enter", ACTIVE],
        SPARES_STEP: after["step", ACTIVE],
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", type=int, default=9, metavar="N", help="of each kind (default: 9)")
    add("--quick", action="store_true", help="three of each kind")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: at least 1")
    own_all_descendants()
    folder = Path(tempfile.mkdtemp(prefix="first_step-"))
    results: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    try:
        for seed in range(min(arguments.jobs, 3) if arguments.quick else arguments.jobs):
            for name in NAMES[:: 1 if seed % 2 else -1]:
                results[name].append(run(folder, name, seed))
                print(f"{name}: first step {results[name][-1][STEP]:.3f} s after the kill", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for what in (SPARES_BACK, BACK, SPARES_STEP, STEP):
        cold, warm = ([one[what] for one in results[name]] for name in NAMES)
        rows.append([what, spread(cold), spread(warm), ratio(median(cold), median(warm))])
    print(f"\nFrom SIGKILL of one of {ACTIVE} active ranks: median (least .. greatest)")
    print(table(["until", *NAMES, "times longer"], rows))


if __name__ == "__main__":
    main()
