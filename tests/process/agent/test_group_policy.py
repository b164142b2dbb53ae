"""The policy ``group``: a script without the wrapper finds what it finds under torchrun.

The scripts import nothing, so that a case costs little more than the start of its agents. The test hosts the
rendezvous store: any agent may go.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from agent_job import FtRun, await_that, lose
from test_nodes import CONF, Cluster

NPROC = 2

# Each rank says who it is, and runs until it is told its exit code.
SCRIPT = """
    import json, os, pathlib, sys, time

    folder, pid = pathlib.Path(sys.argv[1]), os.getpid()
    names = {"rank": "RANK", "world_size": "WORLD_SIZE", "restarts": "TORCHELASTIC_RESTART_COUNT"}
    found = {name: int(os.environ[variable]) for name, variable in names.items()}
    note = folder / f"part.{pid}"
    note.write_text(json.dumps({**found, "pid": pid, "node": os.environ["NODE"]}))
    note.rename(folder / f"rank.{pid}")
    while True:
        for told in (folder / f"exit.{pid}", folder / "exit"):
            if told.exists():
                sys.exit(int(told.read_text()))
        time.sleep(0.02)
"""


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank process, and what it found in its environment; ``node`` is whose it is."""

    rank: int
    world_size: int
    restarts: int
    pid: int
    node: str


class Job(Cluster):
    """The agents of a job with a plain script. A context manager."""

    def __init__(self, folder: Path, nnodes: str, *options: str) -> None:
        super().__init__(folder, SCRIPT, nnodes=nnodes, nproc=NPROC)
        self._options += [*options, "--no-fork"]
        self._conf = CONF.replace("last_call_timeout=0.2", "last_call_timeout=1")
        self.host_store()
        self._seen: set[int] = set()

    def begin(self, name: str) -> FtRun:
        """Starts an agent."""
        return self.start(name, environment={"NODE": name})

    def ranks(self, world_size: int, *nodes: FtRun) -> list[Rank]:
        """Waits until a group of that size runs, all of it new; returns it in the order of rank."""
        await_that(lambda: len(self.new(world_size)) >= world_size, *nodes)
        found = self.new(world_size)
        assert [rank.rank for rank in found] == list(range(world_size))
        self._seen.update(rank.pid for rank in found)
        return found

    def new(self, world_size: int) -> list[Rank]:
        """The ranks of a group of that size that were not there before."""
        found = [Rank(**json.loads(path.read_text())) for path in self.shared.glob("rank.*")]
        new = [r for r in found if r.world_size == world_size and r.pid not in self._seen]
        return sorted(new, key=lambda rank: rank.rank)

    def end(self, ranks: Sequence[Rank], exitcode: int = 0) -> None:
        """Lets ranks end with an exit code."""
        for rank in ranks:
            self._tell(f"exit.{rank.pid}", exitcode)

    def _tell(self, name: str, exitcode: int) -> None:
        part = self.shared / f"part.{name}"
        part.write_text(str(exitcode))
        part.rename(self.shared / name)


def of(node: str, ranks: Sequence[Rank]) -> list[Rank]:
    return [rank for rank in ranks if rank.node == node]


def restarts(ranks: Sequence[Rank]) -> dict[str, set[int]]:
    """What the ranks of each node were told of how often they were started again."""
    return {node: {rank.restarts for rank in of(node, ranks)} for node in {rank.node for rank in ranks}}


def are_gone(ranks: Sequence[Rank]) -> bool:
    return not any(psutil.pid_exists(rank.pid) for rank in ranks)


def waits(agent: FtRun) -> bool:
    """Whether an agent has said that it waits for the others."""
    return "waiting for the other nodes" in agent.said


# A job that grows, fails once, and ends ------------------------------------------------------------------


def test_a_job_that_grows_and_fails_once(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2", "--max-restarts", "1") as job:
        a = job.begin("a")
        alone = job.ranks(NPROC, a)
        b = job.begin("b")
        grown = job.ranks(2 * NPROC, a, b)
        assert are_gone(alone), "two groups at a time"
        job.end(of("b", grown)[:1], 3)
        again = job.ranks(2 * NPROC, a, b)
        assert are_gone(grown), "one that fails restarts all ranks of all nodes"
        lose(b)
        left = job.ranks(NPROC, a)
        b = job.begin("b")
        back = job.ranks(2 * NPROC, a, b)
        job.end(of("a", back))
        await_that(lambda: waits(a), a, b)
        assert [rank.node for rank in back if psutil.pid_exists(rank.pid)] == ["b"] * NPROC
        job.end(of("b", back))
        assert [a.end(), b.end()] == [0, 0]
        late = job.begin("c")
        assert late.end() == 2, "one that comes after the end is turned away"
        assert job.new(NPROC) == []
    assert "is closed" in late.said
    assert [len(of(node, grown)) for node in "ab"] == [NPROC, NPROC]
    # A change of membership is no restart.
    assert (restarts(alone), restarts(grown)) == ({"a": {0}}, {"a": {0}, "b": {0}})
    assert restarts(again) == {"a": {1}, "b": {1}}
    assert (restarts(left), restarts(back)) == ({"a": {1}}, {"a": {1}, "b": {1}})


def test_when_the_restarts_are_used_up_the_job_has_failed(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "--max-restarts", "1") as job:
        a, b = job.begin("a"), job.begin("b")
        first = job.ranks(2 * NPROC, a, b)
        job.end(first, 3)  # that all fail at once is one restart
        second = job.ranks(2 * NPROC, a, b)
        job.end(of("b", second)[1:], 5)
        assert [a.end(), b.end()] == [1, 1], a.said + b.said
        assert are_gone(second), "one has failed: all others are ended"
    assert restarts(first) == {"a": {0}, "b": {0}}
    assert restarts(second) == {"a": {1}, "b": {1}}
    assert "the job was ended: rank" in a.said


# A node has finished -------------------------------------------------------------------------------------


def finish_one(job: Job) -> tuple[FtRun, FtRun, list[Rank]]:
    """Has one of two nodes finish; returns it, the other one, and the ranks that are left there.

    It is the one that does not host the store of the ranks.
    """
    agents = {name: job.begin(name) for name in "ab"}
    ranks = job.ranks(2 * NPROC, *agents.values())
    busy = ranks[0].node
    (done,) = {"a", "b"} - {busy}
    job.end(of(done, ranks))
    await_that(lambda: waits(agents[done]), *agents.values())
    return agents[done], agents[busy], of(busy, ranks)


def test_after_a_node_has_finished_a_failure_restarts_all_rather_than_those_that_are_left(
    tmp_path: Path,
) -> None:
    """Under torchrun the one that has failed waits in vain for the one that has finished."""
    with Job(tmp_path, "1:2", "--max-restarts", "1") as job:
        done, busy, left = finish_one(job)
        job.end(left[:1], 3)
        again = job.ranks(2 * NPROC, done, busy)
        job.end(again)
        assert [done.end(), busy.end()] == [0, 0]
    assert restarts(again) == {"a": {1}, "b": {1}}


@pytest.mark.nightly("a node is lost above always")
def test_after_a_node_has_finished_the_loss_of_another_does_not_scale_the_job_down(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        done, busy, _ = finish_one(job)
        lose(busy)
        assert done.end() == 75, done.said
        assert job.new(NPROC) == []
    assert "no heartbeat from node" in done.said


@pytest.mark.nightly("no other test may run meanwhile")
@pytest.mark.alone("a rank has half a second to fail in")
def test_nobody_waits_longer_than_the_exit_barrier(tmp_path: Path) -> None:
    """Nor is anybody ended then; but for a restart it is too late."""
    with Job(tmp_path, "1:2", "--exit-barrier-timeout", "0.5", "--max-restarts", "1") as job:
        done, busy, left = finish_one(job)
        assert done.end() == 0, done.said
        assert "gave up waiting after 0.5 s for node" in done.said
        assert len([rank for rank in left if psutil.pid_exists(rank.pid)]) == NPROC
        job.end(left[:1], 3)
        assert busy.end() == 75  # not done, though the other node was
        assert job.new(NPROC) == []
    assert "the next round has not begun" in busy.said
