"""How soon a killed rank is replaced: from SIGKILL to its replacement being in the function.

    python benchmarks/replace_rank.py              # under three minutes on two cores
    python benchmarks/replace_rank.py --quick      # fewer kills

The same function in a gloo group, the same ranks killed at the same moments, under ftrun, under ``ftrun
--no-fork`` (torch is imported by each replacement) and under torchrun, which restarts all ranks. The
driver stamps the time just before the signal; each rank stamps the function's first line. Figures are
medians; times are of this machine, the ratios are what to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each wait that times out would print two warnings

from figures import median, ratio, spread, table
from jobs import Job, job, own_all_descendants
from restart_latency import await_key
from torch._C._distributed_c10d import TCPStore

WORKER = Path(__file__).resolve().parent / "replace_worker.py"
FORMATION_TIMEOUT = 90.0  # seconds for all ranks to be in the function for the first time
RETURN_TIMEOUT = 60.0  # seconds for all ranks to be back
FTRUN, EXECUTED, TORCHRUN = "ftrun", "ftrun --no-fork", "torchrun"
NAMES = (FTRUN, EXECUTED, TORCHRUN)


@dataclasses.dataclass(frozen=True)
class Replaced:
    """What became of one kill, in seconds from the signal.

    Args:
        replacement: until the killed rank's next process was in the function.
        everybody: until the last rank was.
        new: how many of the processes in the function are new.
    """

    replacement: float
    everybody: float
    new: int


def command(name: str, ranks: int, kills: int) -> list[str]:
    """Returns what starts the ranks.

    Args:
        name: of the launcher.
        ranks: how many.
        kills: how often one of them is killed.
    """
    if name == TORCHRUN:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
            *(f"--nproc-per-node={ranks}", f"--max-restarts={kills}"),
        ]
    standby = ["--no-fork"] if name == EXECUTED else []
    return [
        *(sys.executable, "-m", "ft_wrapper.run", f"--nproc-per-node={ranks}"),
        *(f"--max-rank-restarts={kills}", *standby),
    ]


def run(folder: Path, name: str, ranks: int, kills: int, seed: int) -> list[Replaced]:
    """Runs one job, whose ranks are killed in turn.

    Args:
        folder: for the job's files.
        name: of the launcher.
        ranks: how many.
        kills: how often one of them is killed.
        seed: decides the moments.

    Raises:
        RuntimeError: the job did not start, or did not come back; the message holds the end of its output.
    """
    chance = random.Random(seed)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with job(folder) as job_:
        limit = round(FORMATION_TIMEOUT + kills * (RETURN_TIMEOUT + 5)) + 60
        wrapped = "no" if name == TORCHRUN else "yes"
        worker = [str(WORKER), f"127.0.0.1:{store.port}", str(job_.log), str(limit), wrapped]
        # Without it torch 2.13 reuses the store of the attempt before, and some restarts fail or hang.
        job_.start([*command(name, ranks, kills), *worker], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        if not await_key(store, "back/0", FORMATION_TIMEOUT, job_):
            raise RuntimeError(f"{name} with {ranks} ranks did not start:\n{job_.complaint()}")
        results = []
        for index in range(kills):
            # Each process lives for longer than what a launcher takes for a crash loop.
            time.sleep((6.0 / ranks if index else 4.0) + chance.random())
            before = newest(job_)
            victim = index % ranks
            store.add("kills", 1)
            at = time.monotonic()
            os.kill(before[victim]["pid"], signal.SIGKILL)
            if not await_key(store, f"back/{index + 1}", RETURN_TIMEOUT, job_):
                raise RuntimeError(
                    f"{name}: not back {RETURN_TIMEOUT:.0f} s after a kill:\n{job_.complaint()}"
                )
            after = newest(job_)
            results.append(
                Replaced(
                    after[victim]["monotonic"] - at,
                    max(record["monotonic"] for record in after.values()) - at,
                    sum(after[slot]["pid"] != before[slot]["pid"] for slot in after),
                )
            )
        return results


def newest(job_: Job) -> dict[int, dict[str, Any]]:
    """Returns the last entry of each rank into the function."""
    return {record["slot"]: record for record in job_.records()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, metavar="N")
    add("--kills", type=int, default=10, metavar="N", help="under each launcher (default: 10)")
    add("--seed", type=int, default=0, help="decides the moments")
    add(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    add("--quick", action="store_true", help="three kills")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.kills < 1:
        parser.error(f"--ranks {arguments.ranks} --kills {arguments.kills}: at least 2 ranks and 1 kill")
    own_all_descendants()
    folder = Path(tempfile.mkdtemp(prefix="replace_rank-"))
    results: dict[str, list[Replaced]] = {}
    try:
        for name in arguments.only:
            kills = min(arguments.kills, 3) if arguments.quick else arguments.kills
            results[name] = run(folder, name, arguments.ranks, kills, arguments.seed)
            print(f"{name}: {spread([one.replacement for one in results[name]])}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ours = median([one.replacement for one in results.get(FTRUN, [])])
    rows = [
        [
            name,
            spread([one.replacement for one in of]),
            spread([one.everybody for one in of]),
            f"{max(one.new for one in of)} of {arguments.ranks}",
            ratio(median([one.replacement for one in of]), ours),
        ]
        for name, of in results.items()
    ]
    print(f"\nSIGKILL of one of {arguments.ranks} ranks: median (least .. greatest)")
    print(
        table(
            ["launcher", "replacement in the function", "all ranks in it", "new processes", f"/ {FTRUN}"],
            rows,
        )
    )


if __name__ == "__main__":
    main()
