"""What users see of live state: `LiveState`."""

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._text import duration, plural
from ..exception import JobAbort, for_good
from ..settings import as_int, as_limit, check_callable
from ..wrapper import CallWrapper
from . import checks
from .commit import Course
from .data import endless, seed_all
from .performer import TorchKept, TorchPerformer, Users, data_parallel, default_update
from .plan import Plan, Rung
from .state import Form, Objects, Sharded, has_gradient, optimizers

log = logging.getLogger(__name__)


class LiveState:
    """A training state that survives restarts in the processes that hold it.

    Make it in the wrapped function in each iteration, after the process group. The first time it builds the
    state. After a fault the survivors keep theirs, a new process receives the state from a living peer, and
    all ranks continue after the last committed step. No step is lost or done twice as long as each shard of
    the state has a living holder::

        live = LiveState(call_wrapper, build, seed=0)
        ddp = live.data_parallel()
        for step in live.steps(1000):
            live["optimizer"].zero_grad()
            loss_of(ddp, batch(step)).backward()
            live.commit()

    Args:
        call_wrapper: what the wrapped function was given.
        build: makes the state: a dict of objects with ``state_dict`` and ``load_state_dict``, by name, such
            as the model, optimizers, schedulers, a ``GradScaler``. The same on all ranks.
        restore: loads the newest checkpoint into such a dict, and returns its step; 0 if there is none. All
            active ranks call it: the first time, and when a shard of the state has no living holder.
        update: turns gradients into the next state, without collectives. Called with the dict and the
            arguments of ``commit``. By default all optimizers step, through the ``GradScaler`` if ``build``
            returned one, then all schedulers.
        seed: makes all random numbers of a step depend only on this, the step and the rank.
        mesh: of this iteration, if ``build`` shards the modules on it by ``fully_shard``. The last dimension
            shards; the one before it, if there is one, replicates.
        buddies: how many other ranks keep a copy of each shard in host memory, on other nodes if there are
            any; its own rank keeps one, too. If a shard has no living holder, all ranks go back to the newest
            step for which a copy of every shard survives.
        copy_every: steps between two copies; by default 50.
        verify_every: compares the replicas' states after this many steps; None: only after transfers.
        name: distinguishes several states of a wrapped call.
        on_notice: saves a checkpoint when there may not be much time left. Called with the dict and the
            number of committed steps, on all active ranks behind the same commit, once for each
            `CallWrapper.notice`; again if a fault came before all had returned.

    Raises:
        JobAbort: an error that would come back in each iteration: a wrong argument, a wrong result of
            ``build``, no process group of all active ranks, or ranks that build different states; the
            message names the first difference.
    """

    def __init__(
        self,
        call_wrapper: CallWrapper,
        build: Callable[[], Objects],
        *,
        restore: Callable[[Objects], int] | None = None,
        update: Callable[..., object] | None = None,
        seed: int | None = None,
        mesh: Any = None,
        buddies: int = 0,
        copy_every: int | None = None,
        verify_every: int | None = None,
        name: str = "state",
        on_notice: Callable[[Objects, int], object] | None = None,
    ) -> None:
        began = time.monotonic()
        with for_good("LiveState"):
            _check(call_wrapper, build, restore, update, on_notice, name)
            self._seed = as_limit("seed", seed, at_least=0)
            self._seed_by = functools.partial(seed_all, self._seed)
            self._verify_every = as_limit("verify_every", verify_every, at_least=1)
            self._buddies = as_int("buddies", buddies, at_least=0)
            self._copy_every = copy_every = as_limit("copy_every", copy_every, at_least=1) or 50
            self._form = form = Form(build) if mesh is None else Sharded(build, mesh)
        _check_group(call_wrapper)
        if dist.get_rank() == 0 and (others := dist.get_world_size() - 1) < self._buddies:
            # No error: the job may have lost the other ranks.
            log.warning("live state: buddies=%d, but there are %d other ranks", buddies, others)
        self._call_wrapper, self._services = call_wrapper, (services := call_wrapper.services)
        self._iteration = services.iteration
        self._kept: TorchKept = services.tracker.exempt(services.kept.setdefault(name, TorchKept()))
        if self._kept.iteration == self._iteration:
            raise JobAbort(f"name={name!r}: there is a LiveState of this name already; use another one")
        self._kept.iteration = self._iteration
        settings = {"seed": seed, "buddies": buddies, "copy_every": copy_every, "verify_every": verify_every}
        settings["on_notice"] = on_notice is not None
        users = Users(restore, default_update if update is None else update, self._seed_by, settings)
        self._performer = performer = TorchPerformer(services, name, self._kept, form, users)
        self._course = Course(self._kept, performer, self._iteration)
        self._open: int | None = None  # the step that was begun
        self._has_default_update, self._on_notice = update is None, on_notice
        self.plan = self._course.recover(form.shard)
        if self._buddies:
            performer.start_buddies(self._buddies, copy_every)
        self._marks = checks.Marks(self._kept.shapes)
        if performer.rank == 0:
            _report(self.plan, time.monotonic() - began)

    def __getitem__(self, name: str) -> Any:
        """An object that ``build`` returned.

        Raises:
            KeyError: it returned none of this name.
        """
        if name not in self._kept.objects:
            raise KeyError(f"{name!r}: build() returned {', '.join(map(repr, self._kept.objects))}")
        return self._kept.objects[name]

    def data_parallel(self, name: str = "model", **options: Any) -> DistributedDataParallel:
        """A module of the state in ``DistributedDataParallel``, over the default process group.

        With ``Limits(keep_groups=True)``, `CallWrapper.process_group` and ``find_unused_parameters=True`` it
        is made once in a process; later iterations use the same object, with their new peers. Otherwise each
        iteration makes a new one.

        Args:
            name: of the module.
            options: for ``DistributedDataParallel``. ``init_sync`` is False here, where torch has it: the
                state is the same on all ranks already.

        Raises:
            KeyError: ``build`` returned none of this name.
            TypeError: it is no module, or the state is in shards.
        """
        module = self[name]
        if not isinstance(module, nn.Module) or self._form.is_sharded:
            kind = f"{type(module).__name__}{' in shards' * self._form.is_sharded}"
            raise TypeError(f"data_parallel({name!r}) takes a module of a state without mesh=, not {kind}")
        return data_parallel(self._kept, name, module, options, self._services.group.group)

    @property
    def step(self) -> int:
        """The number of committed steps, which is the number of the current or next step."""
        return self._kept.newest

    def steps(self, total: int) -> Iterator[int]:
        """Iterates over the remaining steps, from `step` on. Each must end with `commit`.

        At the beginning of each step it reports the step and progress (``call_wrapper.ping``), and seeds if
        there is a ``seed``.

        Args:
            total: the total number of steps.

        Raises:
            JobAbort: a step ended without `commit`.
        """
        return (step for step, _ in self._loop("steps()", as_int("total", total, at_least=0), None))

    def batches(self, loader: Iterable[Any], steps: int | None = None) -> Iterator[tuple[int, Any]]:
        """Iterates over the remaining steps, as `steps` does, each with its batch: the same after a fault.

        Step ``s`` has batch ``s % len(loader)`` of epoch ``s // len(loader)``. The epoch is set on every part
        of the loader that has a ``set_epoch``: itself, its samplers, the dataset. Batches of earlier steps
        are not loaded if it is a ``DataLoader`` of a dataset with indices; of an ``IterableDataset``, and of
        other iterables that have a length, they are loaded again and dropped.

        With ``seed=`` samplers draw by the seed and the epoch, the same on all ranks; a
        ``DistributedSampler`` gives each rank its share. What a dataset and ``collate_fn`` draw from
        ``random``, numpy and torch depends on the seed, the epoch and the sample's place in it, not on
        workers. Without ``seed=`` nothing is seeded: a sampler without a seed of its own has another order
        after a fault, so the rest of an epoch repeats some samples and leaves others out.

        A ``DataLoader`` is not iterated itself, but a copy with workers of its own, which end with the loop.

        Args:
            loader: of this rank's batches.
            steps: the total number of steps; None: there is no end.

        Raises:
            JobAbort: the loader has no length, an epoch has another number of batches, or a step ended
                without `commit`.
        """
        return self._loop("batches()", as_limit("steps", steps, at_least=0), loader)

    def _loop(self, what: str, total: int | None, loader: Iterable[Any] | None) -> Iterator[tuple[int, Any]]:
        self._kept.buffers.put_back(self._kept.objects)  # a warm-up pass since the recovery is no step
        self._marks.set(self._form.parameters(self._kept.objects))
        data: Generator[Any, None, None] = (None for _ in itertools.count())
        if loader is not None:
            data = endless(loader, self._seed, self.step, dist.get_rank(), dist.get_world_size())
        with contextlib.closing(data):
            while total is None or self.step < total:
                step = self.step
                self._services.check_iteration(self._iteration, f"{what} of a LiveState")
                self._call_wrapper.ping(step)
                batch = next(data)  # before the seed: what a loader draws does not move a step's numbers
                self._seed_by(step, dist.get_rank())
                self._open = step
                yield step, batch
                if self._open is not None:
                    raise JobAbort(f"step {step} ended without commit(); call it once in each step")

    def commit(self, *arguments: Any, **keywords: Any) -> None:
        """Applies the gradients, in place of ``optimizer.step()``: on all active ranks, or on none.

        Call it after everything that talks to other ranks, such as clipping. When it returns, the state is
        that of the next step. If a fault keeps it from returning, the recovery either applies the step on all
        ranks or starts it again on all.

        Args:
            arguments: for ``update``, after the objects.
            keywords: for ``update``, by name.

        Raises:
            JobAbort: there is nothing to commit (outside a step, twice in a step, or without a gradient), or
                something else has changed a parameter since the last commit.
            RuntimeError: it is of another iteration.
        """
        self._check_commit()
        self._open = None
        self._course.commit((arguments, keywords))
        if self._buddies and self.step % self._copy_every == 0:
            self._performer.send_copy()
        if self._verify_every and self.step % self._verify_every == 0:
            self._course.compare()
        self._marks.set(self._form.parameters(self._kept.objects))
        if self._performer.has_notice and (notice := self._performer.see_notice()) and self._on_notice:
            self._on_notice(self._kept.objects, self.step)
            self._performer.saving.add(notice.id)

    def _check_commit(self) -> None:
        self._services.check_iteration(self._iteration, "commit() of a LiveState")
        if self._open is None:
            raise JobAbort("commit() belongs in a step of `for step in live.steps(n)`, once in each")
        parameters = self._form.parameters(self._kept.objects)
        if wrong := self._marks.changed(parameters) or checks.strangers(self._kept.objects, parameters):
            raise JobAbort(f"step {self._open}: {wrong}")
        steps = [optimizer for _, optimizer in optimizers(self._kept.objects)]
        if self._has_default_update and steps and not any(map(has_gradient, steps)):
            raise JobAbort(f"step {self._open}: no parameter of any optimizer has a gradient in commit()")


def _check(call_wrapper: Any, build: Any, restore: Any, update: Any, on_notice: Any, name: Any) -> None:
    if not isinstance(call_wrapper, CallWrapper):
        raise TypeError(f"call_wrapper={call_wrapper!r} must be the CallWrapper that the function is given")
    check_callable("build", build, 'lambda: {"model": model, "optimizer": optimizer}')
    if restore is not None:
        check_callable("restore", restore, "def restore(objects): ...; return step")
    if update is not None:
        check_callable("update", update, "def update(objects): objects['optimizer'].step()")
    if on_notice is not None:
        check_callable("on_notice", on_notice, "def save(objects, step): ...")
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"name={name!r} must be a string that is not empty and has no '/'")


def _check_group(call_wrapper: CallWrapper) -> None:
    size, active = dist.is_initialized() and dist.get_world_size(), call_wrapper.state.active_world_size
    if size != active:
        raise JobAbort(f"LiveState needs init_process_group() of {active} active ranks, not {size or 0}")


def _report(plan: Plan, seconds: float) -> None:
    """The line of a recovery, on active rank 0, next to the restart's."""
    if plan.rung is Rung.CHECKPOINT and plan.lost == 0 and not plan.void:
        log.info("live state: starts at step %d, after %s", plan.step, duration(seconds))
        return
    unknown = "the steps behind it are lost: no rank is left that had them"
    lost = unknown if plan.lost is None else f"{plan.lost} {plural(plan.lost, 'step')} lost"
    parts = [f"goes on at step {plan.step} from {plan.rung.value}", lost]
    if plan.rolls:
        parts.append(f"{_ranks(plan.rolls)} rolled forward")
    if plan.routes:
        parts.append(f"{_ranks([route.receiver for route in plan.routes])} received")
    if plan.missing:
        parts.append(f"no living holder of {', '.join(map(str, plan.missing))}")
    log.warning("live state: %s, after %s", "; ".join(parts), duration(seconds))


def _ranks(ranks: Collection[int]) -> str:
    return f"active {plural(len(ranks), 'rank')} {', '.join(map(str, sorted(ranks)))}"
