"""Processes that come late, in numbers, twice, or by mistake; and what a store keeps of many restarts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rank_harness import Job, Rank, with_limits
from rejoin_job import Trainer, Training, training, trains

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.protocol import keys

# ---- several calls


def calls_twice(rank: Rank, folder: str, settings: dict[str, Any]) -> list[Any]:
    trainer = Trainer(rank, folder, settings)

    @Wrapper(**with_limits(**trainer.settings))
    def train(call_wrapper: CallWrapper, finish: str) -> list[int]:
        trainer.finish = Path(folder, finish)
        return trainer.train(call_wrapper)

    first = train("first")
    rank.say("between", value=first)
    rank.hear()
    return [first, train("second")]


def test_who_comes_after_a_call_takes_part_in_the_next_one(run: Training, job: Job) -> None:
    run.start(3, calls_twice)
    job.expect("in", 0, 1, 2, n=0)
    run.abort(2)
    job.expect("in", 0, 1, n=1, world=2)
    (run.folder / "first").touch()
    job.expect("between", 0, 1)
    # Too late for the first call, and the first one in the second.
    job.start_again(2)
    job.expect("between", 2, value=None)
    assert "slot 2 joined too late: the other ranks have completed the call; it returns None" in job[2].log
    job.tell("go on", 2)
    run.await_join(1, 2)
    job.tell("go on", 0, 1)
    job.expect("in", 0, 1, 2, n=2, world=3)
    # And one that comes while the second call is on.
    run.abort(1)
    job.expect("in", 0, 2, n=3, world=2)
    job.start_again(1)
    job.expect("between", 1, value=None)
    job.tell("go on", 1)
    job.expect("in", 0, 1, 2, n=4, world=3)
    (run.folder / "second").touch()
    job.wait_for_end()
    run.check(4, {1: 4, 2: 2})
    assert [job[slot].value for slot in range(3)] == [
        [[1, 0, 2], [4, 0, 3]],
        [None, [4, 1, 3]],
        [None, [4, 2, 3]],
    ]


# ---- all, more, none


@pytest.mark.parametrize("with_monitors", [False, True])
def test_all_processes_die_and_come_back(run: Training, job: Job, with_monitors: bool) -> None:
    run.start(3, join_window=25.0)  # over as soon as all are back, however long a busy machine starts them
    job.expect("in", 0, 1, 2, n=0)
    if with_monitors:
        job.lose_hosts(0, 1, 2)
    else:
        job.kill(0, 1, 2)
    job.wait_for_end()
    job.start_again(0, 1, 2)
    job.expect("in", 0, 1, 2, n=1, world=3)
    run.finish()
    run.check(1, {0: 1, 1: 1, 2: 1})
    assert [job[slot].value for slot in range(3)] == [[1, 0, 3], [1, 1, 3], [1, 2, 3]]


def test_a_job_grows_beyond_the_ranks_that_it_began_with(run: Training, job: Job) -> None:
    run.start(2, on_join="now")
    job.expect("in", 0, 1, n=0)
    env = {**run.env, "FT_WRAPPER_FORMATION_SIZE": "2"}
    job.start(4, trains, str(run.folder), {"on_join": "now", "join_window": 0.5}, slots=[3], env=env)
    job.wait_for_end(3)
    assert job[3].error == "ValueError"
    assert "join_window=0.5, the job has 0.05" in job[3].text
    job.start(4, trains, str(run.folder), {"on_join": "now"}, slots=[3], env=env)
    job.expect("in", 0, 1, 3, n=1, world=3)
    run.finish()
    run.check(1, {3: 1})
    assert [job[slot].value for slot in (0, 1, 3)] == [[1, 0, 3], [1, 1, 3], [1, 2, 3]]


def test_only_global_iterations_admit_a_process_that_was_started_again(run: Training, job: Job) -> None:
    run.start(3, rejoin=False)
    job.expect("in", 0, 1, 2, n=0)
    run.abort(1)
    job.expect("in", 0, 2, n=1, world=2)
    job.start_again(1)
    job.wait_for_end(1)
    assert job[1].error == "RankDiscarded"
    assert "use @Wrapper(rejoin=True) on all ranks" in job[1].text
    job.forget(1)
    run.finish()
    run.check(1)


# ---- a store that only the ranks keep


def test_a_rank_comes_back_to_a_store_that_nobody_announced(job: Job, tmp_path: Path) -> None:
    """Its predecessor's monitor was the store's host, and then another one."""
    with training(job, tmp_path, announced=False) as run:
        run.start(3)
        job.expect("in", 0, 1, 2, n=0)
        run.abort(0)
        job.expect("in", 1, 2, n=1, world=2)
        job.start_again(0)
        job.expect("in", 0, 1, 2, n=2, world=3)
        run.abort(0)
        job.expect("in", 1, 2, n=3, world=2)
        job.start_again(0)
        job.expect("in", 0, 1, 2, n=4, world=3)
        run.finish()
        run.check(4, {0: 4})


# ---- mistakes


def test_two_processes_claim_one_slot(run: Training, job: Job) -> None:
    run.start(3)
    job.expect("in", 0, 1, 2, n=0)
    older = job[1]
    job.start_again(1)
    job.expect("in", 0, 1, 2, n=1, world=3)
    run.await_end_of(older)
    assert older.error == "RankDiscarded"
    host = os.uname().nodename
    for pid in (older.pid, job[1].pid):
        assert f"process {pid} on {host}" in older.text
    run.finish()
    run.check(1, {1: 1})


def has_another_function(rank: Rank, folder: str, settings: dict[str, Any]) -> Any:
    trainer = Trainer(rank, folder, settings)

    @Wrapper(**with_limits(**trainer.settings))
    def evaluate(call_wrapper: CallWrapper) -> list[int]:
        return trainer.train(call_wrapper)

    return evaluate()


DIFFERENT: list[tuple[Any, dict[str, Any], dict[str, str], str]] = [
    (has_another_function, {}, {}, "has_another_function.<locals>.evaluate', the job has '"),
    (trains, {"on_join": "now"}, {}, "on_join='now', the job has 'degraded'"),
    (trains, {"active_world_size": 2}, {}, "active_world_size=2, the job has None"),
    (trains, {}, {"FT_WRAPPER_FORMATION_SIZE": "2"}, "formation_size=2, the job has 3"),
]


def test_who_differs_from_the_job_is_refused(run: Training, job: Job) -> None:
    run.start(3)
    job.expect("in", 0, 1, 2, n=0)
    # Its slot is taken, too; but its mistake shall cost the job nothing.
    for body, settings, env, said in DIFFERENT:
        job.start(3, body, str(run.folder), settings, slots=[1], env={**run.env, **env})
        refused = job[1]
        job.wait_for_end(1)
        assert refused.error == "ValueError"
        assert said in refused.text
        job.ranks[1] = job.past.pop()
    run.finish()
    run.check(0)


def test_a_head_that_nobody_can_read(run: Training, job: Job) -> None:
    run.start(3)
    job.expect("in", 0, 1, 2, n=0)
    run.store.set(keys.HEAD, "garbage")
    run.abort(1)
    job.forget(1)
    job.wait_for_end()
    for process in job.ranks.values():
        assert process.error == "StoreError"
        assert f"store key {keys.HEAD!r} holds 'garbage'" in process.text
        assert run.saw(process) == [0]


# ---- many restarts


def test_a_store_keeps_as_many_keys_after_many_restarts_as_after_few(run: Training, job: Job) -> None:
    run.start(3, join_window=0.0, heartbeat_interval=0.02, on_join="now")
    job.expect("in", 0, 1, 2, n=0)
    kept = []
    n = 0
    few, many = 3, 9
    for kill in range(1, many + 1):
        victim = kill % 3
        job.kill(victim)
        job.start_again(victim)
        [entry] = job.expect("in", victim, world=3)
        assert entry["n"] > n
        n = entry["n"]
        job.expect("in", *{0, 1, 2} - {victim}, n=n, world=3)
        if kill in (few, many):
            kept.append(run.settled_keys(n))
    run.finish()
    check = {slot: run.saw(job[slot])[0] for slot in range(3)}
    run.check(n, check, gaps=True)  # a newcomer ends, at once, what its predecessor's death began
    assert set(kept[0]) == set(kept[1]), set(kept[0]) ^ set(kept[1])
    # Proposals that lost leave a decision and a roster each, for two iterations.
    assert abs(len(kept[0]) - len(kept[1])) <= 8, kept
