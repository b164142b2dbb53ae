"""What measures a node, in a process of its own: a matrix product, then all-gathers with other nodes.

Its last line of output is what it has found; or the step that it was in, if a signal ends it.
"""

import contextlib
import json
import math
import os
import signal
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .bench import rounds

#: Seconds that a step may take; an all-gather two, after two for a partner that is late from the last round.
_LIMIT = 10.0
_REPEATS = 5

_IS_CUDA = torch.cuda.is_available()
# Some 0.2 s of one core, or of a GPU; 4 MiB, or 32.
_SIZE, _PRODUCTS, _GATHERED = (4096, 64, 1 << 23) if _IS_CUDA else (1024, 8, 1 << 20)
_DEVICES = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]


def main() -> None:
    """Gets ready, and waits for its order, a line of standard input."""
    try:
        _begin("first product", 3 * _LIMIT)
        _compute(1)
        _begin("waiting", 0)
        print(json.dumps(_measure(**json.loads(sys.stdin.readline() or "{}"))), flush=True)
    except Exception as error:  # what follows the first line of an error of CUDA is advice
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        os._exit(1)
    os._exit(0)


def _begin(step: str, limit: float) -> None:
    """Says which step begins, and has the kernel end this process if that hangs; 0: it may."""
    print(step, flush=True)
    signal.setitimer(signal.ITIMER_REAL, limit)


def _measure(host: str = "", port: int = 0, rank: int = 0, size: int = 1) -> list[object]:
    """Returns the seconds of the product, and of the all-gather with each partner."""
    gathers = list[tuple[int, float]]()
    if size > 1:
        _begin("meeting of the nodes", 3 * _LIMIT)
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_LIMIT)
        )
        store.set(f"here/{rank}", "")
        with contextlib.suppress(dist.DistStoreError):  # one that is missing is found below
            store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=2 * _LIMIT))
    began = time.monotonic()
    _begin("product", _LIMIT)
    product = _compute(_PRODUCTS)
    for number, pairs in enumerate(rounds(size)):
        for pair in (pair for pair in pairs if rank in pair):
            other, seconds = sum(pair) - rank, math.inf
            left = began + (2 + 3 * number) * _LIMIT - time.monotonic()
            _begin(f"all-gather with group rank {other}", left + 2 * _LIMIT)
            store.set(f"{number}/{rank}", "")
            with contextlib.suppress(RuntimeError):  # torch's errors of stores and groups are such, too
                store.wait([f"{number}/{other}"], timedelta(seconds=left))
                seconds = _gather(PrefixStore(f"{pair}", store), int(rank > other))
            gathers.append((other, seconds))
    return [product, gathers]


def _compute(count: int) -> float:
    """Multiplies matrices on all devices at the same time; returns the seconds."""
    ones = [torch.ones(_SIZE, _SIZE, device=device) for device in _DEVICES]
    products = [torch.empty_like(one) for one in ones]
    began = time.perf_counter()
    for _ in range(count):
        for one, product in zip(ones, products, strict=True):
            torch.mm(one, one, out=product)
    if any(product[-1, -1].item() != _SIZE for product in products):
        raise ArithmeticError("a matrix product is wrong")
    return time.perf_counter() - began


def _gather(store: PrefixStore, rank: int) -> float:
    """Gathers from both nodes of a pair; returns the median of the seconds. The first one only meets."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # its timeout is an error, and does not end the process
    limit, name = timedelta(seconds=_LIMIT / 4), "nccl" if _IS_CUDA else "gloo"
    dist.init_process_group(name, store=store, rank=rank, world_size=2, timeout=limit)
    try:
        mine = torch.ones(_GATHERED, device=_DEVICES[0])
        both, times = [torch.empty_like(mine), torch.empty_like(mine)], list[float]()
        for _ in range(1 + _REPEATS):
            began = time.perf_counter()
            dist.all_gather(both, mine)
            both[1][-1].item()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])
    finally:
        dist.destroy_process_group()
