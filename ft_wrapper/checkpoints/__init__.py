"""Checkpoints that a restart, a kill or a late rank cannot spoil: see ``docs/checkpoints.md``."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError

from ..exception import JobAbort
from ..protocol import keys
from ..protocol.operations import claim
from ..protocol.records import FAULT
from ..settings import as_int, as_timeout
from ..store import BarrierTimeout
from ..wrapper import CallWrapper
from . import folders, runs
from .folders import step_of as step_of

log = logging.getLogger(__name__)

_SEEN_WITHIN = 10.0  # seconds for which a server may keep from a host what another host has written


@dataclasses.dataclass
class _Kept:
    """What a process keeps over iterations.

    Attributes:
        run: the job's part of the folder, with this process's lock.
        iteration: the one in which it was used last.
        named: what was passed over and is not named again.
    """

    run: runs.Run | None = None
    iteration: int = -1
    named: set[Path] = dataclasses.field(default_factory=set)

    def close(self) -> None:
        """Lets go of the lock."""
        if self.run is not None:
            self.run.close()


class Checkpoints:
    """A job's checkpoints in a folder: where to write, which are complete, which one to continue from.

    Make it in the wrapped function in each iteration, on all active ranks; no process group is needed::

        checkpoints = Checkpoints(call_wrapper, "checkpoints")
        if (newest := checkpoints.newest()) is not None:
            load(newest)
        for step in ...:
            save(checkpoints.folder(step))
            checkpoints.seal(step)

    Each iteration writes into its own folder. A checkpoint counts once it is sealed: by `seal`; by the
    ``.metadata`` that ``torch.distributed.checkpoint`` writes last; or because it is a single file, which was
    written beside and renamed.

    Args:
        call_wrapper: what the wrapped function was given.
        root: the folder, made if it is not there. The same on all ranks, and on a file system that all share.
        keep: so many sealed checkpoints stay; `seal` removes older ones.
        timeout: seconds, or a ``timedelta``, for which a rank waits for the others. By default the wrapper's
            ``barrier_timeout``.

    Raises:
        JobAbort: what would come again in each iteration: an argument is not right, another job uses the
            folder, or this iteration has a `Checkpoints` of it already.
        BarrierTimeout: active rank 0 did not come.
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
        with _for_good():
            self.root = _check_arguments(call_wrapper, root)
            self.keep = as_int("keep", keep, at_least=1)
            given = None if timeout is None else as_timeout("timeout", timeout)
        self._call_wrapper = call_wrapper
        call, state = call_wrapper._call, call_wrapper.state
        assert state.active_rank is not None and state.active_world_size is not None, "spares do not run this"
        self._rank, self._size = state.active_rank, state.active_world_size
        self._timeout = timedelta(seconds=call.settings.barrier_timeout) if given is None else given
        self._iteration = call.own.member.view.n
        self._looks = 0
        self._seals = 0
        self._sealed: set[int] = set()  # steps
        name = f"checkpoints in {self.root}"
        if name not in call.kept:
            call.kept[name] = _Kept()
            call.keeps.callback(call.kept[name].close)
        self._kept: _Kept = call.kept[name]
        if self._kept.iteration == self._iteration:
            raise JobAbort(
                f"this iteration has a Checkpoints of root={str(self.root)!r} already; use that one"
            )
        self._kept.iteration = self._iteration
        self._run = self._enter()

    # ---- for users

    def folder(self, step: int) -> Path:
        """Where this iteration writes the checkpoint of a step: the same path on all ranks.

        Creates the parent folder, but not the path itself, because it may also become a single file, which is
        written next to it and then renamed.

        Args:
            step: of the training, from 0.

        Raises:
            TypeError: the step is no whole number.
            ValueError: it is negative, or was sealed in this iteration: what is sealed must not change.
            OSError: the folder above it cannot be made.
        """
        step = as_int("step", step, at_least=0)
        if step in self._sealed:
            raise ValueError(f"step={step} was sealed in this iteration already; save a step once")
        above = folders.iteration_folder(self.root, self._run.number, self._iteration)
        above.mkdir(parents=True, exist_ok=True)
        return above / f"checkpoint-{step}"

    def seal(self, step: int) -> None:
        """Seals the checkpoint of a step once all ranks have written it; then removes old ones.

        All active ranks call it, in their main thread, each after it has written its part. Waits for all.

        Args:
            step: what ``folder`` was called with.

        Raises:
            TypeError: the step is no whole number.
            ValueError: it is negative.
            BarrierTimeout: not all ranks came in time; the message names those that are missing.
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
            path = folders.iteration_folder(self.root, self._run.number, self._iteration)
            with self._call_wrapper.atomic():
                folders.seal(self.root, path / f"checkpoint-{step}")
            store.set(said, "1")
            self._remove_old()
        else:
            self._hear(said, what)
        self._sealed.add(step)

    def newest(self) -> Path | None:
        """The newest sealed checkpoint of all iterations, and of all jobs that used the folder; None: none.

        Active rank 0 looks, and all active ranks get its answer. Needs no process group.

        Raises:
            BarrierTimeout: active rank 0 did not come.
            OSError: this rank does not see what active rank 0 has found.
            RuntimeError: the iteration for which this was made is over.
        """
        self._check_iteration("newest()")
        self._looks += 1
        what = f"newest() in {self.root}"
        said = keys.barrier(f"{what}, look {self._looks}", "found")
        if self._rank == 0:
            path = self._look()
            self._call_wrapper.store.set(said, "" if path is None else str(path.relative_to(self.root)))
            return path
        name = self._hear(said, what)
        if not name:
            return None
        self._see(self.root / name, "has found")
        return self.root / name

    # ---- the job's part of the folder

    def _enter(self) -> runs.Run:
        kept, store = self._kept, self._call_wrapper.store
        said = keys.barrier(f"Checkpoints in {self.root}", "run")
        if self._rank == 0:
            run, job = self._begin()
            store.set(said, f"{run.number} {job}")
            return run
        number, job = self._hear(said, f"Checkpoints in {self.root}").split()
        if kept.run is None or kept.run.number != int(number):
            self._see(self.root / f"run-{number}", "has begun")
            self._keep(lambda: runs.open_run(self.root, int(number), job))
        if kept.run is None or kept.run.number != int(number):
            raise self._not_shared(self.root / f"run-{number}", "has begun")
        return kept.run

    def _begin(self) -> tuple[runs.Run, str]:
        """On active rank 0: finds or begins the job's run, and makes sure that no other job is there."""
        job_store = self._call_wrapper._call.own.member.agreement.store
        folder = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        # Agreed before anything is written: a rank 0 that dies half-way leaves nothing that looks foreign.
        job = claim(job_store, keys.checkpoints(folder), secrets.token_hex(8))
        self.root.mkdir(parents=True, exist_ok=True)
        run = self._kept.run
        if run is None or not (self.root / f"run-{run.number}").is_dir():
            run = self._keep(lambda: runs.find(self.root, job) or runs.begin(self.root, job))
        assert run is not None
        try:
            runs.check_alone(run, job, self._timeout.total_seconds())
        except runs.InUse as error:
            run.withdraw()
            raise JobAbort(f"Checkpoints: {error}") from None
        return run, job

    def _keep(self, opened: Callable[[], runs.Run | None]) -> runs.Run | None:
        """Opens a run in the place of the one that is kept; no interrupt loses its descriptor."""
        with self._call_wrapper.atomic():
            self._kept.close()
            self._kept.run = opened()
        return self._kept.run

    # ---- what is in it

    def _look(self) -> Path | None:
        found = folders.look(self.root)
        sealed = found.sealed
        for path, why in {**found.others, **{e.path: e.lacks for e in found.entries if e.lacks}}.items():
            if path not in self._kept.named:
                self._kept.named.add(path)
                log.debug("checkpoints: %s is passed over: %s", path, why)
        if sealed:
            log.info("checkpoints: goes on from %s", sealed[0].path)
            return sealed[0].path
        torn = len(found.entries)
        level = logging.WARNING if torn else logging.INFO
        more = f"; {torn} without a seal passed over" if torn else ""
        log.log(level, "checkpoints: none is sealed in %s, starts from the beginning%s", self.root, more)
        return None

    def _remove_old(self) -> None:
        """What fails to go is said, and tried again at the next seal."""
        ends = self._call_wrapper._call.own.member.agreement.ends
        # Seen after the seal: each later iteration, however late this goes on, looks when that is there. So
        # what is older than that is not being read.
        if ends.outcome_of(self._iteration) == FAULT:
            return
        run, only = self._run.number, not self._run.is_locked
        found = folders.look(self.root)
        old = folders.too_many(found, self.keep, run, self._iteration, own_run_only=only)
        for path in [*found.removed, *old]:
            try:
                folders.remove(path)
            except OSError as error:
                log.warning("checkpoints: cannot remove %s: %s", path, error)
        folders.remove_empty(self.root, run, self._iteration, own_run_only=only)

    # ---- other ranks

    def _hear(self, key: str, what: str) -> str:
        """What active rank 0 says."""
        store = self._call_wrapper.store
        try:
            store.wait([key], self._timeout)
        except DistStoreError:
            raise BarrierTimeout(
                f"{what}: timed out after {self._timeout}: missing ranks [0] of {self._size}"
            ) from None
        return store.get(key).decode()

    def _see(self, path: Path, how: str) -> None:
        for _ in runs.tries(_SEEN_WITHIN):
            if path.exists():
                return
        raise self._not_shared(path, how)

    def _not_shared(self, path: Path, how: str) -> OSError:
        return FileNotFoundError(
            f"active rank {self._rank} does not see {path}, which active rank 0 {how}: "
            f"root={str(self.root)!r} must be a folder that all nodes share"
        )

    def _check_iteration(self, what: str) -> None:
        own = self._call_wrapper._call.own
        if not own.interrupter.is_running or own.member.view.n != self._iteration:
            raise RuntimeError(
                f"{what} of a Checkpoints of another iteration, or outside of the wrapped function: make one "
                "in the function, in each iteration"
            )


@contextlib.contextmanager
def _for_good() -> Iterator[None]:
    """Ends the call where an error would come again in each iteration."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise JobAbort(f"Checkpoints: {error}") from error


def _check_arguments(call_wrapper: object, root: object) -> Path:
    if not isinstance(call_wrapper, CallWrapper):
        raise TypeError(
            f"call_wrapper={call_wrapper!r} must be the CallWrapper that the wrapped function is given: "
            "def train(call_wrapper: CallWrapper = None)"
        )
    if not isinstance(root, (str, os.PathLike)) or not isinstance(os.fspath(root), str):
        raise TypeError(f"root={root!r} must be a path: a str or a pathlib.Path")
    if not os.fspath(root):
        raise ValueError("root='' must name a folder")
    path = Path(os.path.abspath(root))
    if path.exists() and not path.is_dir():
        raise ValueError(f"root={os.fspath(root)!r} is no folder; name one, which need not be there yet")
    return path
