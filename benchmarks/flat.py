"""Whether a process stays as small as it was over many restarts: memory, descriptors, threads, old models.

    python benchmarks/flat.py                # 200 restarts with DDP, 100 with FSDP2, two ranks each
    python benchmarks/flat.py --ddp 20 --fsdp2 10

Each rank raises in turn, in the midst of a step, while the other sits in a collective. Before each entry the
process is looked at, once its old groups are gone and glibc has given back what it can (``malloc_trim``,
without which its free lists grow). The table has the first restarts and the last ones: the same, or something
stays.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
from jobs import free_port_pair

WARM_UP = 10  # restarts until caches are full
WIDTH = 1024  # of a layer: 4 MB of weights


def look(models: list[weakref.ref[Any]], libc: ctypes.CDLL) -> dict[str, float]:
    """What this process has: memory in MiB (beyond what it shares), descriptors, threads, old models."""
    libc.malloc_trim(0)
    process = psutil.Process()
    return {
        "MiB": process.memory_full_info().uss / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "models": sum(model() is not None for model in models),
    }


def rank_main(kind: str, restarts: int) -> None:
    """Runs one rank; prints its looks as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ft_wrapper import CallWrapper, Wrapper
    from ft_wrapper.abort import wait_for_released_groups

    torch.set_num_threads(1)
    slot, libc = int(os.environ["RANK"]), ctypes.CDLL(None)
    looks: list[dict[str, float]] = []
    models: list[weakref.ref[Any]] = []

    def build() -> torch.nn.Module:
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        if kind == "ddp":
            return torch.nn.parallel.DistributedDataParallel(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        return model

    @Wrapper(max_same_faults=None)  # the same one, two hundred times, is what is asked for
    def train(call_wrapper: CallWrapper) -> None:
        n = call_wrapper.iteration
        wait_for_released_groups()
        looks.append(look(models, libc))
        dist.init_process_group("gloo")
        model = build()
        models.append(weakref.ref(model))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model(torch.ones(4, WIDTH)).sum().backward()
            if n < restarts and step and slot == n % 2:
                raise RuntimeError("a fault of the benchmark")
            optimizer.step()
            optimizer.zero_grad()
        if n < restarts:
            dist.barrier()  # which the other one does not reach

    train()
    print(json.dumps(looks))


def run(kind: str, restarts: int) -> list[list[dict[str, float]]]:
    """Runs a job of two ranks; returns each one's looks.

    Raises:
        RuntimeError: a rank failed.
    """
    port = str(free_port_pair())
    ranks = []
    for slot in range(2):
        environment = {
            **os.environ,
            "RANK": str(slot),
            "LOCAL_RANK": str(slot),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--rank", kind, str(restarts)]
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


def report(kind: str, looks: list[list[dict[str, float]]], seconds: float) -> None:
    """Prints a table."""
    restarts = len(looks[0]) - 1
    print(f"\n{kind}: {restarts} restarts of two ranks in {seconds:.0f} s")
    print(f"{'':12}{'first':>10}{'early':>10}{'late':>10}{'last':>10}{'a restart':>12}")
    early = [row for rank in looks for row in rank[WARM_UP : 2 * WARM_UP]]
    late = [row for rank in looks for row in rank[-WARM_UP:]]
    between = max(1, restarts - 2 * WARM_UP)
    for name in looks[0][0]:
        first, last = (max(rank[i][name] for rank in looks) for i in (0, -1))
        a, b = (statistics.median(row[name] for row in rows) for rows in (early, late))
        print(f"{name:12}{first:10.1f}{a:10.1f}{b:10.1f}{last:10.1f}{(b - a) / between:12.3f}")
    print(
        f"first, last: the larger rank's; early: median of restarts {WARM_UP} to {2 * WARM_UP - 1}; "
        f"late: of the last {WARM_UP}"
    )


def main() -> None:
    """Runs both jobs, or one rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ddp", type=int, default=200, help="restarts with DDP")
    parser.add_argument("--fsdp2", type=int, default=100, help="restarts with FSDP2")
    parser.add_argument("--rank", nargs=2, metavar=("KIND", "RESTARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank[0], int(options.rank[1]))
        return
    for kind, restarts in (("ddp", options.ddp), ("fsdp2", options.fsdp2)):
        if restarts:
            began = time.monotonic()
            report(kind, run(kind, restarts), time.monotonic() - began)


if __name__ == "__main__":
    main()
