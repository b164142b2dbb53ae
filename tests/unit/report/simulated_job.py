"""Events of a job that never ran: hosts with clocks of their own, ranks, spares, faults that are chosen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]

STEP = 2.0
"""Seconds that a step takes."""
LOAD = 25.0
EVERY = 25
"""Steps between two checkpoints."""
BACK = 40.0
"""Seconds until the process that replaces a dead one, or a lost node, is there."""
BEGAN = 1_790_000_000.0

KINDS = ("EXCEPTION", "TERMINATED", "SOFT_TIMEOUT", "node")
_WORDS = {
    "TERMINATED": "died",
    "SOFT_TIMEOUT": "stood at train.py:88 in forward, made no progress for 60 s",
    "node": "stopped answering: evicted",
}


@dataclasses.dataclass
class Process:
    """One process in a seat.

    Args:
        slot: the seat.
        host: where.
        pid: which process.
        incarnation: which one in a row.
        is_active: whether it is in the function.
        is_in: whether it has been let into the job.
    """

    slot: int
    host: str
    pid: int
    incarnation: int = 0
    is_active: bool = False
    is_in: bool = False


class SimulatedJob:
    """A job, and its events so far.

    Args:
        nodes: how many hosts, the spare ones among them.
        ranks: on each.
        spare_nodes: how many of the hosts have no active ranks at first.
        seed: of all that is random.
        job: its name.
        messages: what exceptions say.
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks: int = 4,
        spare_nodes: int = 1,
        seed: int = 1,
        job: str = "llm-70b",
        message: str = "raised RuntimeError: CUDA error: an illegal memory access was encountered",
    ) -> None:
        self.records: list[Record] = []
        self.job, self.message = job, message
        self.steps_done = 0
        self._chance = random.Random(seed)
        self._pids = itertools.count(1000)
        self._hosts = [f"gpu{number:03}" for number in range(nodes)]
        self._skews = {host: self._chance.uniform(1e3, 1e6) for host in self._hosts}
        self._agents = {host: next(self._pids) for host in self._hosts}
        self._n, self._at = 0, 0.0
        self._nonce = f"{job}-0"
        self._seats = [
            Process(place * ranks + local, host, next(self._pids))
            for place, host in enumerate(self._hosts)
            for local in range(ranks)
        ]
        self._active = (nodes - spare_nodes) * ranks
        self._begun = 0  # steps
        self._start()

    def _write(self, event: str, at: float, host: str, pid: int, **fields: Any) -> None:
        for name in ("began", "since", "started"):
            if name in fields:
                fields[name] += self._skews[host]
        moment = {"monotonic": at + self._skews[host], "time": BEGAN + at}
        self.records.append({"event": event, "job": self.job, **fields, "host": host, "pid": pid, **moment})

    def _member(self, event: str, at: float, one: Process, **fields: Any) -> None:
        view = {"iteration": self._n, "call": 0, "nonce": self._nonce}
        who = {"slot": one.slot, "incarnation": one.incarnation}
        self._write(event, at, one.host, one.pid, **view, **who, **fields)

    def _soon(self, at: float, most: float) -> float:
        return at + self._chance.uniform(0, most)

    def _start(self) -> None:
        for host, pid in self._agents.items():
            self._write("agent_started", 3.0, host, pid, started=0.0)
            self._write("round_started", self._soon(5.0, 2.0), host, pid)
        for one in self._seats:
            self._launch(one, 7.0, 20.0)
        self._at = 22.0
        self._enter(self._seats)

    def _launch(self, one: Process, at: float, ready: float) -> None:
        self._write("rank_started", at, one.host, self._agents[one.host], child=one.pid, rank=one.slot)
        register = self._soon(ready, 1.0)
        who = {"slot": one.slot, "incarnation": one.incarnation}
        self._write("register", register, one.host, one.pid, started=at, **who)

    def _enter(self, members: Iterable[Process], after: str = "") -> None:
        """All members go on to the present iteration; as many as there should be are active."""
        members = list(members)
        missing = self._active - sum(one.is_active for one in members)
        for one in [one for one in members if not one.is_active][:missing]:
            one.is_active = True
        for one in members:
            one.is_in = True
            decided = self._soon(self._at, 0.02)
            self._member("decided", decided, one, **({"after": after} if after else {}))
            self._member("enter" if one.is_active else "spare", decided + 0.3, one)
        self._at += 0.4

    def train(self, seconds: float) -> None:
        """Trains, from the last checkpoint on."""
        first = self.steps_done // EVERY * EVERY
        begin, end = self._at + LOAD, self._at + LOAD + seconds
        last = first + int(seconds / STEP)
        for one in self._seats:
            if one.is_active:
                self._member("step", begin + STEP, one, step=first, began=begin)
                self._member("step", end, one, step=last, began=begin + (last - first) * STEP)
        self.steps_done = max(self.steps_done, last)
        self._begun = last
        self._at = end

    def fail(self, kind: str, place: int) -> None:
        """Something happens, and the job goes on.

        Args:
            kind: one of `KINDS`.
            place: which of the active ranks; the node that it is on, if the node is lost.
        """
        active = [one for one in self._seats if one.is_active]
        culprit = active[place % len(active)]
        lost = [one for one in self._seats if one.host == culprit.host] if kind == "node" else []
        if kind == "TERMINATED":
            lost = [culprit]
            self._member("fault", self._at, culprit, kind=kind, ends=True, rank=culprit.slot, message="died")
            agent = self._agents[culprit.host]
            self._write("rank_ended", self._at, culprit.host, agent, child=culprit.pid, exitcode=-9)
        elif kind == "EXCEPTION":
            who = {"rank": culprit.slot, "message": self.message}
            self._member("fault", self._at, culprit, kind=kind, ends=True, **who)
        elif kind == "SOFT_TIMEOUT":
            self._at += 60.0
            for one in active:
                self._member(
                    "fault", self._soon(self._at, 0.05), one, kind=kind, ends=True, since=self._at - 60
                )
        else:
            self._at += 20.0
        left = [one for one in self._seats if one not in lost]
        name = "unresponsive" if kind == "node" else kind.lower()
        self._restart(left, lost, culprit, _WORDS.get(kind, self.message), name)

    def _restart(
        self, left: Sequence[Process], lost: Sequence[Process], culprit: Process, words: str, kind: str
    ) -> None:
        is_node = kind == "unresponsive"
        members = [one for one in left if one.is_in]
        before, began = self._nonce, self._at
        for one in members:
            at = self._soon(self._at, 0.03)
            self._member("end", at, one)
            self._member("abort", at + 0.2, one)
            last = {"step": self._begun, "began": self._at - 1.0} if one.is_active else {}
            self._member("left", at + 0.5, one, **last)
            self._member("arrive", at + 0.6, one)
        self._at += 1.0
        self._n += 1
        self._nonce = f"{self.job}-{self._n}"
        waiting = [one for one in left if not one.is_in]
        self._enter([*members, *waiting], before)
        where = f"rank {culprit.slot} (slot {culprit.slot} on {culprit.host} pid {culprit.pid})"
        if is_node:
            places = [f"slot {one.slot} ({one.host} pid {one.pid})" for one in lost]
            rest = len(places) - 4
            where = ", ".join([*places[:4], f"and {rest} more"] if rest > 0 else places)
        line = f"restart {self._n}: {where} {words}; back in {self._at - began:.1f} s"
        culprits = [one.slot for one in (lost if is_node else [culprit])]
        fields = {"kind": kind, "cause": f"{where} {words}", "culprits": culprits, "line": line}
        self._member("restarted", self._at, members[0], **fields)
        for one in lost:
            one.pid, one.incarnation = next(self._pids), one.incarnation + 1
            one.is_active = one.is_in = False
            # The clock of a host that boots begins again, but then it is another host to us.
            if not is_node:
                self._launch(one, began + 1.0, began + 1.0 + BACK)
        if is_node:
            self._seats = [one for one in self._seats if one not in lost]

    def finish(self) -> None:
        """The function returns everywhere, and all processes end."""
        for one in self._seats:
            if one.is_active:
                self._member("returned", self._at, one)
            if one.is_in:
                self._member("done", self._at + 0.2, one)
            self._write(
                "rank_ended", self._at + 1.0, one.host, self._agents[one.host], child=one.pid, exitcode=0
            )
        for host in {one.host for one in self._seats}:
            self._write("agent_ended", self._at + 2.0, host, self._agents[host])


def simulate(faults: int = 12, between: float = 300.0, seed: int = 1, **size: Any) -> list[Record]:
    """The events of a job with faults of all kinds, at ranks that the seed chooses.

    Args:
        faults: how many.
        between: seconds of training before each of them, on the average.
        seed: of all that is random.
        size: see `SimulatedJob`.
    """
    chance = random.Random(seed)
    job = SimulatedJob(seed=seed, **size)
    for _, kind in zip(range(faults), itertools.cycle(KINDS), strict=False):
        job.train(chance.uniform(0.4, 1.6) * between)
        job.fail(kind, chance.randrange(1 << 30))
    job.train(between)
    job.finish()
    return job.records


def lines(records: Iterable[Record]) -> Iterator[str]:
    """The lines of an events file."""
    for record in records:
        yield json.dumps(record) + "\n"
