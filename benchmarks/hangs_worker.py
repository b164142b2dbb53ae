"""One rank of a job of ``hangs.py``: it hangs when and where the driver orders it."""

import collections
import ctypes
import hashlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from watched_training import FINISH, Training, run

FOR_EVER = 1000.0  # seconds
SLEEPS = 2.5  # seconds, of a loader's worker that is only slow


def hang_in_a_lock() -> None:
    """Waits for a lock that the same thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_in_c() -> None:
    """Waits in C for a mutex that the same thread holds: no signal ends that."""
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, (ctypes.c_long * 16)()
    lock(mutex)
    lock(mutex)


def hang_in_python() -> None:
    """Runs Python for ever."""
    while True:
        pass


def hang_in_checkpoint() -> None:
    """Writes a checkpoint into a pipe that is never read."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb", buffering=0) as file:
        torch.save(torch.zeros(1_000_000), file)
    os.close(reader)


# What a rank does at a place of a step.
CALLS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(FOR_EVER),
    "lock": hang_in_a_lock,
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "pipe": lambda: os.read(os.pipe()[0], 1),
    "mutex": hang_in_c,
    "while_true": hang_in_python,
    "c_loop": lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1),  # without the GIL
    "c_loop_gil": lambda: collections.deque(itertools.repeat(None), maxlen=0),  # with it
    "c_sleep": lambda: ctypes.CDLL(None).sleep(round(FOR_EVER)),
    "c_sleep_gil": lambda: ctypes.PyDLL(None).sleep(round(FOR_EVER)),
}
WORKER_STOPPED, WORKER_SLEEPS, SKIPPED, OTHER_GROUP = (
    "worker_stopped",
    "worker_sleeps",
    "skipped",
    "other_group",
)
CHECKPOINT, EVALUATION, FINALLY, FINALLY_FAULT = "checkpoint", "evaluation", "finally", "finally_fault"
KINDS = (
    *CALLS,
    *(WORKER_STOPPED, WORKER_SLEEPS, SKIPPED, OTHER_GROUP, CHECKPOINT, EVALUATION, FINALLY, FINALLY_FAULT),
)
PLACES = ("loaded", "forward", "backward", "committed")
TAKEN = -1.0  # the loader's worker has begun with its order


class Hangs(Training):
    """Trains, and hangs on order."""

    rank = 0
    hangs_at_end = False

    def ordered(self) -> str:
        """Returns the kind that is ordered; empty if none is."""
        order = int(self.board.get(self.rank, "order"))
        return KINDS[order - 1] if order > 0 else ""

    def take(self) -> None:
        """Marks the beginning of what was ordered."""
        self.board.set(self.rank, "order", 0)
        self.board.set(self.rank, "began", time.monotonic())

    def begin(self) -> None:
        self.hangs_at_end = False
        self.flags, self.other = dist.new_group(), dist.new_group()

    def at(self, place: str, step: int) -> None:
        if place == "loading" and self.board.get(self.rank, "loader") == TAKEN:
            self.board.set(
                self.rank, "began", time.monotonic()
            )  # again in each step, until there is no batch
        kind = self.ordered()
        if not kind:
            return
        if kind == EVALUATION and place == "evaluating":
            self.take()
            hang_in_a_lock()
        if place == PLACES[int(self.board.get(self.rank, "place"))]:
            if kind in CALLS:
                self.take()
                CALLS[kind]()
            if kind == OTHER_GROUP:
                self.take()
                dist.barrier(group=self.other)

    def before_batch(self, rank: int, step: int) -> None:
        order = int(self.board.get(rank, "loader"))
        if order <= 0:
            return
        self.board.set(rank, "loader", TAKEN)
        if KINDS[order - 1] == WORKER_STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.board.set(rank, "began", time.monotonic())
        time.sleep(SLEEPS)
        if self.board.get(rank, "loader") == TAKEN:
            self.board.set(rank, "loader", 0)

    def agree(self) -> bool:
        kind, ranks = self.ordered(), self.task.ranks
        said = float(self.board.get(self.rank, "order") == FINISH)
        if kind == SKIPPED:
            self.take()
            return False
        if kind in (FINALLY, FINALLY_FAULT):
            self.board.set(self.rank, "order", 0)
            self.hangs_at_end = True
            said = 1.0 if kind == FINALLY else 2.0 + (self.rank + 1) % ranks
        flag = torch.tensor(said)
        # Of a group of its own: in DDP's group gloo would abort the process of a rank that skips one.
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.flags)
        if flag == 2 + self.rank:
            raise RuntimeError("a fault of the benchmark")
        return bool(flag == 1)

    def save(self, step: int) -> None:
        if self.ordered() == CHECKPOINT:
            self.take()
            hang_in_checkpoint()
        super().save(step)

    def leave(self) -> None:
        if self.hangs_at_end:
            self.hangs_at_end = False
            self.take()
            time.sleep(FOR_EVER)


if __name__ == "__main__":
    run(Hangs)
