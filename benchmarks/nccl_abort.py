"""How long it takes to abort NCCL's communicators, on a stand-in with NCCL's system calls: no GPU is needed.

    python benchmarks/nccl_abort.py            # a minute; needs a C compiler
    python benchmarks/nccl_abort.py --quick

Groups of a backend of its own are aborted one after the other, as torch does, and by
``AbortTorchDistributed``. The stand-in, tests/support/nccl_standin.c, has what NCCL 2.28.9 has on the
host; tests/gpu have NCCL itself. Figures are medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import duration, median, ratio, spread, table
from torch._C._distributed_c10d import HashStore

from ft_wrapper.testing import OnAbort, blocking_backend
from ft_wrapper.torch_groups import nccl as from_outside
from ft_wrapper.torch_groups.abort import abort_all
from ft_wrapper.torch_groups.release import release_process_groups

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support import nccl_standin

TIMEOUT = 60.0
# Groups; whether other ranks of the host are connected; milliseconds for which the device goes on.
CASES = [
    (n, beside, ms) for n in (1, 2, 8) for beside, ms in ((False, 0), (False, 10), (True, 10), (True, 40))
]


def make(names: list[str]) -> list[Any]:
    """A group of this process alone for each backend."""
    first, *others = names
    from_outside.mark_entry()
    dist.init_process_group(first, store=HashStore(), rank=0, world_size=1)
    return [dist.group.WORLD, *(dist.new_group([0], backend=name) for name in others)]


_phase = itertools.count()


def measure(names: list[str], abort: Callable[[list[Any]], None]) -> float:
    """Seconds that an abort of new groups takes, wherever in their half second the service threads are."""
    groups = make(names)
    time.sleep(0.05 + 0.013 * (next(_phase) % 40))
    began = time.perf_counter()
    abort(groups)
    took = time.perf_counter() - began
    release_process_groups(aborted=True)
    return took


def one_after_the_other(groups: list[Any]) -> None:
    """As before."""
    for group in groups:
        group.abort()


def all_at_once(_: list[Any]) -> None:
    """As `AbortTorchDistributed`."""
    abort_all()


def leave_the_making(nccl: ctypes.CDLL) -> float:
    """Seconds from the first abort until a thread has left that waits for a peer in making a communicator.

    The second abort comes when the wrapper's does: a quarter of a second after the first one.
    """
    (group,) = make([nccl_standin.register(nccl, is_made_late=True)])

    def reduce() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError:
            pass

    thread = threading.Thread(target=reduce, daemon=True)
    thread.start()
    group.is_blocked.wait(TIMEOUT)
    time.sleep(0.1)  # nothing tells that it is in accept
    began = time.perf_counter()
    abort_all()
    thread.join(0.25)
    abort_all()
    thread.join(TIMEOUT)
    took = time.perf_counter() - began
    release_process_groups(aborted=True)
    return float("inf") if thread.is_alive() else took


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="of each case (default: 20)")
    parser.add_argument("--quick", action="store_true", help="three of each case")
    arguments = parser.parse_args()
    if nccl_standin.COMPILER is None:
        parser.error("there is no C compiler: cc")
    repeats = 3 if arguments.quick else arguments.repeats
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        nccl = nccl_standin.build(Path(folder))
        for n, beside, ms in CASES:
            name = nccl_standin.register(nccl, beside_others=beside, device_ms=ms)
            before = [measure([name] * n, one_after_the_other) for _ in range(min(3, repeats))]
            now = [measure([name] * n, all_at_once) for _ in range(repeats)]
            what = (
                f"{n} group{'s' * (n > 1)}{', beside other ranks' * beside}, the device goes on for {ms} ms"
            )
            rows.append([what, duration(median(before)), spread(now), ratio(median(before), median(now))])
        depends = blocking_backend(OnAbort.DEPENDS)
        name = nccl_standin.register(nccl)
        now = [measure([depends, name, depends, name], all_at_once) for _ in range(repeats)]
        rows.append(["2 of 4 groups each wait for the other's abort", "for ever", spread(now), ""])
        making = [leave_the_making(nccl) for _ in range(repeats)]
        rows.append(["a communicator that is being made", "hard_timeout", spread(making), ""])
    print(table(["aborted", "one after the other", "all at once", "ratio"], rows))


if __name__ == "__main__":
    main()
