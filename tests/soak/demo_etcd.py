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
import re
import signal
import time
from collections.abc import Callable

from kill_nodes import Node, NodesRun, left_in, three_nodes
from soak import FINISH, folder_of, send, train_both

# isort: split
from launcher import run_program
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

    def __init__(self, run: NodesRun, etcd: EtcdServer) -> None:
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
            self._run.fail("an iteration began without a majority of etcd")
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
        pids = [record["pid"] for record in self._run.entered() if record["iteration"] == newest]
        send(pids[-1], signal.SIGKILL)

    def _iteration(self) -> int:
        return max((record["iteration"] for record in self._run.entered()), default=-1)

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + FINISH
        while not condition():
            if time.monotonic() >= deadline:
                self._run.fail(otherwise)
            self._run.wait(LOOK_EVERY)


def train_through_losses(run: NodesRun, etcd: EtcdServer, outage: float) -> Demo:
    """Lets a training lose machines.

    Args:
        run: the training; it runs.
        etcd: where its nodes meet.
        outage: seconds without a majority of etcd.
    """
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
    parser.set_defaults(folder=None)
    args = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    with folder_of(args), EtcdServer(members=3) as etcd:
        print("three nodes of two ranks, four of which train", flush=True)
        shape = three_nodes(etcd)
        run = train_both(
            args.folder,
            lambda name, options: NodesRun(args.folder / name, shape, options),
            lambda run: rows.extend(train_through_losses(run, etcd, args.outage).rows),
        )
        show_table(("lost", "restarts", "back in the function after"), rows)
        for lost, restarts, back in rows:
            if back == "-" and restarts != "0":
                run.fail(f"lost {lost}: {restarts} restarts")
        left = left_in(etcd)
        if left:
            run.fail(f"left in etcd: {', '.join(left)}")
    print("\nthe same weights, bit for bit, in spite of the losses")


if __name__ == "__main__":
    run_program(main)
