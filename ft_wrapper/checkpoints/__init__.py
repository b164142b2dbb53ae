"""Checkpoints that a restart, a kill or a late rank cannot spoil: see ``docs/checkpoints.md``."""

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from ..exception import JobAbort, for_good
from ..protocol import keys
from ..protocol.operations import Notify, Write, read, set_if_absent
from ..protocol.records import present
from ..settings import as_int, as_timeout
from ..store import BarrierTimeout
from ..wrapper import CallWrapper
from . import folders

log = logging.getLogger(__name__)

_SEEN_WITHIN = 10.0  # seconds within which a file server shows a host what another host has written
_PAUSE = 0.1  # seconds between two looks: no event announces a file that a server shows late


@dataclasses.dataclass
class _Kept:
    """State that a process keeps across iterations.

    Attributes:
        run: the number of the job's run.
        iteration: the iteration that last used it.
        named: skipped paths that were already logged.
    """

    run: int | None = None
    iteration: int = -1
    named: set[Path] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint. It is path-like: ``torch.load`` and ``dcp.load(checkpoint_id=)`` accept it.

    Args:
        path: the file or folder.
        step: the step that it was sealed with.
    """

    path: Path
    step: int

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__


class Checkpoints:
    """A job's checkpoints in a folder: where to write, which are complete, which one to continue from.

    Make it in the wrapped function in each iteration, on all active ranks; it needs no process group::

        checkpoints = Checkpoints(call_wrapper, "checkpoints")
        if (newest := checkpoints.newest()) is not None:
            load(newest.path)
            first = newest.step
        for step in ...:
            save(checkpoints.path(step))
            checkpoints.seal(step)

    Each iteration writes into its own folder. A checkpoint counts once it is sealed: by `seal`; by the
    ``.metadata`` that ``torch.distributed.checkpoint`` writes last; or because it is a single file, which was
    written under another name and renamed.

    Args:
        call_wrapper: the wrapped function's `CallWrapper`.
        root: the folder, created if it does not exist. The same on all ranks, on a file system that all
            share. All ranks make several `Checkpoints` in the same order.
        keep: the number of sealed checkpoints of this job to keep; `seal` removes older ones.
        timeout: seconds, or a ``timedelta``, to wait for the other ranks. By default the wrapper's
            ``barrier_timeout``.

    Raises:
        JobAbort: an error that would recur in each iteration: an argument is wrong, or this iteration already
            has a `Checkpoints` of the folder.
        BarrierTimeout: active rank 0 did not arrive.
        OSError: the folder cannot be used, or is not the one that active rank 0 sees.
    """

    def __init__(
        self,
        call_wrapper: CallWrapper,
        root: str | os.PathLike[str],
        keep: int = 3,
        *,
        timeout: timedelta | float | None = None,
    ) -> None:
        with for_good("Checkpoints"):
            self.root = _check_arguments(call_wrapper, root)
            self.keep = as_int("keep", keep, at_least=1)
            given = None if timeout is None else as_timeout("timeout", timeout)
        self._call_wrapper = call_wrapper
        services, state = call_wrapper.services, call_wrapper.state
        assert state.active_rank is not None and state.active_world_size is not None, "spares do not run this"
        self._rank, self._size = state.active_rank, state.active_world_size
        self._timeout = timedelta(seconds=services.settings.barrier_timeout) if given is None else given
        self._iteration = services.iteration
        self._looks = 0
        self._seals = 0
        self._sealed: set[int] = set()  # steps
        self._kept: _Kept = services.kept.setdefault(f"checkpoints in {self.root}", _Kept())
        if self._kept.iteration == self._iteration:
            raise JobAbort(f"root={str(self.root)!r}: there is already a Checkpoints of it; use that one")
        others = [one for one in services.kept.values() if isinstance(one, _Kept) and one is not self._kept]
        self._number = sum(one.iteration == self._iteration for one in others)
        self._kept.iteration = self._iteration
        self._run = self._enter()

    # ---- for users

    def path(self, step: int) -> Path:
        """Where this iteration writes the checkpoint of a step: the same path on all ranks.

        Creates the parent folder, but not the path itself, because it may also become a single file, which is
        written next to it and then renamed.

        Args:
            step: the training step, from 0.

        Raises:
            TypeError: the step is not a whole number.
            ValueError: it is negative, or was sealed in this iteration: a sealed checkpoint must not change.
            OSError: the parent folder cannot be created.
        """
        step = as_int("step", step, at_least=0)
        if step in self._sealed:
            raise ValueError(f"step={step} was already sealed in this iteration; save a step once")
        above = folders.iteration_folder(self.root, self._run, self._iteration)
        above.mkdir(parents=True, exist_ok=True)
        return above / f"checkpoint-{step}"

    def is_sealed(self, step: int) -> bool:
        """Whether the checkpoint of a step was sealed in this iteration, perhaps for a notice in it."""
        return step in self._sealed

    def seal(self, step: int) -> None:
        """Seals the checkpoint of a step once all ranks have written it; then removes old ones.

        All active ranks call it, in their main thread, each after it has written its part. It waits for all.

        Args:
            step: the argument of ``path``.

        Raises:
            TypeError: the step is not a whole number.
            ValueError: it is negative.
            BarrierTimeout: not all ranks arrived in time; the message names the missing ones.
            FileNotFoundError: nothing was written.
            OSError: on active rank 0, if it cannot write the seal; that restarts all ranks.
            RuntimeError: the iteration for which this was made is over.
        """
        step = as_int("step", step, at_least=0)
        self._check_iteration("seal()")
        self._seals += 1
        store, what = self._call_wrapper.store, f"seal({step}) in {self.root}"
        name = f"{what}, seal {self._seals}"  # a barrier serves once
        store.barrier([self._rank], name, self._size, self._timeout)
        said = keys.barrier(name, "sealed")
        if self._rank == 0:
            path = folders.iteration_folder(self.root, self._run, self._iteration)
            with self._call_wrapper.atomic():
                folders.seal(self.root, path / f"checkpoint-{step}")
            self._say(said, "1")
            self._remove_old()
        else:
            self._hear(said, what)
        self._sealed.add(step)

    def newest(self) -> Checkpoint | None:
        """The newest sealed checkpoint of all iterations: of this job, else of any job that used the folder.

        None if there is none.

        Active rank 0 looks, and all active ranks get its answer. It needs no process group.

        Raises:
            BarrierTimeout: active rank 0 did not arrive.
            OSError: this rank does not see what active rank 0 has found.
            RuntimeError: the iteration for which this was made is over.
        """
        self._check_iteration("newest()")
        self._looks += 1
        what = f"newest() in {self.root}"
        said = keys.barrier(f"{what}, look {self._looks}", "found")
        if self._rank == 0:
            newest = self._look()
            self._say(said, str(newest.path.relative_to(self.root)) if newest else "")
            return newest
        name = self._hear(said, what)
        if not name:
            return None
        path = self.root / name
        self._see(path, "has found", path.exists)
        return Checkpoint(path, folders.step_of(path))

    # ---- the job's part of the folder

    def _enter(self) -> int:
        """The number of the job's run, which active rank 0 finds or begins."""
        said = keys.barrier("Checkpoints", f"{self._number}/run")  # by number: the roots may differ
        if self._rank == 0:
            job_store = self._call_wrapper.services.store
            folder = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
            job = set_if_absent(job_store, keys.checkpoints(folder), secrets.token_hex(8))
            self.root.mkdir(parents=True, exist_ok=True)
            run = self._kept.run
            if run is None or folders.job_of(self.root, run) != job:
                run = folders.enter_run(self.root, job)
            self._say(said, json.dumps([run, job, str(self.root)]))
        else:
            run, job, root = json.loads(self._hear(said, f"Checkpoints in {self.root}"))
            if root != str(self.root):
                raise JobAbort(
                    f"Checkpoints: active rank {self._rank} has root={str(self.root)!r}, active rank 0 has "
                    f"{root!r}: give all ranks the same absolute path, and make several in the same order"
                )
            if run != self._kept.run:
                path = self.root / f"run-{run}"
                self._see(path, "has begun", lambda: folders.job_of(self.root, run) == job)
        self._kept.run = run
        return run

    # ---- what is in it

    def _look(self) -> Checkpoint | None:
        found = folders.look(self.root)
        # Another job that now uses the folder may have a higher run.
        sealed = [entry for entry in found.sealed if entry.run == self._run] or found.sealed
        for path, why in {**found.others, **{e.path: e.lacks for e in found.entries if e.lacks}}.items():
            if path not in self._kept.named:
                self._kept.named.add(path)
                log.debug("checkpoints: %s is skipped: %s", path, why)
        if sealed:
            log.info("checkpoints: continues from %s", sealed[0].path)
            return Checkpoint(sealed[0].path, sealed[0].step)
        torn = len(found.entries)
        level = logging.WARNING if torn else logging.INFO
        more = f"; {torn} without a seal skipped" if torn else ""
        log.log(level, "checkpoints: none is sealed in %s, starts from the beginning%s", self.root, more)
        return None

    def _remove_old(self) -> None:
        """Removes old checkpoints. Failures are logged, and retried at the next seal."""
        # Checked after the seal: each later iteration, however late this runs, looks when the seal exists. So
        # no iteration reads older checkpoints.
        if self._call_wrapper.services.has_failed():
            return
        own = folders.look(self.root, only=self._run)
        for path in [*own.removed, *folders.too_many(own, self.keep, self._iteration)]:
            try:
                folders.remove(path)
            except OSError as error:
                log.warning("checkpoints: cannot remove %s: %s", path, error)
        folders.remove_empty(self.root, self._run, self._iteration)

    # ---- other ranks

    def _say(self, key: str, text: str) -> None:
        """Publishes active rank 0's answer."""
        self._call_wrapper.store.execute([Write({key: text}), Notify(f"{key}/wake", "")])

    def _hear(self, key: str, what: str) -> str:
        """Waits for active rank 0's answer."""
        store = self._call_wrapper.store
        if store.wait_for(f"{key}/wake", self._timeout.total_seconds()) is None:
            missing = f"missing ranks [0] of {self._size}"
            raise BarrierTimeout(f"{what}: timed out after {self._timeout}: {missing}")
        return present(key, read(store, key))

    def _see(self, path: Path, how: str, is_seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SEEN_WITHIN
        while not is_seen():
            if time.monotonic() >= deadline:
                raise FileNotFoundError(
                    f"active rank {self._rank} does not see {path}, which active rank 0 {how}: "
                    f"root={str(self.root)!r} must be a folder that all nodes share"
                )
            time.sleep(_PAUSE)

    def _check_iteration(self, what: str) -> None:
        self._call_wrapper.services.check_iteration(self._iteration, f"{what} of a Checkpoints")


def _check_arguments(call_wrapper: object, root: object) -> Path:
    if not isinstance(call_wrapper, CallWrapper):
        raise TypeError(f"call_wrapper={call_wrapper!r} must be the CallWrapper that the function is given")
    if not isinstance(root, (str, os.PathLike)) or not isinstance(os.fspath(root), str):
        raise TypeError(f"root={root!r} must be a path: a str or a pathlib.Path")
    if not os.fspath(root):
        raise ValueError("root='' must name a folder")
    path = Path(os.path.abspath(root))
    if path.exists() and not path.is_dir():
        raise ValueError(f"root={os.fspath(root)!r} is not a folder; name one, which need not exist yet")
    return path
