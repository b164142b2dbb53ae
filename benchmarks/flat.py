"""Whether a process stays as small as it was over many restarts: memory, descriptors, threads, old models.

    python benchmarks/flat.py                # 200 restarts with DDP, 100 with each other kind, two ranks each
    python benchmarks/flat.py --ddp 20 --fsdp2 10
    python benchmarks/flat.py --fsdp2 20 --no-collect-garbage     # what the wrapper's collection is for

The ranks take turns raising in the middle of a step, while the other waits in a collective. Each process is
measured before each entry, once its old groups are gone and glibc has released what it can (``malloc_trim``,
without which its free lists grow). The table compares the first restarts with the last ones. If anything has
grown, the script says what stays, and exits with 1.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from jobs import free_port_pair

if TYPE_CHECKING:
    from ft_wrapper import CallWrapper

WARM_UP = 10  # restarts until caches are full
FOLDER_ENV = "FT_WRAPPER_FLAT_FOLDER"
GROWTH = 1.03  # of resident memory, from the early restarts to the late ones; 1.02 is what was seen


@dataclasses.dataclass(frozen=True)
class Kind:
    """What trains.

    Args:
        module: has a function of the kind's name, with ``_`` for ``-``, which trains in an iteration: it is
            given the rank's `Flat` and a ``CallWrapper``. ``SETTINGS`` of it are for the wrapper.
        restarts: how many, if not told.
        needs: what has to be installed beside torch.
    """

    module: str
    restarts: int = 100
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What of it is not installed."""
        return next((each for each in self.needs if importlib.util.find_spec(each) is None), None)


KINDS = {
    "ddp": Kind("flat_torch", 200),
    "compiled": Kind("flat_torch"),
    "fsdp2": Kind("flat_torch"),
    "hsdp": Kind("flat_torch"),
    "tp": Kind("flat_torch"),
    "lightning": Kind("flat_lightning", needs=("lightning", "torchdata")),
    "lightning-fabric": Kind("flat_lightning", needs=("lightning", "torchdata")),
    "transformers": Kind("flat_huggingface", needs=("transformers", "accelerate")),
    "accelerate": Kind("flat_huggingface", needs=("transformers", "accelerate")),
}

Look = dict[str, Any]


class Flat:
    """A rank's looks at itself, and its faults.

    Args:
        restarts: how many.
        folder: which all ranks share.
    """

    def __init__(self, restarts: int, folder: Path) -> None:
        self.restarts = restarts
        self.folder = folder
        self.looks: list[Look] = []
        self._slot = int(os.environ["RANK"])
        self._made: dict[str, list[weakref.ref[Any]]] = {"models": [], "groups": []}
        self._libc = ctypes.CDLL(None)
        self._iteration = 0

    def enter(self, call_wrapper: CallWrapper) -> None:
        """An iteration begins: looks at what the earlier ones have left.

        Raises:
            JobAbort: something beside the faults makes it restart.
        """
        import ft_wrapper
        from ft_wrapper.abort import wait_for_released_groups
        from ft_wrapper.exception import JobAbort

        self._iteration = call_wrapper.iteration
        if self._iteration > self.restarts + WARM_UP:
            raise JobAbort("more restarts than faults: see what was raised")
        wait_for_released_groups()
        self._libc.malloc_trim(0)
        process = psutil.Process()
        memory = process.memory_full_info()
        look: Look = {
            "MiB": memory.uss / 2**20,  # what it shares with no other process
            "resident": memory.rss / 2**20,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            **{what: sum(each() is not None for each in made) for what, made in self._made.items()},
            "works": _work_registry_size(),
        }
        find = getattr(ft_wrapper, "find_leaks", None)
        if find is not None and (look["models"] or look["groups"]):
            look["held"] = [str(each) for each in find()]
        self.looks.append(look)

    def made(self, model: Any) -> None:
        """Notes a model of this iteration, and the process group."""
        import torch.distributed as dist

        self._made["models"].append(weakref.ref(model))
        self._made["groups"].append(weakref.ref(dist.group.WORLD))

    @property
    def is_over(self) -> bool:
        """No fault comes any more."""
        return self._iteration >= self.restarts

    def fail(self) -> None:
        """In the midst of the second step of an iteration: raises on one rank, in turn."""
        if not self.is_over and self._slot == self._iteration % 2:
            raise RuntimeError("a fault of the benchmark")


def _work_registry_size() -> int:
    """Collectives that were begun and not waited for, which torch keeps, each with its group, for ever."""
    import torch._C._distributed_c10d as c10d

    size: int = getattr(c10d, "_get_work_registry_size", lambda: 0)()
    return size


def rank_main(name: str, restarts: int, collects: bool) -> None:
    """Runs one rank; prints its looks as JSON."""
    import torch

    from ft_wrapper import Limits, Wrapper

    torch.set_num_threads(1)
    flat = Flat(restarts, Path(os.environ[FOLDER_ENV]))
    module = importlib.import_module(KINDS[name].module)
    work = getattr(module, name.replace("-", "_"))

    # The same fault, two hundred times, is what is asked for.
    limits = Limits(max_same_faults=None, collect_garbage=collects)

    @Wrapper(limits=limits, **getattr(module, "SETTINGS", {}))
    def train(call_wrapper: CallWrapper) -> None:
        flat.enter(call_wrapper)
        work(flat, call_wrapper)

    train()
    print(json.dumps(flat.looks))


def run(kind: str, restarts: int, *, collects: bool = True) -> list[list[Look]]:
    """Runs a job of two ranks; returns each one's looks.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(kind, restarts, collects, folder)


def _run(kind: str, restarts: int, collects: bool, folder: str) -> list[list[Look]]:
    port = str(free_port_pair())
    ranks = []
    for slot in range(2):
        environment = {
            **os.environ,
            FOLDER_ENV: folder,
            "RANK": str(slot),
            "LOCAL_RANK": str(slot),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            # glibc gives back at once what is large, and does not raise that bound: what it keeps for
            # threads, now more, now less, is no growth.
            "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
            "MALLOC_ARENA_MAX": "2",
        }
        command = [sys.executable, __file__, "--rank", kind, str(restarts)]
        command += [] if collects else ["--no-collect-garbage"]
        with Path(f"flat-{kind}-{slot}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
            )
    try:
        said = [rank.communicate(timeout=3600)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"the job failed; see flat-{kind}-0.log and flat-{kind}-1.log")
        return [json.loads(text.splitlines()[-1]) for text in said]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def wrong(looks: list[list[Look]]) -> list[str]:
    """What does not stay as it was, in words: at late restarts, compared with those from the tenth on.

    Args:
        looks: of each rank; at least twice `WARM_UP`.
    """
    found = []
    for rank, of_rank in enumerate(looks):
        for what in ("models", "groups"):
            most = max(look[what] for look in of_rank)
            if most:
                held = dict.fromkeys(line for look in of_rank for line in look.get("held", ()))
                found.append(
                    f"rank {rank}: {most} {what} of earlier iterations were alive: {'; '.join(held)}"
                )
        early, late = of_rank[WARM_UP : 2 * WARM_UP], of_rank[-WARM_UP:]
        for what, growth in (("descriptors", 1.0), ("threads", 1.0), ("resident", GROWTH)):
            before, after = (statistics.median(look[what] for look in part) for part in (early, late))
            if after > before * growth:
                found.append(f"rank {rank}: {what} grew from {before:.1f} to {after:.1f}")
    return found


def report(kind: str, looks: list[list[Look]], seconds: float) -> None:
    """Prints a table."""
    restarts = len(looks[0]) - 1
    print(f"\n{kind}: {restarts} restarts of two ranks in {seconds:.0f} s")
    print(f"{'':12}{'first':>10}{'early':>10}{'late':>10}{'last':>10}{'a restart':>12}")
    early = [row for rank in looks for row in rank[WARM_UP : 2 * WARM_UP]]
    late = [row for rank in looks for row in rank[-WARM_UP:]]
    between = max(1, restarts - 2 * WARM_UP)
    for name in (each for each in looks[0][0] if each != "held"):
        first, last = (max(rank[i][name] for rank in looks) for i in (0, -1))
        a, b = (statistics.median(row[name] for row in rows) for rows in (early, late))
        print(f"{name:12}{first:10.1f}{a:10.1f}{b:10.1f}{last:10.1f}{(b - a) / between:12.3f}")
    print(
        f"first, last: the larger rank's; early: median of restarts {WARM_UP} to {2 * WARM_UP - 1}; "
        f"late: of the last {WARM_UP}"
    )


def main() -> int:
    """Runs the jobs, or one rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind in KINDS.items():
        parser.add_argument(f"--{name}", type=int, help=f"restarts ({kind.restarts}, if no kind is chosen)")
    parser.add_argument("--no-collect-garbage", action="store_true", help="Limits(collect_garbage=False)")
    parser.add_argument("--rank", nargs=2, metavar=("KIND", "RESTARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    collects = not options.no_collect_garbage
    if options.rank:
        rank_main(options.rank[0], int(options.rank[1]), collects)
        return 0
    chosen = {name: getattr(options, name.replace("-", "_")) for name in KINDS}
    if not any(chosen.values()):
        chosen = {name: kind.restarts for name, kind in KINDS.items()}
    is_wrong = False
    for name, restarts in chosen.items():
        if not restarts:
            continue
        if (missing := KINDS[name].missing()) is not None:
            print(f"\n{name}: {missing} is not installed")
            continue
        began = time.monotonic()
        looks = run(name, restarts, collects=collects)
        report(name, looks, time.monotonic() - began)
        for line in wrong(looks) if restarts >= 2 * WARM_UP else ():
            print(f"WRONG: {line}")
            is_wrong = True
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
