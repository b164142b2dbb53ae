"""The process of a job of ``overhead.py`` that measures, or trains while it is measured."""

# No postponed annotations here: both wrappers find their argument by its annotation.
import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import signal
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import psutil
import torch
from jobs import JOB_ENV, free_port_pair
from torch import nn

# Pings come in bursts, with time for what they set off: NVRx puts each on a queue, and after 20,000 at once
# its call never returned.
PINGS, BURSTS, PAUSE = 1000, 40, 0.1
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Measure:
    """What the process does.

    Args:
        module: what is imported and whose ``Wrapper`` is used; empty for none.
        settings: durations of the wrapper, in seconds, by argument name.
        what: ``calls`` (ping, atomic, entering and leaving), ``steps`` (with and without the wrapper, in
            pairs) or ``train`` (until the process is ended).
        result: path of the file that the figures go to.
        limit: whole seconds after which the process ends itself.
        pairs: of blocks of training steps.
        block: seconds that a block takes, about.
    """

    module: str
    settings: dict[str, float]
    what: str
    result: str
    limit: int
    pairs: int = 0
    block: float = 0.0


Body = Callable[[Any], None]


def wrap(measure: Measure) -> Callable[[Body], Callable[[], None]]:
    """Returns what wraps a function of the CallWrapper; where there is no wrapper it is called with None."""
    if not measure.module:
        return lambda body: lambda: body(None)
    inprocess = importlib.import_module(measure.module)
    settings = {name: datetime.timedelta(seconds=value) for name, value in measure.settings.items()}

    def decorate(body: Body) -> Callable[[], None]:
        def call(call_wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[name-defined]
            body(call_wrapper)

        wrapped: Callable[[], None] = inprocess.Wrapper(**settings)(call)
        return wrapped

    return decorate


def cpu_elsewhere() -> float:
    """Returns CPU seconds so far of this process's other threads and of the job's other processes."""
    total = time.process_time() - time.thread_time()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(JOB_ENV) == os.environ[JOB_ENV]:
                times = process.cpu_times()
                total += times.user + times.system
    return total


def measure_calls(measure: Measure) -> dict[str, Any]:
    """Measures ``ping``, ``atomic``, and entering and leaving a call."""
    result: dict[str, Any] = {}

    def inside(call_wrapper: Any) -> None:
        def atomic() -> None:
            with call_wrapper.atomic():
                pass

        before = cpu_elsewhere()
        time.sleep(BURSTS * PAUSE)
        idle = cpu_elsewhere() - before
        before = cpu_elsewhere()
        bursts = []
        for _ in range(BURSTS):
            bursts.append(timeit.timeit(call_wrapper.ping, number=PINGS) / PINGS)
            time.sleep(PAUSE)
        result["ping"] = statistics.median(bursts)
        result["ping elsewhere"] = max(0.0, cpu_elsewhere() - before - idle) / (BURSTS * PINGS)
        result["atomic"] = statistics.median(timeit.repeat(atomic, number=20_000, repeat=REPEATS)) / 20_000

    decorate = wrap(measure)
    decorate(inside)()
    moments: list[float] = []
    call = decorate(lambda call_wrapper: moments.append(time.monotonic()))
    enter, leave = [], []
    for _ in range(REPEATS):
        os.environ["MASTER_PORT"] = str(free_port_pair())  # the store of the call before may linger
        before = time.monotonic()
        call()
        after = time.monotonic()
        enter.append(moments[-1] - before)
        leave.append(after - moments[-1])
    both = [a + b for a, b in zip(enter, leave, strict=True)]
    for name, values in (("enter", enter), ("leave", leave), ("both", both)):
        result[name] = statistics.median(values)
    return result


class Training:
    """A small model on the CPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        width = 256
        layers: list[nn.Module] = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.data = torch.randn(64, width)

    def step(self) -> None:
        """One training step, of a millisecond or two."""
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()

    def block(self, steps: int, ping: Callable[[], None]) -> tuple[float, float]:
        """Trains for a number of steps; returns wall-clock and CPU seconds a step.

        Half as many go before, uncounted: a wrapper that has just forked its monitor pays for each page that
        the two no longer share, once. That belongs to entering a call.
        """
        for _ in range(steps // 2):
            self.step()
            ping()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
            ping()
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def measure_steps(measure: Measure) -> dict[str, Any]:
    """Measures the same steps outside of the wrapper and inside, in turn, so that drift hits both alike."""
    training = Training()
    steps = max(2, round(measure.block / training.block(200, lambda: None)[0]))
    blocks: list[tuple[float, float]] = []

    def body(call_wrapper: Any) -> None:
        ping = call_wrapper.ping if call_wrapper is not None else lambda: None
        blocks.append(training.block(steps, ping))

    wrapped = wrap(measure)(body)

    def with_wrapper() -> tuple[float, float]:
        os.environ["MASTER_PORT"] = str(free_port_pair())
        wrapped()
        return blocks[-1]

    def without_wrapper() -> tuple[float, float]:
        body(None)
        return blocks[-1]

    pairs = []
    for i in range(measure.pairs):
        if i % 2:
            first = with_wrapper()
            pairs.append((first, without_wrapper()))
        else:
            first = without_wrapper()
            pairs.append((with_wrapper(), first))
    return {
        "wall": [with_[0] / without[0] for with_, without in pairs],
        "cpu": [with_[1] / without[1] for with_, without in pairs],
        "step": statistics.median(without[0] for _, without in pairs),
    }


def train(measure: Measure) -> None:
    """Trains until the process is ended, about half of the time idle, as a CPU is that feeds a GPU."""
    training = Training()
    history: list[dict[str, Any]] = []

    def body(call_wrapper: Any) -> None:
        with open(measure.result, "a") as file:
            file.write("training\n")
        while True:
            training.step()
            # Python objects come and go, and that takes a forked process's shared pages from it.
            history.append({"step": len(history), "metrics": [float(i) for i in range(50)]})
            if len(history) > 20_000:
                history.clear()
            if call_wrapper is not None:
                call_wrapper.ping()
            time.sleep(0.005)

    wrap(measure)(body)()


def main() -> None:
    """Does what the command line says."""
    measure = Measure(**json.loads(sys.argv[1]))
    signal.alarm(measure.limit)
    torch.set_num_threads(1)
    if measure.what == "train":
        train(measure)
        return
    result = measure_calls(measure) if measure.what == "calls" else measure_steps(measure)
    with open(measure.result, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
