"""Checkpoints of real ranks: the same answer on all, seals, jobs that come back, two jobs, a full disk."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank, Template, running, with_limits

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.checkpoints import Checkpoint, Checkpoints, folders
from ft_wrapper.exception import JobAbort


def write(checkpoints: Checkpoints, step: int, rank: int) -> Path:
    """A rank's part of a checkpoint."""
    path = checkpoints.path(step)
    path.mkdir(exist_ok=True)
    (path / f"part-{rank}").write_text(str(step))
    return path


def parts(found: Checkpoint | None) -> list[Any] | None:
    """Step and parts of a checkpoint."""
    if found is None:
        return None
    return [found.step, *sorted(name for name in os.listdir(found) if name.startswith("part-"))]


# ---- a job, from its first checkpoint to its next start


def trains(rank: Rank, root: str) -> Any:
    @Wrapper(active_world_size=3, **SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        number = call_wrapper.state.active_rank
        assert number is not None
        checkpoints = Checkpoints(call_wrapper, root, keep=2)
        begins_with = parts(checkpoints.newest())
        first = 0 if begins_with is None else begins_with[0]
        for step in range(first + 1, first + 4):
            write(checkpoints, step, number)
            checkpoints.seal(step)
        if call_wrapper.iteration == 0:
            write(checkpoints, first + 4, number)  # and is killed before it is sealed
            rank.say("in")
            rank.hang()
        newest = checkpoints.newest()
        assert newest is not None
        return [begins_with, parts(newest), str(newest.path.relative_to(root))]

    return train()


def test_ranks_go_on_from_the_newest_sealed_one(job: Job, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    job.start(4, trains, str(root))
    job.expect("in", 0, 1, 2)
    job.kill(0)
    all_parts = ["part-0", "part-1", "part-2"]
    expected = [[3, *all_parts], [6, *all_parts], "run-1/iteration-1/checkpoint-6"]
    assert job.wait(killed=(0,)) == [expected] * 3
    left = [str(entry.path.relative_to(root)) for entry in folders.look(root).entries]
    # The unsealed step 4 of iteration 0 is gone, and so is that iteration's folder.
    assert left == ["run-1/iteration-1/checkpoint-6", "run-1/iteration-1/checkpoint-5"]
    assert not (root / "run-1" / "iteration-0").exists()


def asks(rank: Rank, root: str) -> Any:
    """Asks twice in each of two iterations."""
    logging.getLogger().addHandler(logging.StreamHandler())
    logging.getLogger("ft_wrapper.checkpoints").setLevel(logging.DEBUG)

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> Any:
        checkpoints = Checkpoints(call_wrapper, root)
        assert rank.hear() == "look"
        newest = checkpoints.newest()
        assert newest == checkpoints.newest()
        rank.say("looked", parts=parts(newest))
        if call_wrapper.iteration == 1:
            return parts(newest)
        if rank.slot == 0 and rank.hear() == "fail":
            raise ValueError
        return rank.hang()

    return train()


def test_rank_0_looks_and_all_are_given_its_answer_and_what_is_passed_over_is_named_once(
    job: Job, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    above = folders.iteration_folder(root, 1, 0)
    for step in (1, 2):
        (above / f"checkpoint-{step}").mkdir(parents=True)
    (above / "checkpoint-1" / folders.SEAL).touch()
    (root / "notes").touch()
    job.start(2, asks, str(root))
    job.tell("look", 0)
    job.expect("looked", 0)
    (above / "checkpoint-2" / folders.SEAL).touch()
    job.tell("look", 1)
    job.expect("looked", 1, parts=[1])
    (above / "checkpoint-2" / folders.SEAL).unlink()
    job.tell("fail", 0)
    job.tell("look")
    assert job.wait() == [[1], [1]]
    for line in (
        f"{above}/checkpoint-2 is skipped: it is not sealed",
        f"{root}/notes is skipped: no run",
    ):
        assert job[0].log.count(line) == 1, job[0].log
    assert f"continues from {above}/checkpoint-1" in job[0].log


# ---- what is sealed, and what is not


def fails_to_seal(rank: Rank, root: str) -> Any:
    """In iteration 0 a rank fails in mid-save, in 1 the seal cannot be written, in 2 a rank does not come.

    In 3 rank 0 does not come to make its `Checkpoints`, and in 4 not to look for the newest one.
    """
    write_through = folders.write_through

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    @Wrapper(**with_limits(**SETTINGS, max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> Any:
        n = call_wrapper.iteration
        given: dict[str, Any] = {"timeout": 1.0} if n in (2, 3, 4) else {}
        if n == 3 and rank.slot == 0:
            rank.hang()
        checkpoints = Checkpoints(call_wrapper, root, **given)
        if n == 4 and rank.slot == 0:
            rank.hang()
        newest = checkpoints.newest()
        if n == 5:
            return newest
        if n == 0 and rank.slot == 1:
            assert rank.hear() == "fail"
            raise ValueError("in mid-save")
        write(checkpoints, n, rank.slot)
        rank.say("written", n=n)
        if n == 2 and rank.slot == 1:
            rank.hang()
        folders.write_through = full if n == 1 and rank.slot == 0 else write_through  # type: ignore[assignment]
        checkpoints.seal(n)
        raise AssertionError("it is not sealed")

    return train()


def test_a_seal_that_does_not_come_is_a_fault_like_others_and_seals_nothing(job: Job, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    job.start(3, fails_to_seal, str(root))
    job.expect("written", 0, 2, n=0)
    job.tell("fail", 1)
    assert job.wait() == [None] * 3
    assert folders.look(root).sealed == []
    assert "none is sealed in" in job[0].log and "1 without a seal skipped" in job[0].log
    assert "OSError: [Errno 28] No space left on device" in job[0].log
    logs = "".join(job[slot].log for slot in range(3))
    assert f"seal(2) in {root}, seal 1' timed out after 0:00:01: missing ranks [1] of 3" in logs
    for where in ("Checkpoints", "newest()"):
        assert f"{where} in {root}: timed out after 0:00:01: missing ranks [0] of 3" in logs


# ---- interrupts


def is_interrupted(rank: Rank, root: str) -> Any:
    """Rank 0 is slow: in iteration 0 in the midst of a seal, in 1 when it removes what is old."""
    replace = os.replace

    def slowly(old: Any, new: Any) -> None:
        rank.say("replacing")
        assert rank.hear() == "go on"
        replace(old, new)

    @Wrapper(finalize=lambda state: rank.say("left", n=state.iteration), **SETTINGS)
    def train(call_wrapper: CallWrapper) -> Any:
        n = call_wrapper.iteration
        checkpoints = Checkpoints(call_wrapper, root, keep=1)
        if n == 2:
            return parts(checkpoints.newest())
        remove = checkpoints._remove_old

        def late() -> None:
            with call_wrapper.atomic():  # as one that was paused goes on
                rank.say("removes")
                assert rank.hear() == "go on"
                remove()

        write(checkpoints, n, rank.slot)
        os.replace = slowly if (n, rank.slot) == (0, 0) else replace
        if (n, rank.slot) == (1, 0):
            checkpoints._remove_old = late  # type: ignore[method-assign]
        if (n, rank.slot) == (0, 2):
            call_wrapper.store.barrier([2], f"seal(0) in {root}, seal 1", 3, checkpoints._timeout)
        else:
            checkpoints.seal(n)
        assert rank.hear() == "fail"
        raise ValueError

    return train()


def test_a_seal_is_written_to_its_end_or_not_at_all_and_who_is_late_removes_nothing(
    job: Job, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    job.start(3, is_interrupted, str(root))
    for n, does in enumerate(("replacing", "removes")):
        job.expect(does, 0)
        job.tell("fail", 2)
        job.expect("left", 1, 2, n=n)
        job.tell("go on", 0)
    assert job.wait() == [[1, "part-0", "part-1", "part-2"]] * 3
    assert [entry.step for entry in folders.look(root).sealed] == [1, 0]


# ---- bad input


BAD: list[tuple[dict[str, Any], str]] = [
    ({"root": ""}, "root='' must name a folder"),
    ({"root": 7}, "root=7 must be a path: a str or a pathlib.Path"),
    ({"root": __file__}, "is not a folder; name one, which need not exist yet"),
    ({"root": "r", "keep": 0}, "keep=0 is too small; it must be at least 1"),
    ({"root": "r", "keep": "3"}, "keep='3' must be an int, not str"),
    ({"root": "r", "timeout": 0}, "timeout=0 must be more than 0 seconds"),
    ({"root": "r", "call_wrapper": None}, "call_wrapper=None must be the CallWrapper"),
]


def misuses(rank: Rank, root: str) -> Any:
    said: list[str] = []
    old: list[Checkpoints] = []

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[str]:
        if call_wrapper.iteration == 0:
            old.append(Checkpoints(call_wrapper, root))
            raise ValueError
        checkpoints = Checkpoints(call_wrapper, root)
        write(checkpoints, 1, 0)
        checkpoints.seal(1)
        assert [checkpoints.is_sealed(step) for step in (1, 2)] == [True, False]
        for arguments, words in BAD:
            with pytest.raises(JobAbort, match=re.escape(words)):
                Checkpoints(**{"call_wrapper": call_wrapper, **arguments})
        for call in (
            lambda: old[0].newest(),
            lambda: old[0].seal(1),
            lambda: checkpoints.path(1),
            lambda: checkpoints.path(-1),
            lambda: checkpoints.seal("2"),  # type: ignore[arg-type]
            lambda: checkpoints.seal(2),
        ):
            try:
                call()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        rank.say("told", said=said)
        Checkpoints(call_wrapper, root)
        return []

    return train()


def test_misuse_is_told_with_the_way_out_and_bad_arguments_end_the_job(job: Job, tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    job.start(1, misuses, root)
    said = job.expect("told")[0]["said"]
    kinds = [*["RuntimeError"] * 2, *["ValueError"] * 2, "TypeError", "FileNotFoundError"]
    assert [words.partition(":")[0] for words in said] == kinds
    assert "make one in the function, in each iteration" in said[0]
    assert "step=1 was already sealed in this iteration; save a step once" in said[2]
    job.wait_for_end()
    assert job[0].error == "JobAbort"
    assert job[0].text.endswith("there is already a Checkpoints of it; use that one")


def sees_another_folder(rank: Rank, root: str) -> Any:
    import ft_wrapper.checkpoints

    ft_wrapper.checkpoints._SEEN_WITHIN = 0.2
    settings = {**SETTINGS, "max_same_faults": 1}

    @Wrapper(**with_limits(**settings))
    def train(call_wrapper: CallWrapper) -> None:
        if rank.slot == 1:  # as on another node, whose own disk has such a run, of an earlier job
            folders.job_of = lambda root, run: "an earlier job"
        Checkpoints(call_wrapper, root)
        rank.hang()

    return train()


def test_a_folder_that_the_nodes_do_not_share_is_found(job: Job, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    job.start(2, sees_another_folder, str(root))
    job.wait_for_end()
    assert f"active rank 1 does not see {root}/run-1, which active rank 0 has begun: root=" in job[1].log
    assert "must be a folder that all nodes share" in job[1].log


def names_roots(rank: Rank, roots: list[list[str]]) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> None:
        for root in roots[rank.slot]:
            Checkpoints(call_wrapper, root)
        rank.hang()

    return train()


def test_ranks_that_name_different_folders_end_the_job_at_once(job: Job, tmp_path: Path) -> None:
    roots = [[str(tmp_path / name) for name in names] for names in (["a", "b"], ["a", "a/../c"])]
    job.start(2, names_roots, roots)
    job.wait_for_end()
    text = f"active rank 1 has root={str(tmp_path / 'c')!r}, active rank 0 has {str(tmp_path / 'b')!r}"
    assert text in job[1].text
    assert [process.error for process in job.ranks.values()] == ["JobEnded", "JobAbort"]


def test_ranks_may_use_several_folders(job: Job, tmp_path: Path) -> None:
    job.start(2, names_all, [str(tmp_path / name) for name in "abc"])
    assert job.wait() == [1, 1]


def names_all(rank: Rank, roots: list[str]) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        for root in roots[:: 1 - 2 * call_wrapper.iteration]:  # in another order in the next iteration
            Checkpoints(call_wrapper, root)
        if call_wrapper.iteration == 0:
            raise ValueError
        return call_wrapper.iteration

    return train()


# ---- two jobs


def shares(rank: Rank, root: str, job: str) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> Any:
        checkpoints = Checkpoints(call_wrapper, root, keep=1)
        newest = checkpoints.newest()
        rank.say("in", newest=newest and str(newest.path.relative_to(root)))
        step = 0 if newest is None else newest.step
        while (order := rank.hear()) in ("save", "seal"):
            step += 1
            path = write(checkpoints, step, rank.slot)
            (path / f"of-{job}").touch()
            if order == "seal":
                checkpoints.seal(step)
            rank.say("saved")
        if order == "fail":
            raise ValueError
        return None

    return train()


def test_two_jobs_in_one_folder_leave_each_others_checkpoints(
    job: Job, template: Template, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"

    def do(one: Job, *orders: str) -> None:
        for order in orders:
            one.tell(order)
            one.expect("saved")

    def goes_on_from(one: Job) -> str | None:
        first, second = one.expect("in")
        assert first["newest"] == second["newest"]
        return first["newest"]  # type: ignore[no-any-return]

    def left() -> dict[str, set[str]]:
        entries = folders.look(root).entries
        return {
            str(entry.path.relative_to(root)): {name[3:] for name in os.listdir(entry.path) if "of-" in name}
            for entry in entries
        }

    job.start(2, shares, str(root), "first")
    assert goes_on_from(job) is None
    do(job, "seal", "save")  # of the second one there is no seal yet
    directory = tmp_path / "second"
    directory.mkdir()
    with running(template, directory) as second:
        second.start(2, shares, str(root), "second")
        assert goes_on_from(second) == "run-1/iteration-0/checkpoint-1"
        second.tell("fail", 0)
        assert goes_on_from(second) == "run-1/iteration-0/checkpoint-1"  # it has none of its own yet
        do(second, "seal", "seal", "save")
        assert left() == {
            "run-2/iteration-1/checkpoint-4": {"second"},
            "run-2/iteration-1/checkpoint-3": {"second"},
            "run-1/iteration-0/checkpoint-2": {"first"},
            "run-1/iteration-0/checkpoint-1": {"first"},
        }
        job.tell("fail", 0)
        assert (
            goes_on_from(job) == "run-1/iteration-0/checkpoint-1"
        )  # not the other's, though its run is higher
        do(job, "seal", "seal")
        assert left() == {
            "run-2/iteration-1/checkpoint-4": {"second"},
            "run-2/iteration-1/checkpoint-3": {"second"},
            "run-1/iteration-1/checkpoint-3": {"first"},
        }
        second.tell("fail", 0)
        assert goes_on_from(second) == "run-2/iteration-1/checkpoint-3"
        second.tell("end")
        assert second.wait() == [None, None]
    job.tell("end")
    assert job.wait() == [None, None]


def a_folder_that_is_taken_away(rank: Rank, root: str) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> Any:
        checkpoints = Checkpoints(call_wrapper, root)
        if call_wrapper.iteration == 0:
            rank.say("in")
            assert rank.hear() == "fail"
            raise ValueError
        return str(checkpoints.path(1).relative_to(root))

    return train()


def test_a_run_that_another_job_has_taken_meanwhile_is_left_to_it(job: Job, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    job.start(2, a_folder_that_is_taken_away, str(root))
    job.expect("in")
    shutil.rmtree(root)
    root.mkdir()
    assert folders.enter_run(root, "another") == 1
    job.tell("fail", 0)
    assert job.wait() == ["run-2/iteration-1/checkpoint-1"] * 2
