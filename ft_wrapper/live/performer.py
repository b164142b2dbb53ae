"""Carries out what a course asks for, with tensors and the iteration's process group."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from ..exception import JobAbort
from ..protocol import keys
from ..restart.call import Call
from ..store.address import own_address
from . import checks
from .ballot import Address, Ballot
from .buddies import Buddies, Copies, own_node, pack
from .buffers import Buffers
from .commit import Kept, Performer
from .data_parallel import DataParallel
from .form import Form, Objects, Replicated, modules, optimizers
from .plan import Copy, Held, Holding, Plan, Register, Route, Rung
from .transfer import move
from .tree import checksum, flatten, unflatten

log = logging.getLogger(__name__)


class TorchKept(Kept):
    """What a process keeps.

    Attributes:
        buffers: copies of what a forward pass may change.
        copies: of shards, in host memory.
        data_parallel: DDP objects.
        modes: all modules, and whether each was in training when it was built.
        iteration: the one in which it was used last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffers = Buffers()
        self.copies = Copies()
        self.data_parallel = DataParallel()
        self.modes: list[tuple[torch.nn.Module, bool]] = []
        self.iteration = -1


@dataclasses.dataclass(frozen=True)
class Users:
    """What the user has passed.

    Args:
        build: makes the objects; the form calls it.
        restore: loads a checkpoint and returns its step; None: there are none.
        update: turns gradients into the next state.
        seed: makes random numbers depend on its arguments; does nothing without a seed.
    """

    build: Callable[[], Objects]
    restore: Callable[[Objects], int] | None
    update: Callable[..., object]
    seed: Callable[..., None]


@dataclasses.dataclass(frozen=True)
class _About:
    """What a rank says of itself, beside what it holds.

    Args:
        node: where it runs.
        digest: of what it has built.
        votes_at: where it listens for votes.
    """

    node: str
    digest: str
    votes_at: Address


def default_update(objects: Objects, *_arguments: object) -> None:
    """Steps all optimizers, through a ``GradScaler`` if there is one, then all schedulers.

    Args:
        objects: what ``build`` returned.
    """
    scaler = scaler_of(objects)
    for _, optimizer in optimizers(objects):
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    for value in objects.values():
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            value.step()


def scaler_of(objects: Objects) -> torch.amp.GradScaler | None:
    """The ``GradScaler`` among the objects, if there is one."""
    return next((value for value in objects.values() if isinstance(value, torch.amp.GradScaler)), None)


class TorchPerformer(Performer):
    """What a course needs, in one iteration of a job.

    Args:
        call: the wrapped call.
        name: of the state.
        kept: what the process keeps of it.
        form: how it is built and taken apart.
        users: what the user has passed.
        settings: what must be the same on all ranks, by argument.
    """

    def __init__(
        self, call: Call, name: str, kept: TorchKept, form: Form, users: Users, settings: dict[str, Any]
    ) -> None:
        self.rank = dist.get_rank()
        self._call = call
        self._key = keys.live(name)
        self._kept = kept
        self._form = form
        self._users = users
        self._settings = settings
        self._group = _host_group()
        self._host = own_address(os.environ["MASTER_ADDR"])
        self._ballot = Ballot(self.rank, self._host, call.settings.hard_timeout)
        call.own.lines.append(self._ballot)
        self._nodes: list[str] = []
        self._register = ""  # as rank 0 has read it
        self._buddies: Buddies | None = None

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        """See `Performer`."""
        return self._call.own.interrupter.atomic()

    # ---- a step

    def make_ready(self) -> None:
        """See `Performer`: before the step behind that of a copy, the copy is with the buddies.

        Otherwise more steps than come between two copies could be lost.
        """
        if self._buddies is not None:
            self._buddies.await_sent()
        self._kept.buffers.share()
        self._agree_on_infinities()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()  # what an abort ends early leaves garbage behind

    def vote(self, step: int) -> None:
        """See `Performer`."""
        stored = -1 if self._buddies is None else self._buddies.stored
        low, high, stored = self._ballot.vote((step, -step, stored))
        if low != -high:
            raise RuntimeError(
                f"the ranks do not do the same steps: one is at step {low}, another at {-high}"
            )
        self._kept.copies.drop_older(stored)

    def update(self, step: int, arguments: tuple[Any, ...]) -> None:
        """See `Performer`."""
        self._users.seed("update", step)
        self._users.update(self._kept.objects, *arguments)
        self._kept.buffers.keep()

    def committed(self, held: Held, rolled: bool) -> None:
        """See `Performer`."""
        self._emit("committed", step=held.step, rolled=rolled)

    def _agree_on_infinities(self) -> None:
        """With shards of gradients, a scaler that sees an overflow in one of them skips the step in all."""
        scaler = scaler_of(self._kept.objects)
        if scaler is None or isinstance(self._form, Replicated) or not scaler.is_enabled():
            return
        found: list[torch.Tensor] = []
        for _, optimizer in optimizers(self._kept.objects):
            if not scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
                scaler.unscale_(optimizer)
            found += scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        either = torch.stack([each.cpu() for each in found]).amax().reshape(1)
        dist.all_reduce(either, dist.ReduceOp.MAX, self._group)
        for each in found:
            each.fill_(either.item())

    # ---- a recovery

    def build(self) -> None:
        """See `Performer`."""
        self._kept.objects = None
        self._users.seed("build")
        objects = self._form.build()
        try:
            checks.check_built(objects, self._form, has_update=self._users.update is not default_update)
        except (TypeError, ValueError) as error:
            raise JobAbort(f"LiveState: {error}") from error
        self._kept.buffers.forget()
        self._kept.buffers.watch(objects)
        self._kept.modes = [(part, part.training) for _, one in modules(objects) for part in one.modules()]
        self._kept.objects = objects

    def gather(self, mine: Holding) -> tuple[list[Holding], Register]:
        """See `Performer`."""
        outline = checks.outline(self._kept.objects, self._form, self._users.update, self._settings)
        register = self._read_register() if self.rank == 0 else Register()
        about = _About(own_node(), checks.digest_of(outline), self._ballot.address)
        said: list[tuple[Holding, Register, _About]] = self._gather((mine, register, about))
        if len({its.digest for _, _, its in said}) > 1:
            difference = checks.first_difference(self._gather(outline))
            raise JobAbort(f"the ranks do not build the same state: {difference}")
        self._nodes = [its.node for _, _, its in said]
        self._ballot.open([its.votes_at for _, _, its in said])
        return [holding for holding, _, _ in said], said[0][1]

    def copies(self) -> tuple[Copy, ...]:
        """See `Performer`."""
        return self._kept.copies.known()

    def drop_step(self) -> None:
        """See `Performer`."""
        objects = self._kept.objects
        for _, module in modules(objects):
            for parameter in module.parameters():
                parameter.grad = None
        for _, parameter in self._form.parameters(objects):
            parameter.grad = None
        for _, optimizer in optimizers(objects):
            optimizer.zero_grad()
        scaler = scaler_of(objects)
        if scaler is not None:
            scaler._per_optimizer_states.clear()  # half an unscale
        for part, is_training in self._kept.modes:
            part.training = is_training
        self._kept.buffers.put_back()

    def move(self, plan: Plan) -> Any:
        """See `Performer`."""
        return self._move(plan.routes, lambda: self._form.export(self._kept.objects))

    def take_copies(self, plan: Plan) -> Any:
        """See `Performer`: a move for each shard, since a rank may have copies of several."""
        copies, own = self._kept.copies, self._form.shard
        shards = dict(enumerate(self._gather(own)))
        state = None
        for shard in dict.fromkeys(shards.values()):
            routes = tuple(route for route in plan.routes if shards[route.receiver] == shard)
            received = self._move(routes, functools.partial(copies.state, shard, plan.step))
            state = received if shard == own else state
        if state is None:  # the copy stays what it is, whatever the next update does
            state = unflatten(pack(Copy(own, plan.step, frozenset()), copies.state(own, plan.step)).flat)
        return state

    def _move(self, routes: tuple[Route, ...], source: Callable[[], Any]) -> Any:
        timeout = self._call.settings.soft_timeout / 2
        moved = move(routes, self.rank, source, self._gather, host=self._host, timeout=timeout)
        if moved.bytes:
            event = "sent" if moved.state is None else "received"
            self._emit(event, bytes=moved.bytes, seconds=moved.seconds)
        return moved.state

    def rebind(self) -> None:
        """See `Performer`."""
        self._kept.objects = self._form.rebind(self._kept.objects)
        self._kept.buffers.watch(self._kept.objects)

    def adopt(self, received: Any) -> None:
        """See `Performer`."""
        self._kept.buffers.forget()
        self._kept.objects = self._form.adopt(self._kept.objects, received)
        self._kept.buffers.watch(self._kept.objects)
        self._kept.buffers.keep()  # here, too: a survivor adopts another shard after it has finished

    def restore(self) -> int:
        """See `Performer`."""
        step = 0 if self._users.restore is None else self._users.restore(self._kept.objects)
        is_step = isinstance(step, int) and not isinstance(step, bool) and step >= 0
        said = self._gather(step if is_step else repr(step))
        if not is_step:
            raise JobAbort(f"restore() returned {step!r}; it must return the checkpoint's step, 0 for none")
        if len(set(said)) > 1:
            steps = ", ".join(f"{one} on active rank {rank}" for rank, one in enumerate(said))
            raise JobAbort(f"restore() returned different steps: {steps}; load the same checkpoint on all")
        return step

    def equalize(self) -> None:
        """See `Performer`: the first rank of each shard gives its state to the others, where they differ."""
        shards = self._gather((self._form.shard, self._checksum()))
        first: dict[Hashable, tuple[int, int]] = {}
        routes = []
        for rank, (shard, number) in enumerate(shards):
            giver, its = first.setdefault(shard, (rank, number))
            if number != its:
                routes.append(Route(rank, (giver,)))
        received = self._move(tuple(routes), lambda: self._form.export(self._kept.objects))
        if received is not None:
            self.adopt(received)

    def differing(self, shard: Hashable) -> frozenset[int]:
        """See `Performer`."""
        said: list[tuple[Hashable, int]] = self._gather((shard, self._checksum()))
        wrong = set()
        for rank, (name, number) in enumerate(said):
            numbers = [other for its, other in said if its == name]
            if 2 * numbers.count(number) <= len(numbers) != 1:
                wrong.add(rank)
        return frozenset(wrong)

    def finish(self, plan: Plan, number: int) -> None:
        """See `Performer`."""
        self._kept.buffers.keep()
        if plan.rung is Rung.COPIES:
            self._kept.copies.label(plan, number)

    def seal(self, plan: Plan, register: Register) -> None:
        """See `Performer`."""
        if self.rank == 0:
            with self.atomic():
                # Not set: a rank 0 that was paused, and went on long after it was evicted, writes nothing.
                now = f"{register.sealed} {register.origin}"
                self._call.own.member.agreement.store.compare_set(self._key, self._register, now)
        self._kept.copies.drop_given_up(register.origin, plan.step)

    # ---- copies in host memory

    def start_buddies(self, buddies: int) -> None:
        """Begins to exchange copies; collective. It ends with the iteration.

        Args:
            buddies: how many ranks have a copy of each shard.
        """
        if len(self._nodes) > 1:
            self._buddies = Buddies(self._kept.copies, self._nodes, buddies)
            self._call.helpers.callback(self._buddies.close)

    def send_copy(self) -> None:
        """Copies the shard, and sends it to the buddies in the background."""
        held = self._kept.held
        if self._buddies is not None and held is not None:
            copy = Copy(held.shard, held.step, frozenset({held.origin}))
            self._buddies.send(pack(copy, self._form.export(self._kept.objects)))

    def _read_register(self) -> Register:
        store = self._call.own.member.agreement.store
        with self.atomic():
            self._register = store.get(self._key).decode() if store.check([self._key]) else ""
        return Register(*map(int, self._register.split()))

    def _gather(self, mine: Any) -> list[Any]:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine, self._group)
        return said

    def _checksum(self) -> int:
        return checksum(flatten(self._form.export(self._kept.objects)).tensors)

    def _emit(self, event: str, **fields: Any) -> None:
        self._call.own.member.emit(event, **fields)


def _host_group() -> Any:
    """A group of all active ranks whose collectives are of host memory, and end on the host.

    Made for this iteration where the default group cannot do that: NCCL's votes end on the device.
    """
    config = dist.get_backend_config()
    on_host = dict(part.split(":") for part in config.split(",")).get("cpu") if ":" in config else config
    return dist.group.WORLD if on_host in ("gloo", "mpi") else dist.new_group(backend="gloo")
