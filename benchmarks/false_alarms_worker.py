"""One rank of a job of ``false_alarms.py``: healthy, but noisy."""

import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from restart_worker import Log
from watched_training import BATCH, WIDTH, Training, run

GC, LOADER, SLEEP, COMPILE, HTTP, DISK = "gc", "loader", "sleep", "compile", "http", "disk"
INSIDE = (GC, LOADER, SLEEP, COMPILE, HTTP, DISK)
# How often a second, on each rank.
RATES = {GC: 0.02, LOADER: 0.02, SLEEP: 0.015}
OBJECTS = 700_000  # that the garbage collector goes through
LOADER_SLEEPS = 2.5  # seconds
REQUEST = 3.0  # seconds that a request of HTTP takes
REQUEST_EVERY = 20.0  # seconds
PADDING = 4_000_000  # numbers in a checkpoint: 16 MB


def request_before_commit() -> None:
    """The main thread waits for a server."""
    time.sleep(REQUEST)


def request_after_commit() -> None:
    """The same at another place."""
    time.sleep(REQUEST)


class Noise(Training):
    """Trains with all that makes a healthy rank late."""

    heap: list[list[int]] = []

    def begin(self) -> None:
        if self.rank == 0 and self.task.throttle:
            Path(self.task.throttle, "cgroup.procs").write_text(str(os.getpid()))

    def happens(self, kind: str, rank: int, step: int) -> random.Random | None:
        """Returns a source of numbers if something happens in a step by chance."""
        chance = random.Random(f"{self.task.seed} {kind} {rank} {step}")
        is_now = kind in self.task.noise and chance.random() < RATES[kind] * self.task.step
        return chance if is_now else None

    def before_batch(self, rank: int, step: int) -> None:
        if self.happens(LOADER, rank, step):
            time.sleep(LOADER_SLEEPS)

    def at(self, place: str, step: int) -> None:
        every = max(2, round(REQUEST_EVERY / self.task.step))
        if place == "backward":
            if self.happens(GC, self.rank, step):
                self.heap = self.heap or [[number] for number in range(OBJECTS)]
                gc.collect()
            if chance := self.happens(SLEEP, self.rank, step):
                time.sleep(chance.uniform(0.1, 0.7))
            if COMPILE in self.task.noise and self.rank == 1 and step == self.compile_step:
                self.compile()
            if step % every == every // 2:
                self.request(request_before_commit, step)
        if place == "committed" and step % every == every // 4:
            self.request(request_after_commit, step)

    @property
    def compile_step(self) -> int:
        """The step in which one rank compiles: in mid-job, because noise makes steps longer."""
        return round(self.task.seconds / self.task.step / 8)

    def compile(self) -> None:
        """Compiles a small function, as a rank does that meets a new shape."""
        torch.compile(lambda batch: (batch * 2).relu().sum())(torch.randn(BATCH, WIDTH))

    def request(self, send: Callable[[], None], step: int) -> None:
        """Waits for a server on the last rank, and stamps the beginning and the end."""
        if HTTP not in self.task.noise or self.rank != self.task.ranks - 1:
            return
        log = Log(os.path.join(self.task.folder, f"{send.__name__}.jsonl"), self.rank)
        try:
            log.write("begin", time.monotonic(), step=step)
            send()
        finally:
            log.write("end", time.monotonic(), step=step)
            os.close(log.fd)

    def save(self, step: int) -> None:
        super().save(step)
        if self.rank == 0:
            with open(Path(self.task.folder) / "padding", "wb") as file:
                torch.save(torch.zeros(PADDING), file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()


if __name__ == "__main__":
    run(Noise)
