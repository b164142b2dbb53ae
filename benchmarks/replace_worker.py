"""One rank of a job of ``replace_rank.py``: the same function under ftrun and under torchrun."""

# No postponed annotations here: the wrapper finds its argument by its annotation.
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ft_wrapper import CallWrapper, Wrapper

STEP = 0.02  # seconds of a training step in which the CPU is idle, as it is while a GPU computes


def train(count: Store, log: int, iteration: int, ping: Callable[[], None]) -> None:
    """Trains in a process group until the driver ends the process.

    Args:
        count: a client of the driver's store.
        log: descriptor of the file that all ranks append their stamps to.
        iteration: number of this entry of the function.
        ping: reports progress.
    """
    entered = time.monotonic()
    kills = count.add("kills", 0)
    slot = int(os.environ.get("LOCAL_RANK", "0"))
    record = {"monotonic": entered, "slot": slot, "pid": os.getpid(), "kills": kills, "iteration": iteration}
    os.write(log, (json.dumps(record) + "\n").encode())
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if count.add(f"inside/{kills}/{iteration}", 1) == dist.get_world_size():
        count.set(f"back/{kills}", "")
    while True:
        time.sleep(STEP)
        ping()
        dist.all_reduce(tensor)


def main() -> None:
    """Trains, wrapped or not."""
    store, log_path, limit, wrapped = sys.argv[1:]
    signal.alarm(int(limit))  # should the driver be gone
    torch.set_num_threads(1)
    host, port = store.rsplit(":", 1)
    count = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if wrapped == "no":
        train(count, log, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), lambda: None)
        return

    @Wrapper(rejoin=True)
    def call(call_wrapper: CallWrapper = None) -> None:  # type: ignore[assignment]
        train(count, log, call_wrapper.iteration, call_wrapper.ping)

    call()


if __name__ == "__main__":
    main()
