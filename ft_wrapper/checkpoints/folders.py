"""The contents of a checkpoint folder: where each checkpoint is, which are sealed, which may be removed.

``root/run-2/iteration-7/checkpoint-120`` was written by the second job that used the folder, in iteration 7
at step 120. The newest checkpoint has the highest run, then iteration, then step: late writes of an earlier
iteration are never the newest.

A job writes and removes only in its own run. So jobs that use the folder at the same time leave each other's
checkpoints alone.
"""

import contextlib
import dataclasses
import errno
import itertools
import os
import re
import shutil
import stat
from pathlib import Path

#: In a folder that all ranks have written; written by ``seal``.
SEAL = ".sealed"
#: The file that ``torch.distributed.checkpoint`` writes last.
DCP_METADATA = ".metadata"
#: The file in a run, next to its iterations, with the name of its job.
JOB_FILE = "job"
#: Suffixes of a single file, or of a framework's folder.
SUFFIXES = ("", ".pt", ".pth", ".ckpt", ".safetensors")

_NUMBER = r"(0|[1-9][0-9]*)"
_RUN = re.compile(f"run-{_NUMBER}")
_ITERATION = re.compile(f"iteration-{_NUMBER}")
_CHECKPOINT = re.compile(f"checkpoint-{_NUMBER}({'|'.join(map(re.escape, SUFFIXES))})")
_REMOVED = ".removed-"


@dataclasses.dataclass(frozen=True, order=True)
class FoundCheckpoint:
    """A checkpoint, complete or not; the greater, the newer.

    Args:
        run: the number of the job among those that used the folder.
        iteration: the job's iteration.
        step: the step in that iteration.
        path: where it is.
        lacks: what it lacks to be sealed; empty if it is sealed.
    """

    run: int
    iteration: int
    step: int
    path: Path = dataclasses.field(compare=False)
    lacks: str = dataclasses.field(compare=False)


@dataclasses.dataclass
class Found:
    """The result of a look.

    Args:
        entries: the checkpoints, newest first.
        others: other paths, each with why it is not a checkpoint.
        removed: checkpoints whose removal was cut short by the process's death.
    """

    entries: list[FoundCheckpoint] = dataclasses.field(default_factory=list)
    others: dict[Path, str] = dataclasses.field(default_factory=dict)
    removed: list[Path] = dataclasses.field(default_factory=list)

    @property
    def sealed(self) -> list[FoundCheckpoint]:
        """The sealed checkpoints, newest first."""
        return [entry for entry in self.entries if not entry.lacks]


def iteration_folder(root: Path, run: int, iteration: int) -> Path:
    """The folder in which only this iteration writes."""
    return root / f"run-{run}" / f"iteration-{iteration}"


def run_numbers(root: Path) -> list[int]:
    """The numbers of all runs in the folder, in order."""
    return sorted(int(found[1]) for found in map(_RUN.fullmatch, os.listdir(root)) if found)


def job_of(root: Path, run: int) -> str:
    """The job of a run; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return (root / f"run-{run}" / JOB_FILE).read_text(errors="replace").strip()
    return ""


def enter_run(root: Path, job: str) -> int:
    """The number of a job's run. Begins one, with the next number, if the job has none.

    Args:
        root: the folder.
        job: the job's unique name.

    Raises:
        OSError: the folder cannot be written to.
    """
    numbers = run_numbers(root)
    # The highest: a process that was paused before it could publish the run it had begun may still go on.
    found = next((number for number in reversed(numbers) if job_of(root, number) == job), None)
    if found is not None:
        return found
    for number in itertools.count(max(numbers, default=0) + 1):
        with contextlib.suppress(FileExistsError):  # another job was faster
            (root / f"run-{number}").mkdir()
            break
    write_through(root / f"run-{number}" / JOB_FILE, f"{job}\n")
    sync(root / f"run-{number}")
    sync(root)
    return number


def step_of(path: str | os.PathLike[str]) -> int:
    """The step of a checkpoint, by its name.

    Args:
        path: the result of `Checkpoints.path`.

    Raises:
        ValueError: it is not a checkpoint's name.
    """
    found = _CHECKPOINT.fullmatch(os.path.basename(os.fspath(path)))
    if found is None:
        raise ValueError(f"path={os.fspath(path)!r} must be a checkpoint's, such as 'checkpoint-120'")
    return int(found[1])


def look(root: Path, only: int | None = None) -> Found:
    """Looks for all checkpoints below the folder. Unreadable paths are among ``others``.

    Args:
        root: the folder.
        only: the run to look at; all when None.
    """
    found = Found()
    for run in _children(root, found):
        if not (is_run := _RUN.fullmatch(run.name)):
            found.others[run] = "no run"
            continue
        for iteration in _children(run, found) if only in (None, int(is_run[1])) else ():
            if iteration.name == JOB_FILE:
                continue
            if not (is_iteration := _ITERATION.fullmatch(iteration.name)):
                found.others[iteration] = "no iteration"
                continue
            for path in _children(iteration, found):
                is_checkpoint = _CHECKPOINT.fullmatch(path.name)
                if path.name.startswith(_REMOVED):
                    found.removed.append(path)
                elif not is_checkpoint:
                    found.others[path] = "no checkpoint"
                else:
                    numbers = (int(is_run[1]), int(is_iteration[1]), int(is_checkpoint[1]))
                    found.entries.append(FoundCheckpoint(*numbers, path, _lacks(path)))
    found.entries.sort(reverse=True)
    return found


def _children(path: Path, found: Found) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError as error:
        found.others[path] = os.strerror(error.errno or 0)
        return []


def _lacks(path: Path) -> str:
    """What a checkpoint lacks to be sealed; empty if it is."""
    try:
        about = os.stat(path)
        if stat.S_ISREG(about.st_mode):  # it was written under another name, and renamed
            return "" if about.st_size else "it is empty"
        if not stat.S_ISDIR(about.st_mode):
            return "it is neither a file nor a folder"
        with contextlib.suppress(FileNotFoundError):
            os.stat(path / SEAL)
            return ""
        with contextlib.suppress(FileNotFoundError):
            return "" if os.stat(path / DCP_METADATA).st_size else f"its {DCP_METADATA} is empty"
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "it is not sealed"


def seal(root: Path, path: Path) -> None:
    """Seals a step's checkpoint, so that it stays sealed even if the machine crashes.

    Args:
        root: the folder of all checkpoints.
        path: the result of ``path``. A single file may have a suffix.

    Raises:
        FileNotFoundError: nothing was written there.
        OSError: the seal cannot be written.
    """
    written = [path.with_name(path.name + suffix) for suffix in SUFFIXES]
    written = [each for each in written if each.exists()]
    if not written:
        raise FileNotFoundError(errno.ENOENT, "nothing was written to be sealed", str(path))
    for each in written:
        if each.is_dir():
            unfinished = each / f"{SEAL}.tmp"
            write_through(unfinished, "all ranks have written\n")
            os.replace(unfinished, each / SEAL)
            sync(each)
    for above in path.parents:
        sync(above)  # otherwise the names on the path to it may be lost
        if above == root:
            break


def write_through(path: Path, text: str) -> None:
    """Writes a small file and flushes it to disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flushes the names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system supports it
            raise
    finally:
        os.close(fd)


def too_many(own: Found, keep: int, iteration: int) -> list[Path]:
    """The checkpoints that may be removed: old sealed ones, and unsealed ones of earlier iterations.

    Checkpoints that this iteration has not sealed yet stay.

    Args:
        own: the contents of the caller's run.
        keep: the number of sealed checkpoints to keep; at least 1.
        iteration: the caller's iteration.
    """
    torn = [entry.path for entry in own.entries if entry.lacks and entry.iteration < iteration]
    return [*(entry.path for entry in own.sealed[keep:]), *torn]


def remove(path: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a partial one is never mistaken for a complete one.

    Raises:
        OSError: it cannot be removed.
    """
    if not path.name.startswith(_REMOVED):
        gone = path.with_name(f"{_REMOVED}{path.name}")
        if gone.is_dir():
            shutil.rmtree(gone)
        os.rename(path, gone)
        path = gone
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_empty(root: Path, run: int, iteration: int) -> None:
    """Removes the folders of a run's earlier iterations that are empty."""
    for path in _children(root / f"run-{run}", Found()):
        found = _ITERATION.fullmatch(path.name)
        if found and int(found[1]) < iteration:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()
