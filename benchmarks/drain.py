"""What a drain costs a job with live state: steps lost, steps done again, and for how long no step is done.

    python benchmarks/drain.py            # 20 jobs, each with one drain
    python benchmarks/drain.py --drains 3

Three nodes with one rank each, on this machine; two train, and the third is a hot spare. ``ftrun drain``
takes the second node out, and the spare takes over. The stall is the longest time between two steps of the
rank that stays; it is shown as a multiple of the step time in the same jobs, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import duration, median, ratio, spread, table
from jobs import own_all_descendants

from ft_wrapper import events
from ft_wrapper.cli.control import drain
from ft_wrapper.store import TCPStoreServer

STEPS = 100  # before the drain, and after it
TIMEOUT = 120.0
WORKER = Path(__file__).with_name("drain_worker.py")


def committed(folder: Path) -> list[dict[str, Any]]:
    """The steps that ranks have committed so far, in order."""
    found = [record for path in folder.glob("events.*") for record in events.load(str(path))]
    return sorted(
        (one for one in found if one["event"] == "committed"), key=lambda one: float(one["monotonic"])
    )


def await_that(folder: Path, what: str, holds: Callable[[], bool]) -> None:
    """Waits until something holds, by a look now and then."""
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("log.*"))
            raise SystemExit(f"{what} did not come:\n{logs}")
        time.sleep(0.05)


def run(folder: Path) -> list[dict[str, Any]]:
    """One job with one drain; returns the steps that were committed."""
    finish = folder / "finish"
    with contextlib.ExitStack() as cleanup:
        server = TCPStoreServer(0)
        cleanup.callback(server.close)
        endpoint = f"localhost:{server.port}"
        nodes = []
        for name in ("0", "1", "2"):
            command = [
                *(sys.executable, "-m", "ft_wrapper.run", "--nnodes", "3", "--node-rank", name),
                *("--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=false", str(WORKER), str(finish)),
            ]
            log = cleanup.enter_context(open(folder / f"log.{name}", "wb"))
            environment = {**os.environ, events.ENV: str(folder / f"events.{name}")}
            node = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            cleanup.callback(node.wait)
            cleanup.callback(node.kill)
            nodes.append(node)
        await_that(folder, f"step {STEPS}", lambda: len(committed(folder)) >= 2 * STEPS)
        drain(endpoint, "node:1", 30.0, "benchmark")
        drained_at = len(committed(folder))
        await_that(folder, "the spare", lambda: any(one["slot"] == 2 for one in committed(folder)))
        await_that(folder, "the last step", lambda: len(committed(folder)) >= drained_at + 2 * STEPS)
        finish.touch()
        codes = [node.wait(TIMEOUT) for node in nodes]
        if any(codes):
            raise SystemExit(f"the nodes ended with {codes}: see {folder}")
    return committed(folder)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drains", type=int, default=20, metavar="N", help="jobs (default: 20)")
    arguments = parser.parse_args()
    own_all_descendants()
    lost = again = steps = 0
    stalls, step_times = [], []
    for number in range(arguments.drains):
        with tempfile.TemporaryDirectory(prefix="drain-") as folder:
            done = run(Path(folder))
        counts = Counter((one["slot"], one["step"]) for one in done)
        numbers = {one["step"] for one in done}
        lost += len(set(range(1, max(numbers) + 1)) - numbers)
        again += sum(count - 1 for count in counts.values())
        steps += len(numbers)
        times = [float(one["monotonic"]) for one in done if one["slot"] == 0]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        stalls.append(max(gaps))
        step_times.append(median(gaps) or 0.0)
        print(f"drain {number}: {len(numbers)} steps, stall {duration(stalls[-1])}", flush=True)
    print(f"\nstall: {spread(stalls)}; step: {spread(step_times)}")
    head = ["drains", "steps", "lost", "done again", "stall (median)", "worst", "stall / step"]
    row = [str(arguments.drains), str(steps), str(lost), str(again), duration(median(stalls))]
    row += [duration(max(stalls)), ratio(median(stalls), median(step_times))]
    print(table(head, [row]))


if __name__ == "__main__":
    main()
