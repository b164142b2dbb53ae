"""What is in a folder of checkpoints: which one is the newest, what is passed over, what goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_wrapper.checkpoints import folders, runs, step_of


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
    checkpoint(tmp_path, 1, 0, 10)
    checkpoint(tmp_path, 2, 4, 20)
    torn = checkpoint(tmp_path, 2, 4, 30, seal=None)
    checkpoint(tmp_path, 2, 5, 30)
    checkpoint(tmp_path, 2, 5, 40)
    saving = checkpoint(tmp_path, 2, 5, 35, seal=None)
    checkpoint(tmp_path, 3, 0, 5, seal=None)  # a later job's
    found = folders.look(tmp_path)

    def gone(keep: int, **only: bool) -> list[str]:
        return names(folders.too_many(found, keep, 2, 5, **{"own_run_only": False, **only}), tmp_path)

    assert gone(3) == ["run-1/iteration-0/checkpoint-10", names([torn], tmp_path)[0]]
    assert gone(3, own_run_only=True) == names([torn], tmp_path)
    assert "run-2/iteration-5/checkpoint-40" not in gone(1)
    assert names([saving], tmp_path)[0] not in gone(1)


def test_the_newest_sealed_one_stays_whatever_else_there_is(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, 0, 10)
    for step in range(20, 60, 10):
        checkpoint(tmp_path, 1, 1, step, seal=None)
    found = folders.look(tmp_path)
    assert {path.name for path in folders.too_many(found, 1, 1, 2, own_run_only=False)} == {
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


def test_empty_folders_of_earlier_iterations_and_runs_go(tmp_path: Path) -> None:
    for run, iteration in ((1, 0), (2, 0), (2, 1), (2, 2), (3, 0)):
        folders.iteration_folder(tmp_path, run, iteration).mkdir(parents=True)
    for run in (1, 2, 3):
        for name in (folders.JOB_FILE, folders.LOCK_FILE):
            (tmp_path / f"run-{run}" / name).touch()
    (tmp_path / "run-2" / "iteration-0" / "notes").touch()
    folders.remove_empty(tmp_path, 2, 1, own_run_only=True)
    assert sorted(os.listdir(tmp_path)) == ["run-1", "run-2", "run-3"]
    folders.remove_empty(tmp_path, 2, 1, own_run_only=False)
    assert sorted(os.listdir(tmp_path)) == ["run-2", "run-3"]
    assert sorted(os.listdir(tmp_path / "run-2")) == [
        "iteration-0",
        "iteration-1",
        "iteration-2",
        "job",
        "lock",
    ]
    assert sorted(os.listdir(tmp_path / "run-3")) == ["iteration-0", "job", "lock"]


# ---- two jobs in one folder


HOLDS = """
import sys
from pathlib import Path
from ft_wrapper.checkpoints import runs
run = runs.begin(Path(sys.argv[1]), "theirs")
print(run.number, flush=True)
sys.stdin.read()
"""


def holder(root: Path, launch: str = "") -> subprocess.Popen[str]:
    """Another job, which is through with the folder once its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHELASTIC_RUN_ID": launch},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    return process


@pytest.mark.timeout(120)
def test_a_job_that_lives_is_found_and_one_that_has_ended_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LASTS", 0.0)
    with holder(tmp_path) as other:
        mine = runs.begin(tmp_path, "mine")
        assert mine.number == 2
        with pytest.raises(runs.InUse, match=rf"run 1, begun .* by process {other.pid} on "):
            runs.check_alone(mine, "mine", 100.0)
        mine.withdraw()
        assert os.listdir(tmp_path) == ["run-1"]
        other.kill()
        other.wait()
        mine = runs.begin(tmp_path, "mine")
        runs.check_alone(mine, "mine", 0.0)
        mine.close()
        mine.close()


@pytest.mark.timeout(120)
def test_processes_of_the_same_launch_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LASTS", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "llm-7")
    with holder(tmp_path, "llm-7") as other:
        mine = runs.begin(tmp_path, "mine")
        looked: list[float] = []

        def ends(seconds: float) -> None:
            looked.append(seconds)
            other.kill()
            other.wait()

        monkeypatch.setattr("time.sleep", ends)
        runs.check_alone(mine, "mine", 100.0)
        assert len(looked) == 1
        mine.close()


def test_a_run_that_has_checkpoints_is_not_removed_with_its_job(tmp_path: Path) -> None:
    run = runs.begin(tmp_path, "mine")
    checkpoint(tmp_path, 1, 0, 5)
    run.withdraw()
    assert len(folders.look(tmp_path).sealed) == 1


def test_a_run_is_found_by_its_jobs_name_and_a_torn_one_is_no_ones(tmp_path: Path) -> None:
    first, second = runs.begin(tmp_path, "mine"), runs.begin(tmp_path, "mine")
    (tmp_path / "run-7").mkdir()
    (tmp_path / "run-8").mkdir()
    (tmp_path / "run-8" / folders.JOB_FILE).write_text("[]")
    found = runs.find(tmp_path, "mine")
    assert found is not None and found.number == second.number == 2
    assert runs.find(tmp_path, "another's") is None
    assert runs.open_run(tmp_path, 9, "mine") is None
    last = runs.begin(tmp_path, "mine")
    assert last.number == 9
    runs.check_alone(last, "mine", 0.0)
    for run in (first, second, found, last):
        run.close()


def test_where_there_are_no_locks_it_is_said_and_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    run = runs.begin(tmp_path, "mine")
    assert not run.is_locked
    assert "has no locks (Function not implemented): a second job in it would not be noticed" in caplog.text
    runs.check_alone(run, "mine", 0.0)
    run.close()


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "write_through", full)
    with pytest.raises(OSError, match="No space left"):
        runs.begin(tmp_path, "mine")
    assert os.listdir(tmp_path) == []
