"""One rank of a job of ``first_step.py``: a small transformer under DistributedDataParallel."""

# No postponed annotations here: the wrapper finds its argument by its annotation.
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, Limits, Wrapper

WIDTH = 64


class Trainer:
    """What this rank does in the job.

    Args:
        count: a client of the driver's store.
        log: descriptor of the file that all ranks append their stamps to.
        victim: the rank that ends itself.
        pause: seconds of training before it does, from the driver's word on.
    """

    def __init__(self, count: TCPStore, log: int, victim: int, pause: float) -> None:
        self.count, self.log, self.victim, self.pause = count, log, victim, pause
        self.slot = int(os.environ["RANK"])

    def say(self, event: str, **fields: int) -> None:
        """Appends a stamp."""
        record = {"event": event, "slot": self.slot, "monotonic": time.monotonic(), **fields}
        os.write(self.log, (json.dumps(record) + "\n").encode())

    def end_soon(self) -> None:
        """Ends this process in mid-training, once the driver wants it."""
        client = self.count.clone()
        client.wait(["fault"], timedelta(hours=1))
        time.sleep(self.pause)
        self.say("fault")
        os.kill(os.getpid(), signal.SIGKILL)

    def train(self, iteration: int, ping: Callable[[], None]) -> None:
        """Trains until the driver ends the process.

        Args:
            iteration: number of this entry of the function.
            ping: reports progress.
        """
        self.say("enter", iteration=iteration)
        dist.init_process_group("gloo")
        if iteration == 0 and dist.get_rank() == self.victim:
            threading.Thread(target=self.end_soon, daemon=True).start()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        model = DistributedDataParallel(torch.nn.TransformerEncoder(layer, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(4, 32, WIDTH)
        stepped = False
        while True:
            ping()
            optimizer.zero_grad()
            F.mse_loss(model(batch), batch).backward()
            optimizer.step()
            if not stepped:
                stepped = True
                self.say("step", iteration=iteration)
                if self.count.add(f"steps/{iteration}", 1) == dist.get_world_size():
                    self.count.set(f"stepped/{iteration}", "")


def main() -> None:
    """Trains, or waits."""
    store, log_path, limit, how, victim, pause = sys.argv[1:]
    signal.alarm(int(limit))  # should the driver be gone
    torch.set_num_threads(1)
    host, port = store.rsplit(":", 1)
    count = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    trainer = Trainer(count, log, int(victim), float(pause))
    warm_up: Any = (lambda: count.set("warm", "")) if how == "warm" else False

    @Wrapper(active_world_size=3, limits=Limits(warm_up=warm_up))
    def call(call_wrapper: CallWrapper = None) -> None:  # type: ignore[assignment]
        trainer.train(call_wrapper.iteration, call_wrapper.ping)

    call()


if __name__ == "__main__":
    main()
