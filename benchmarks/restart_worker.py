"""One rank of a job of ``restart_latency.py``: the same function under ft_wrapper, NVRx and torchrun."""

# No postponed annotations here: both wrappers find their argument by its annotation.
import datetime
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from plan import Fault, Plan
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

STEP = 0.02  # seconds of a training step in which the CPU is idle, as it is while a GPU computes
HELD: list[bytes] = []  # what a large rank keeps resident


class Log:
    """Stamps of this rank, in the file that all ranks of the job append to."""

    def __init__(self, path: str, slot: int) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.slot = slot

    def write(self, event: str, monotonic: float, **fields: int) -> None:
        """Writes one record: ``monotonic`` is the time of the event, one clock for all processes."""
        record = {"event": event, "slot": self.slot, "monotonic": monotonic, **fields}
        os.write(self.fd, (json.dumps(record) + "\n").encode())


def happen(fault: Fault, count: Store, log: Log, index: int) -> None:
    """Lets the fault happen, stamped just before."""
    count.add("faults", 1)
    log.write("fault", time.monotonic(), index=index)
    if fault.kind == "exception":
        raise RuntimeError("a fault of the benchmark")
    if fault.kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        time.sleep(3600)
    raise ValueError(f"no fault is called {fault.kind!r}")


def train(plan: Plan, count: Store, log: Log, iteration: int, ping: Callable[[], None]) -> None:
    """Trains until the next fault; after the last one, until the driver ends the process.

    Args:
        plan: the job.
        count: a client of the driver's store.
        log: where the stamps go.
        iteration: number of this entry of the function.
        ping: reports progress.
    """
    entered = time.monotonic()
    index = count.add("faults", 0)
    log.write("enter", entered, index=index, iteration=iteration)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tensor = torch.ones(1)
    if plan.group:
        if plan.own_group_store:
            store = PrefixStore(f"group/{iteration}", count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        else:
            dist.init_process_group("gloo")
        dist.all_reduce(tensor)
        log.write("ready", time.monotonic(), index=index, iteration=iteration)
    if plan.resident and index == 0 and rank == world_size - 1:
        HELD.append(b"\1" * plan.resident)
    inside = f"inside/{index}/{iteration}"  # counts the ranks that have done a step
    fault = plan.faults[index] if index < len(plan.faults) else None
    mine = fault is not None and fault.rank == rank
    due = None  # when my fault is to happen, once everybody is in
    stepped = False
    while True:
        if fault is not None and mine:
            if due is None and count.add(inside, 0) == world_size:
                due = time.monotonic() + fault.pause
            if due is not None and time.monotonic() >= due:
                happen(fault, count, log, index)
        time.sleep(STEP)
        ping()
        if plan.group:
            dist.all_reduce(tensor)
        if not stepped:
            stepped = True
            log.write("step", time.monotonic(), index=index, iteration=iteration)
            if count.add(inside, 1) == world_size:
                count.set(f"back/{index}", str(world_size))


def main() -> None:
    """Runs the job that the command line holds."""
    plan = Plan.from_json(sys.argv[1])
    signal.alarm(plan.limit)
    torch.set_num_threads(1)
    host, port = plan.store.rsplit(":", 1)
    count = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    log = Log(plan.log, slot=int(os.environ["RANK"]))
    if not plan.module:
        train(plan, count, log, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), lambda: None)
        return
    inprocess = importlib.import_module(plan.module)
    settings = {name: datetime.timedelta(seconds=value) for name, value in plan.settings.items()}

    @inprocess.Wrapper(**settings)  # type: ignore[untyped-decorator]
    def call(call_wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[name-defined]
        train(plan, count, log, call_wrapper.iteration, call_wrapper.ping)

    call()


if __name__ == "__main__":
    main()
