"""What is in a folder of checkpoints: which one is the newest, what is passed over, what goes."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_wrapper.checkpoints import Checkpoint, folders
from ft_wrapper.checkpoints.folders import step_of


def checkpoint(root: Path, run: int, iteration: int, step: int, seal: str | None = folders.SEAL) -> Path:
    """A checkpoint with a file in it, and with what seals it."""
    path = folders.iteration_folder(root, run, iteration) / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_text("1")
    if seal is not None:
        (path / seal).write_text("x")
    return path


def names(paths: list[Path], root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in paths]


# ---- which one is the newest


def test_the_highest_run_then_iteration_then_step_is_the_newest(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, 12, 900)
    checkpoint(tmp_path, 2, 9, 300)
    checkpoint(tmp_path, 2, 10, 20)
    checkpoint(tmp_path, 2, 10, 100)
    checkpoint(tmp_path, 2, 10, 200, seal=None)
    assert [(e.run, e.iteration, e.step) for e in folders.look(tmp_path).sealed] == [
        (2, 10, 100),
        (2, 10, 20),
        (2, 9, 300),
        (1, 12, 900),
    ]


def test_what_counts_as_sealed(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, 0, 1, folders.SEAL)
    checkpoint(tmp_path, 1, 0, 2, folders.DCP_METADATA)
    above = folders.iteration_folder(tmp_path, 1, 0)
    for name in ("checkpoint-3", "checkpoint-4.pt", "checkpoint-5.ckpt"):
        (above / name).write_text("weights")
    assert [entry.step for entry in folders.look(tmp_path).sealed] == [5, 4, 3, 2, 1]


def test_what_does_not_count_is_said(tmp_path: Path) -> None:
    above = folders.iteration_folder(tmp_path, 1, 0)
    checkpoint(tmp_path, 1, 0, 1, seal=None)
    checkpoint(tmp_path, 1, 0, 2, seal=".metadata.tmp")
    (checkpoint(tmp_path, 1, 0, 3, folders.DCP_METADATA) / folders.DCP_METADATA).write_text("")
    (above / "checkpoint-4").write_text("")
    (above / "checkpoint-5.tmp").write_text("half of it")
    (above / "checkpoint-06").mkdir()
    (above / "checkpoint-7").symlink_to(above / "checkpoint-7")
    (above / "checkpoint-8").symlink_to(tmp_path / "gone")
    os.mkfifo(above / "checkpoint-9")
    (tmp_path / "run-1" / "logs").mkdir()
    (tmp_path / "run-2").write_text("a file")
    (tmp_path / "notes.txt").write_text("the user's")
    found = folders.look(tmp_path)
    assert found.sealed == []
    assert {entry.step: entry.lacks for entry in found.entries} == {
        1: "it is not sealed",
        2: "it is not sealed",
        3: "its .metadata is empty",
        4: "it is empty",
        7: "Too many levels of symbolic links",
        8: "No such file or directory",
        9: "it is neither a file nor a folder",
    }
    assert {path.name: why for path, why in found.others.items()} == {
        "checkpoint-5.tmp": "no checkpoint",
        "checkpoint-06": "no checkpoint",
        "logs": "no iteration",
        "run-2": "Not a directory",
        "notes.txt": "no run",
    }


def test_a_folder_that_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, 1, 0, 1)
    broken = checkpoint(tmp_path, 1, 1, 2).parent
    listed = Path.iterdir

    def fails(path: Path) -> Iterator[Path]:
        if path == broken:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", fails)
    found = folders.look(tmp_path)
    assert [entry.step for entry in found.sealed] == [1]
    assert found.others == {broken: "Permission denied"}


def test_the_step_is_in_the_name(tmp_path: Path) -> None:
    assert step_of(checkpoint(tmp_path, 1, 0, 120)) == 120
    assert step_of("somewhere/checkpoint-0.ckpt") == 0
    with pytest.raises(ValueError, match=r"path='checkpoint-1\.tmp' must be a checkpoint's"):
        step_of("checkpoint-1.tmp")


# ---- sealing


def test_a_folder_is_sealed_by_a_file_that_comes_as_a_whole(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1, 0, 5, seal=None)
    folders.seal(tmp_path, path)
    folders.seal(tmp_path, path)
    assert sorted(os.listdir(path)) == [folders.SEAL, "weights"]


def test_a_single_file_needs_no_seal(tmp_path: Path) -> None:
    path = folders.iteration_folder(tmp_path, 1, 0) / "checkpoint-5"
    path.parent.mkdir(parents=True)
    path.with_name("checkpoint-5.pt").write_text("weights")
    folders.seal(tmp_path, path)
    assert os.listdir(path.parent) == ["checkpoint-5.pt"]


def test_nothing_is_not_sealed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing was written"):
        folders.seal(tmp_path, folders.iteration_folder(tmp_path, 1, 0) / "checkpoint-5")


def test_files_reach_the_disk_before_the_seal_and_names_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, 1, 0, 5, seal=None)
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def syncs(fd: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        sync(fd)

    def replaces(old: Path, new: Path) -> None:
        done.append(f"replace {new.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", replaces)
    folders.seal(tmp_path, path)
    above = ["sync checkpoint-5", "sync iteration-0", "sync run-1", f"sync {tmp_path.name}"]
    assert done == ["sync .sealed.tmp", "replace .sealed", *above]


# ---- removing


def test_old_ones_go_and_what_an_earlier_iteration_left_unsealed(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2, 4, 20)
    torn = checkpoint(tmp_path, 2, 4, 30, seal=None)
    checkpoint(tmp_path, 2, 5, 30)
    checkpoint(tmp_path, 2, 5, 40)
    checkpoint(tmp_path, 2, 5, 35, seal=None)  # is being saved
    own = folders.look(tmp_path, only=2)
    last = names([torn], tmp_path)
    assert names(folders.too_many(own, 3, 5), tmp_path) == last
    assert names(folders.too_many(own, 2, 5), tmp_path) == ["run-2/iteration-4/checkpoint-20", *last]
    assert "run-2/iteration-5/checkpoint-40" not in names(folders.too_many(own, 1, 5), tmp_path)


def test_other_runs_are_not_looked_at_for_what_may_go(tmp_path: Path) -> None:
    for run in (1, 3):
        checkpoint(tmp_path, run, 0, 10)
        checkpoint(tmp_path, run, 0, 20, seal=None)
        (tmp_path / f"run-{run}" / "iteration-0" / ".removed-checkpoint-5").mkdir()
    checkpoint(tmp_path, 2, 5, 5)
    own = folders.look(tmp_path, only=2)
    assert names([entry.path for entry in own.entries], tmp_path) == ["run-2/iteration-5/checkpoint-5"]
    assert own.removed == []
    assert folders.too_many(own, 1, 5) == []


def test_the_newest_sealed_one_stays_whatever_else_there_is(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, 0, 10)
    for step in range(20, 60, 10):
        checkpoint(tmp_path, 1, 1, step, seal=None)
    found = folders.look(tmp_path, only=1)
    assert {path.name for path in folders.too_many(found, 1, 2)} == {
        f"checkpoint-{step}" for step in range(20, 60, 10)
    }


def test_a_checkpoint_that_is_removed_is_never_taken_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, 1, 0, 10)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            folders.remove(path)
    found = folders.look(tmp_path)
    assert (found.entries, len(found.removed)) == ([], 1)
    checkpoint(tmp_path, 1, 0, 10)  # as a rank that is late might write it
    folders.remove(path)
    assert os.listdir(path.parent) == []


def test_single_files_are_removed(tmp_path: Path) -> None:
    path = folders.iteration_folder(tmp_path, 1, 0) / "checkpoint-5.pt"
    path.parent.mkdir(parents=True)
    path.write_text("weights")
    folders.remove(path)
    assert os.listdir(path.parent) == []


def test_empty_folders_of_earlier_iterations_go(tmp_path: Path) -> None:
    for run, iteration in ((1, 0), (2, 0), (2, 1), (2, 2), (3, 0)):
        folders.iteration_folder(tmp_path, run, iteration).mkdir(parents=True)
    (tmp_path / "run-2" / folders.JOB_FILE).touch()
    (tmp_path / "run-2" / "iteration-0" / "notes").touch()
    folders.remove_empty(tmp_path, 2, 1)
    assert sorted(os.listdir(tmp_path / "run-2")) == ["iteration-0", "iteration-1", "iteration-2", "job"]
    (tmp_path / "run-2" / "iteration-0" / "notes").unlink()
    folders.remove_empty(tmp_path, 2, 1)
    assert sorted(os.listdir(tmp_path / "run-2")) == ["iteration-1", "iteration-2", "job"]
    assert [os.listdir(tmp_path / f"run-{run}") for run in (1, 3)] == [["iteration-0"]] * 2
    folders.remove_empty(tmp_path, 4, 1)  # someone has removed it


# ---- the runs of jobs


def test_each_job_has_a_run_of_its_own(tmp_path: Path) -> None:
    assert [folders.enter_run(tmp_path, job) for job in ("one", "two", "one", "two")] == [1, 2, 1, 2]
    assert [folders.job_of(tmp_path, run) for run in (1, 2, 3)] == ["one", "two", ""]
    (tmp_path / "run-1" / "job").write_bytes(b"\xff\0garbage")
    assert folders.enter_run(tmp_path, "one") == 3, "what is damaged is another job's"


def test_a_torn_run_belongs_to_no_job(tmp_path: Path) -> None:
    (tmp_path / "run-7").mkdir()
    assert folders.enter_run(tmp_path, "mine") == 8
    (tmp_path / "run-9").mkdir()
    (tmp_path / "run-9" / folders.JOB_FILE).mkdir()
    assert folders.enter_run(tmp_path, "mine") == 8


def test_of_two_runs_of_a_job_the_higher_one_counts(tmp_path: Path) -> None:
    """As of a process that was paused before it could say which run it had begun."""
    for run in (1, 3):
        (tmp_path / f"run-{run}").mkdir()
        (tmp_path / f"run-{run}" / folders.JOB_FILE).write_text("mine\n")
    assert folders.enter_run(tmp_path, "mine") == 3


def test_two_jobs_that_begin_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.enter_run(tmp_path, "first") == 1
    monkeypatch.setattr(folders, "run_numbers", lambda root: [])  # what a server shows late, too
    assert [folders.enter_run(tmp_path, job) for job in ("second", "third")] == [2, 3]
    assert [folders.job_of(tmp_path, run) for run in (1, 2, 3)] == ["first", "second", "third"]


def test_a_checkpoint_is_path_like(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1, 0, 120)
    newest = Checkpoint(path, 120)
    assert (os.fspath(newest), str(newest)) == (str(path), str(path))
    assert copy.deepcopy(newest) == pickle.loads(pickle.dumps(newest)) == newest
