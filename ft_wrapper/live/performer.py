"""Carries out what a course asks for, on tensors, through the iteration's process group."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..exception import JobAbort, for_good
from ..protocol import keys
from ..protocol.notice import Notice
from ..protocol.operations import CompareAndSet, SetIfAbsent, read
from ..restart.resources import Services
from ..store.address import own_address
from . import checks
from .buffers import Buffers
from .commit import Kept, Performer
from .copies import Buddies, Copies, Packed, in_host_memory, own_node
from .plan import Copy, Holding, Plan, Register, Route, Rung, holding_of
from .state import Form, Objects, has_gradient, optimizers, parts
from .tree import Flat, checksum, named
from .wire import Ballot, Gather, move, unsigned

log = logging.getLogger(__name__)


class TorchKept(Kept):
    """What a process keeps.

    Attributes:
        buffers: copies of those that a forward pass may change.
        copies: of shards, in host memory.
        data_parallel: DDP objects, with their options, by the names of their modules.
        modes: whether each module was in training when it was built, by name.
        built: what was built, which must be the same on all ranks.
        shapes: of the parameters that were built, by name.
        saved: ids of notices for which all active ranks have saved.
        iteration: the one in which it was used last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffers = Buffers()
        self.copies = Copies()
        self.data_parallel: dict[str, tuple[DistributedDataParallel, dict[str, Any]]] = {}
        self.modes: dict[str, bool] = {}
        self.built: checks.Outline = ()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.saved: set[str] = set()
        self.iteration = -1


@dataclasses.dataclass(frozen=True)
class Users:
    """What the user has passed.

    Args:
        restore: loads a checkpoint and returns its step; None: there are none.
        update: turns gradients into the next state.
        seed: makes random numbers depend on its arguments; does nothing without a seed.
        settings: what must be the same on all ranks, by argument.
    """

    restore: Callable[[Objects], int] | None
    update: Callable[..., object]
    seed: Callable[..., None]
    settings: dict[str, Any]


def default_update(objects: Objects, *_arguments: object, **_keywords: object) -> None:
    """Steps optimizers that have gradients, through a ``GradScaler`` if there is one, then all schedulers.

    Args:
        objects: what ``build`` returned.
    """
    scaler = scaler_of(objects)
    steps = [optimizer for _, optimizer in optimizers(objects) if has_gradient(optimizer)]
    for optimizer in steps:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None and steps:
        scaler.update()
    for value in objects.values():
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            value.step()


def scaler_of(objects: Objects) -> torch.amp.GradScaler | None:
    """The ``GradScaler`` among the objects, if there is one that is enabled."""
    scalers = (value for value in objects.values() if isinstance(value, torch.amp.GradScaler))
    return next((scaler for scaler in scalers if scaler.is_enabled()), None)


class TorchPerformer(Performer):
    """What a course needs, in one iteration of a job.

    Args:
        services: of the call.
        name: of the state.
        kept: what the process keeps of it.
        form: how it is built and taken apart.
        users: what the user has passed.

    Attributes:
        has_notice: whether, by the last vote, some rank has a notice that is new here.
        saving: ids of the notices for which this rank has saved since the last vote.
    """

    def __init__(self, services: Services, name: str, kept: TorchKept, form: Form, users: Users) -> None:
        self.rank = dist.get_rank()
        self._services = services
        self._key = keys.live(name)
        self._kept = kept
        self._form = form
        self._users = users
        self._group = _host_group()
        self._host = own_address(os.environ["MASTER_ADDR"])
        seal = services.store.seal
        about = f"live {services.iteration} {name}"
        self._sign = unsigned if seal is None else lambda what, said: seal.sign(f"{about} {what}", said)
        self._gather = Gather(self._sign, self._group)
        self._ballot = Ballot(self.rank, self._host, services.settings.longest_stretch, self._sign)
        services.at_end.callback(services.end_fields.clear)
        services.connections.append(self._ballot)
        self._nodes: Sequence[str] = ()
        self._register = ""  # as rank 0 has read it
        self._buddies: Buddies | None = None
        services.notices.rides, self.has_notice = True, False
        self.saving, self._seen = set[str](), list[Notice]()

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        """See `Performer`."""
        return self._services.atomic()

    # ---- a step

    def make_ready(self) -> None:
        """See `Performer`: before the step behind that of a copy, the copy is with the buddies.

        Otherwise more steps than come between two copies could be lost.
        """
        if self._buddies is not None:
            self._buddies.await_sent()
        objects, buffers = self._kept.objects, self._kept.buffers
        buffers.look(objects)
        if odd := [name for name in buffers.odd if name.rpartition(".")[0] not in self._kept.modes]:
            raise JobAbort(f"buffer {odd[0]!r} is in a module that build() did not make; make it there")
        if len(self._nodes) > 1:
            buffers.share(objects, self._tell, self._group, self._sign)
        self._agree_on_infinities()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()  # what an abort ends early leaves garbage behind

    def _tell(self, said: bytes) -> bytes:
        with self._services.voting:
            return self._ballot.tell(said)

    def vote(self, step: int) -> None:
        """See `Performer`."""
        stored = -1 if self._buddies is None else self._buddies.stored
        mine = self._services.notices.new(self._seen)
        with self._services.voting:
            low, high, stored, notice = self._ballot.vote((step, -step, stored, -(mine is not None)))
        if low != -high:
            raise RuntimeError(f"the ranks do not do the same steps: one is at {low}, another at {-high}")
        self._kept.copies.drop_older(stored)
        self.has_notice = notice < 0
        self._kept.saved |= self.saving  # all ranks have come here, so all have saved
        self.saving.clear()

    def see_notice(self) -> Notice | None:
        """All active ranks see the first notice that is new; collective, behind a vote that says so.

        Returns:
            The notice, if it is to be saved for: not if that was done before a restart.
        """
        mine, saved = self._services.notices.new(self._seen), self._kept.saved
        texts, all_saved = zip(*self._gather((mine and mine.to_json(), saved)), strict=True)
        notice = Notice.from_json(next(filter(None, texts)), "notice")
        saved.update(*all_saved)
        self._seen.append(notice)
        self._services.notices.see(notice)
        return None if notice.id in saved else notice

    def update(self, step: int, arguments: tuple[Any, ...]) -> None:
        """See `Performer`."""
        self._users.seed("update", step)
        self._users.update(self._kept.objects, *arguments[0], **arguments[1])
        self._kept.buffers.keep(self._kept.objects)
        fields = self._services.end_fields  # shared with the other states of the call
        fields["committed"] = max(step + 1, fields.get("committed", 0))

    def _agree_on_infinities(self) -> None:
        """With shards of gradients, a scaler that sees an overflow in one of them skips the step in all."""
        scaler = scaler_of(self._kept.objects)
        if scaler is None or not self._form.is_sharded:
            return
        found: list[torch.Tensor] = []
        for _, optimizer in optimizers(self._kept.objects):
            if not has_gradient(optimizer):
                continue
            if not scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
                scaler.unscale_(optimizer)
            found += scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        either = torch.tensor(max((each.item() for each in found), default=0.0))
        dist.all_reduce(either, dist.ReduceOp.MAX, self._group)
        for each in found:
            each.fill_(either.item())

    # ---- a recovery

    def build(self) -> None:
        """See `Performer`."""
        kept = self._kept
        kept.objects = None
        self._users.seed("build")
        objects = self._form.build()
        with for_good("LiveState"):
            checks.check_built(objects, self._form, has_update=self._users.update is not default_update)
        kept.buffers = Buffers()
        kept.modes = {name: part.training for name, part in parts(objects)}
        kept.built = checks.outline(objects, self._form)
        kept.shapes = {name: tuple(each.shape) for name, each in self._form.parameters(objects).items()}
        kept.objects = objects

    def gather(self, mine: Holding) -> tuple[list[Holding], Register]:
        """See `Performer`."""
        outline = checks.outline_of_arguments(self._users.update, self._users.settings) + self._kept.built
        register = self._read_register() if self.rank == 0 else Register()
        about = own_node(), self._ballot.address, checks.digest_of(outline)
        own = dataclasses.asdict(mine), dataclasses.astuple(register), *about
        holdings, registers, self._nodes, addresses, digests = zip(*self._gather(own), strict=True)
        if len({*digests}) > 1:
            difference = checks.first_difference(self._gather(outline))
            raise JobAbort(f"the ranks do not build the same state: {difference}")
        self._ballot.open(addresses)
        held = [*map(holding_of, holdings)]
        self._services.memory.is_only_holder = sum(one.needs == mine.needs for one in held) == 1
        return held, Register(*registers[0])

    def copies(self) -> tuple[Copy, ...]:
        """See `Performer`."""
        return self._kept.copies.known()

    def drop_step(self) -> None:
        """See `Performer`."""
        objects = self._kept.objects
        for value in objects.values():
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                value.zero_grad()
        for parameter in self._form.parameters(objects).values():
            parameter.grad = None
        if scaler := scaler_of(objects):
            scaler._per_optimizer_states.clear()  # half an unscale
        for name, part in parts(objects):
            part.training = self._kept.modes.get(name, part.training)
        self._kept.buffers.put_back(objects, self._kept.modes)

    def move(self, plan: Plan) -> Any:
        """See `Performer`."""
        return self._move(plan.routes, lambda: self._form.export(self._kept.objects))

    def take_copies(self, plan: Plan) -> Any:
        """See `Performer`: a move for each shard, since a rank may have copies of several."""
        copies, own = self._kept.copies, self._form.shard
        shards = dict(enumerate(self._gather(own)))
        moved = {}
        for shard in dict.fromkeys(shards.values()):
            routes = tuple(route for route in plan.routes if shards[route.receiver] == shard)
            moved[shard] = self._move(routes, functools.partial(copies.flat, shard, plan.step))
        # The copy stays what it is, whatever the next update does.
        return moved[own] or in_host_memory(copies.flat(own, plan.step))

    def _move(self, routes: tuple[Route, ...], source: Callable[[], Flat]) -> Flat | None:
        timeout = self._services.settings.soft / 2
        host, sign = self._host, self._sign
        return move(routes, self.rank, source, self._gather, host=host, timeout=timeout, sign=sign).flat

    def rebind(self) -> None:
        """See `Performer`."""
        self._kept.objects = self._form.rebind(self._kept.objects)

    def adopt(self, received: Any) -> None:
        """See `Performer`."""
        self._kept.objects = self._form.adopt(self._kept.objects, received)
        # Here, too: a survivor adopts another shard after it has finished.
        self._kept.buffers.keep(self._kept.objects)

    def overwrite(self, received: Any) -> None:
        """See `Performer`."""
        self._form.fill(self._kept.objects, received)
        self._kept.buffers.keep(self._kept.objects)

    def restore(self) -> int:
        """See `Performer`."""
        step = 0 if self._users.restore is None else self._users.restore(self._kept.objects)
        said = self._gather(repr(step))
        if type(step) is not int or step < 0 or len({*said}) > 1:
            steps = ", ".join(dict.fromkeys(said))
            raise JobAbort(f"restore() returned {steps}; it must be one step, the same on all ranks")
        return step

    def differing(self, shard: Hashable, receivers: Collection[int] | None) -> tuple[Route, ...]:
        """See `Performer`."""
        with torch.no_grad():
            # Sorted: a receiver may have registered buffers in another order.
            described = sorted(named(self._form.describe(self._kept.objects)), key=lambda one: one[0])
            tensors = {name: self._form.local(tensor)[0] for name, tensor in described}
        routes = checks.routes_to_equal(self._gather((shard, checksum(tensors.values()))), receivers)
        if routes and receivers is not None:
            numbers = {name: checksum([tensor]) for name, tensor in tensors.items()}
            said: list[dict[str, int]] = self._gather(numbers)
            if self.rank == 0:
                log.error("live state: %s", checks.describe_difference(routes, said, self._kept.newest))
        return routes

    def finish(self, plan: Plan, number: int) -> None:
        """See `Performer`."""
        self._kept.buffers.keep(self._kept.objects)
        if plan.rung is Rung.COPIES:
            self._kept.copies.label(plan, number)

    def seal(self, plan: Plan, register: Register) -> None:
        """See `Performer`."""
        if self.rank == 0:
            with self.atomic():
                # Not set: a rank 0 that was paused, and resumed long after its eviction, must write nothing.
                before, now = self._register, f"{register.sealed} {register.origin}"
                step = CompareAndSet(self._key, before, now) if before else SetIfAbsent(self._key, now)
                self._services.store.execute([step])
        self._kept.copies.drop_given_up(register.origin, plan.step)

    # ---- copies in host memory

    def start_buddies(self, buddies: int, copy_every: int) -> None:
        """Begins to exchange copies; collective. It ends with the iteration.

        Args:
            buddies: how many ranks have a copy of each shard.
            copy_every: copies are sent at once if those that arrived are older than this many steps, or a
                process is new; a fault may have come while some were on their way.
        """
        if len(self._nodes) > 1:
            copies, timeout = self._kept.copies, self._services.settings.hard
            with self.atomic():  # so that its thread always ends
                self._buddies = Buddies(copies, self.rank, self._host, timeout, self._sign)
                self._services.connections.append(self._buddies)
                self._services.at_end.callback(self._buddies.end)
            addresses, stored = zip(*self._gather((self._buddies.address, copies.stored)), strict=True)
            self._buddies.open(addresses, self._nodes, buddies)
            if min(stored) < max(0, self._kept.newest - copy_every + 1):
                self.send_copy()

    def send_copy(self) -> None:
        """Copies the shard, and sends it to the buddies in the background."""
        held = self._kept.held
        if self._buddies is not None and held is not None:
            copy = Copy(held.shard, held.step, frozenset({held.origin}))
            self._buddies.send(Packed(copy, in_host_memory(self._form.export(self._kept.objects))))

    def _read_register(self) -> Register:
        with self.atomic():
            self._register = read(self._services.store, self._key) or ""
        found = Register(*map(int, self._register.split()))
        return found if found.sealed >= self._services.first else Register()  # of an earlier call


def _host_group() -> Any:
    """A group of all active ranks whose collectives use host memory, and end on the host.

    Made for this iteration where the default group cannot do that: NCCL's votes end on the device.
    """
    config = dist.get_backend_config()
    on_host = dict(part.split(":") for part in config.split(",")).get("cpu") if ":" in config else config
    return dist.group.WORLD if on_host in ("gloo", "mpi") else dist.new_group(backend="gloo")


# DistributedDataParallel ------------------------------------------------------------------------------------

_HAS_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel).parameters  # not torch 2.6
_DEFAULTS = {"init_sync": False} if _HAS_INIT_SYNC else {}


def data_parallel(
    kept: TorchKept, name: str, module: nn.Module, options: dict[str, Any], group: Any
) -> DistributedDataParallel:
    """Reuses the DDP object of an earlier iteration, or makes one.

    One that lays out its buckets again after the first backward pass cannot stay: a new rank would have its
    gradients in other buckets.

    Args:
        kept: what the process keeps.
        name: of the module.
        module: that of this iteration.
        options: for ``DistributedDataParallel``.
        group: the default process group, if it has stayed; else None.
    """
    ddp, its_options = kept.data_parallel.pop(name, (None, None))
    if group is None or ddp is None or ddp.module is not module or its_options != options:
        del ddp  # with its hooks, before another one gets its own
        ddp = DistributedDataParallel(module, **{**_DEFAULTS, **options})
    else:
        _reset(ddp, group)
    has_fixed_buckets = options.get("find_unused_parameters") and not options.get("static_graph")
    if group is not None and has_fixed_buckets and "process_group" not in options:
        kept.data_parallel[name] = ddp, options
    return ddp


def _reset(ddp: Any, group: Any) -> None:
    """Forgets the step that a fault interrupted."""
    ddp._update_process_group(group)  # resets the reducer, too
    ddp.training = ddp.module.training
    ddp.require_backward_grad_sync = True  # it may have been in no_sync()
    ddp.require_forward_param_sync = True
