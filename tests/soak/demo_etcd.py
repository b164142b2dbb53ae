"""A training run on three nodes survives the loss of any machine, even the first one.

Three members of etcd and three nodes of two ranks, all on this machine; four of the six ranks train. These
are lost, one after the other, and come back:

1. the leader of etcd: training does not notice;
2. node 0, with the first agent and the first ranks: one restart, and spares take over; then it is back;
3. a member of etcd and another node at the same time;
4. two members of etcd, its majority: training continues without them, and does not notice;
5. the majority, and then a rank: the restart waits until the majority is back.

The final weights are the same, bit for bit, as those of the run without faults.

    python tests/soak/demo_etcd.py                `make demo-etcd`
    python tests/soak/demo_etcd.py --outage 30      without a majority for longer
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from kill_and_rejoin import FINISH, FOREVER, entered, fail, send
from kill_nodes import Node, Run, left_in, three_nodes
from launcher import no_core_dumps, run_program
from table import duration, show_table

from ft_wrapper.testing import EtcdServer

LOOK_EVERY = 0.2  # seconds
STEP = re.compile(r"^step +(\d+)", re.MULTILINE)


class Demo:
    """What is lost in a run, one thing after the other.

    Args:
        run: the training; it runs.
        etcd: where its nodes meet.
    """

    def __init__(self, run: Run, etcd: EtcdServer) -> None:
        self._run = run
        self._etcd = etcd
        self.rows: list[tuple[str, str, str]] = []

    def steps(self) -> int:
        """How many steps were printed so far, about."""
        found = STEP.findall(self._run.printed())
        return int(found[-1]) if found else 0

    def go_on(self, steps: int) -> None:
        """Waits until so many steps more were trained."""
        wanted = self.steps() + steps
        self._await(lambda: self.steps() >= wanted, "the training did not go on")

    def lose(self, what: str, *losses: Callable[[], object], restarts: bool) -> None:
        """Loses something, and waits until the training has gone on.

        Args:
            what: in words.
            losses: what to do.
            restarts: whether the function has to begin again for it.
        """
        print(f"  lost: {what}", flush=True)
        before, began = self._iteration(), time.monotonic()
        for loss in losses:
            loss()
        took = "-"
        if restarts:
            self._await(lambda: self._iteration() > before, "no rank began again")
            took = duration(time.monotonic() - began)
        self.go_on(40)
        self.rows.append((what, str(self._iteration() - before), took))

    def lose_majority(self, what: str, seconds: float, loss: Callable[[], object] | None = None) -> None:
        """Takes two members of etcd away for a while.

        Args:
            what: is lost, in words.
            seconds: how long.
            loss: what else is lost meanwhile; without it the training has to go on.
        """
        print(f"  lost: {what}, for {seconds:g} s", flush=True)
        before, end = self._iteration(), time.monotonic() + seconds
        leader = self._etcd.leader()
        members = (leader, (leader + 1) % 3)
        for member in members:
            self._etcd.kill(member)
        if loss is not None:
            loss()
        else:
            self.go_on(20)
        self._run.wait(max(0.0, end - time.monotonic()))
        if self._iteration() != before:
            fail(self._run, "an iteration began without a majority of etcd")
        back = time.monotonic()
        for member in members:
            self._etcd.restart(member)
        took = "-"
        if loss is not None:
            self._await(lambda: self._iteration() > before, "no rank began again")
            took = f"{duration(time.monotonic() - back)} after etcd"
        self.go_on(40)
        self.rows.append((what, str(self._iteration() - before), took))

    def bring_back(self, node: Node) -> None:
        """Starts a node again, and waits until its ranks take part."""
        node.start()
        self._run.await_all()
        print(f"  node {node.name} is back", flush=True)

    def kill_rank(self) -> None:
        """Kills the process of one that trains; its agent stays."""
        newest = self._iteration()
        pids = [record["pid"] for record in entered(self._run) if record["iteration"] == newest]
        send(pids[-1], signal.SIGKILL)

    def _iteration(self) -> int:
        return max((record["iteration"] for record in entered(self._run)), default=-1)

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + FINISH
        while not condition():
            if time.monotonic() >= deadline:
                fail(self._run, otherwise)
            self._run.wait(LOOK_EVERY)


def train_through_losses(run: Run, etcd: EtcdServer, outage: float) -> Demo:
    """Trains, and loses machines meanwhile; leaves the run as it trains.

    Args:
        run: the training; it is not yet started.
        etcd: where its nodes meet.
        outage: seconds without a majority of etcd.
    """
    run.start()
    demo = Demo(run, etcd)
    demo.go_on(20)
    leader = etcd.leader()
    demo.lose("the leader of etcd", lambda: etcd.kill(leader), restarts=False)
    etcd.restart(leader)
    first, second, _ = run.nodes
    demo.lose("node 0, with the first ranks", lambda: first.lose(wholly=True), restarts=True)
    demo.bring_back(first)
    leader = etcd.leader()
    demo.lose(
        "the leader of etcd, and node 1",
        lambda: etcd.kill(leader),
        lambda: second.lose(wholly=True),
        restarts=True,
    )
    etcd.restart(leader)
    demo.bring_back(second)
    demo.lose_majority("the majority of etcd", outage)
    demo.lose_majority("the majority of etcd, and a rank meanwhile", outage, demo.kill_rank)
    run.await_all()
    return demo


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--outage", type=float, default=10.0, help="seconds without a majority of etcd (default: 10)"
    )
    args = parser.parse_args()
    no_core_dumps()
    begin = time.monotonic()
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="ft-wrapper-demo-")))
        etcd = exits.enter_context(EtcdServer(members=3))
        shape = three_nodes(etcd)
        stop = folder / "stop"
        print("three nodes of two ranks, four of which train", flush=True)
        lossy = Run(folder / "lossy", shape, ["--steps", str(FOREVER), "--stop-file", str(stop)])
        with contextlib.closing(lossy):
            demo = train_through_losses(lossy, etcd, args.outage)
            stop.touch()
            lossy.finish(FINISH)
        steps = lossy.final()[2]
        print(f"the same {steps} steps without losses", flush=True)
        clean = Run(folder / "clean", shape, ["--steps", str(steps)])
        with contextlib.closing(clean):
            clean.start()
            clean.finish(time.monotonic() - begin + FINISH)
        show_table(("lost", "restarts", "back in the function after"), demo.rows)
        print(f"final weights with losses     sha256 {lossy.final()[0]}")
        print(f"final weights without losses  sha256 {clean.final()[0]}", flush=True)
        if clean.final() != lossy.final():
            fail(lossy, "the weights differ")
        for lost, restarts, back in demo.rows:
            if back == "-" and restarts != "0":
                fail(lossy, f"lost {lost}: {restarts} restarts")
        left = left_in(etcd)
        if left:
            fail(lossy, f"left in etcd: {', '.join(left)}")
    print(f"\nthe same weights, bit for bit, in spite of the losses ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    run_program(main)
