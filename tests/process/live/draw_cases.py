"""What a drawn training is made of, and the draw itself; see draws.py."""

from __future__ import annotations

import dataclasses
import inspect
import random
from typing import Any

import torch

STEPS = 7
LATER = 3
"""The step from which on a change of the structure is there."""
OVERFLOW = 2
"""The step whose loss is infinite, if there is a GradScaler."""
REST = 3
"""A second optimizer has work in each so-manieth step only."""

OWN_OPTIMIZERS = ("Bf16Moments", "Fp32Masters", "OddState")
OPTIMIZERS = (
    *sorted(
        name
        for name, one in vars(torch.optim).items()
        if inspect.isclass(one)
        and issubclass(one, torch.optim.Optimizer)
        and one is not torch.optim.Optimizer
    ),
    *OWN_OPTIMIZERS,
)
# Left out: `differentiable`, whose steps would be part of the graph of the next one.
SWITCHES = ("amsgrad", "capturable", "centered", "decoupled_weight_decay", "maximize", "nesterov")
DTYPES = ("float32", "bfloat16", "float16", "float64")
WRAPS = (
    *("tied", "same module twice", "weight_norm", "old spectral_norm", "checkpoint_wrapper", "pruned"),
    *("adapter", "compiled"),
)
BUFFERS = (
    *("batch norm", "in place", "not persistent", "by .data", ".data set", "assigned", "grown"),
    *("registered in forward", "None at first", "codebook", "attribute in place", "extra state", "view"),
    *("expanded", "whole numbers", "resized"),
)
SCHEDULERS = (
    *("ChainedScheduler", "ExponentialLR", "LambdaLR", "LambdaLR of an object", "OneCycleLR"),
    *("ReduceLROnPlateau", "SequentialLR", "SWALR"),
)
AVERAGES = ("AveragedModel, buffers", "AveragedModel, many", "own", "copy", "lookahead")

POINTS = (
    *("step", "forward", "micro", "backward", "before commit", "before vote", "in vote", "after vote"),
    *("after commit", "entry"),
)
TORN, ROLL = "in update", "in roll"
"""Where a fault leaves half an update behind."""
RECOVERY_POINTS = ("before gather", "after gather", "before seal", "in seal", "after seal")
OF_RECEIVERS = ("transfer", "adopt", "adopted")
OF_RANK_0 = ("before register", "after register")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A fault that is to happen once.

    Args:
        kind: ``exception`` or ``sigkill``.
        point: of the step, or of the recovery.
        step: in which it happens; ``entry``, and points of a recovery: behind the fault before it.
        rank: the active rank.
    """

    kind: str
    point: str
    step: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A training and its faults.

    Args:
        name: seed and attempt, by which it is drawn again.
        form: ``ddp``, ``fsdp`` or ``hsdp``.
        ranks: that train.
        spares: beside them.
        optimizer: a class of torch.optim, or one of our own.
        options: for it.
        tensor_lr: its learning rate is a tensor.
        dtype: of the weights.
        body: what the first layer is.
        wrap: what is done with the middle one.
        buffer: which one the model has.
        layout: where the model gets channels_last: "", ``build`` or ``entry``.
        second: who lets a second optimizer rest: "", ``default`` update or ``update``.
        later: what changes in the structure: "", ``group``, ``thaw``, ``thaw, group``, ``freeze``.
        later_in: ``loop`` or ``update``.
        scheduler: which one; "": none.
        scaler: "", ``on`` or ``off``.
        average: of the weights; "": none.
        counter: there is an object with plain values.
        clip: gradients are clipped.
        micro: gradients of two batches are accumulated.
        zero_after: gradients are zeroed behind the step.
        broadcast: DDP broadcasts buffers.
        parts: with shards: the middle layer is a group of its own.
        deferred: with shards: they are made on the meta device, and then given memory and values.
        moves: with shards: each active rank is another process after each restart.
        buddies: copies in memory; a shard that may lose its last holder has them.
        verify_every: see `LiveState`.
        faults: what happens.
    """

    name: str
    form: str
    ranks: int
    spares: int
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    tensor_lr: bool
    dtype: str
    body: str
    wrap: str
    buffer: str
    layout: str
    second: str
    later: str
    later_in: str
    scheduler: str
    scaler: str
    average: str
    counter: bool
    clip: bool
    micro: bool
    zero_after: bool
    broadcast: bool
    parts: bool
    deferred: bool
    moves: bool
    buddies: int
    verify_every: int | None
    faults: tuple[Planned, ...]

    @property
    def has_update(self) -> bool:
        """Whether the default update does not do."""
        return bool(
            self.average
            or self.counter
            or self.second == "update"
            or (self.later and self.later_in == "update")
            or self.optimizer == "LBFGS"
            or self.scheduler == "ReduceLROnPlateau"
            or self.buffer.startswith(("attribute", "extra"))
        )

    @property
    def may_go_back(self) -> bool:
        """Whether a shard may lose its last holder: then copies have it."""
        return self.form == "fsdp" and any(one.kind == "sigkill" or one.point == TORN for one in self.faults)


def draw(seed: int, attempt: int = 0) -> Case:
    """Draws a case. Whether torch can compute it is for `draws.drawn` to find out.

    Args:
        seed: of the case; says the optimizer, too.
        attempt: the first ones were not computable.
    """
    optimizer = OPTIMIZERS[random.Random(f"optimizer {seed}").randrange(len(OPTIMIZERS))]
    choose = random.Random(f"{seed}.{attempt}")

    def some(of: tuple[str, ...], share: float) -> str:
        return choose.choice(of) if choose.random() < share else ""

    def yes(share: float) -> bool:
        return choose.random() < share

    form = choose.choice(("ddp",) * 5 + ("fsdp", "fsdp", "hsdp"))
    ranks = choose.choice((2, 4)) if form == "hsdp" else choose.choice((2, 2, 3, 3, 4))
    spares = int(ranks < 4 and form == "ddp" and yes(0.5))
    body = choose.choice(("linear", "linear", "linear", "conv", "embedding"))
    if optimizer == "SparseAdam":
        form, body = "ddp", "sparse embedding"
    if optimizer == "LBFGS":
        form = "ddp"  # its closure needs a forward pass, which has collectives where shards are gathered
    second = some(("default", "update"), 0.2)
    if optimizer == "LBFGS":
        second = ""  # DDP takes what its closure uses for used in the next step
    later = "" if second else some(("group", "thaw", "thaw, group", "freeze"), 0.2)
    dtype = "bfloat16" if optimizer == "Fp32Masters" else choose.choice(("float32", *DTYPES))
    case = Case(
        name=f"{seed}.{attempt}" if attempt else f"{seed}",
        form=form,
        ranks=ranks,
        spares=spares,
        optimizer=optimizer,
        options=_options(optimizer, choose),
        tensor_lr=yes(0.15),
        dtype=dtype,
        body=body,
        wrap=some(WRAPS, 0.4),
        buffer=some(BUFFERS, 0.75),
        layout=some(("build", "entry"), 0.7) if body == "conv" else "",
        second=second,
        later=later,
        later_in=choose.choice(("loop", "update")),
        scheduler=some(SCHEDULERS, 0.5),
        scaler=some(("on", "off"), 0.4),
        average=some(AVERAGES if form == "ddp" else ("own",), 0.35),
        counter=yes(0.15),
        clip=yes(0.3),
        micro=yes(0.3),
        zero_after=yes(0.3),
        broadcast=yes(0.5),
        parts=form != "ddp" and yes(0.5),
        deferred=form != "ddp" and yes(0.3),
        moves=form != "ddp" and yes(0.4),
        buddies=int(yes(0.15)),
        verify_every=choose.choice((None, None, 1, 3)),
        faults=(),
    )
    case = dataclasses.replace(case, faults=_faults(choose, case))
    # DDP would write into the first one, and looks once whether there are any: when it is made, in any step.
    unfit = ("expanded", "registered in forward", "None at first")
    broadcast = case.broadcast and case.buffer not in unfit
    buddies = int(case.may_go_back) if form == "fsdp" else case.buddies
    return dataclasses.replace(case, buddies=buddies, broadcast=broadcast)


def _options(optimizer: str, choose: random.Random) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {}
    one = getattr(torch.optim, optimizer, None)
    if one is not None:
        known = inspect.signature(one).parameters
        shares = {name: 0.05 if name == "capturable" else 0.25 for name in SWITCHES}  # the CPU refuses it
        options = {name: True for name in SWITCHES if name in known and choose.random() < shares[name]}
        ways = [("foreach", True), ("foreach", False), ("fused", True), ("fused", False)]
        options.update(
            [choose.choice([way for way in ways if way[0] in known])] if "foreach" in known else []
        )
        if "momentum" in known and (choose.random() < 0.6 or "nesterov" in options):
            options["momentum"] = 0.9
        if "weight_decay" in known and choose.random() < 0.5:
            options["weight_decay"] = 0.01
        if "line_search_fn" in known and choose.random() < 0.5:
            options["line_search_fn"] = "strong_wolfe"
    return tuple(sorted(options.items()))


def _faults(choose: random.Random, case: Case) -> tuple[Planned, ...]:
    """One to three, so far apart that what the first one killed is whole again by the second one.

    With replicas most are followed by one in the recovery, as long as one rank certainly has what all need.
    """
    planned: list[Planned] = []
    is_whole = case.form != "fsdp"
    can_lose = is_whole or choose.random() < 0.5  # without replicas: with copies, or nothing is lost
    # The first copies are with the buddies when the first step is done.
    first = choose.randrange(not is_whole, 3)
    for step in list(range(first, STEPS, 2))[: choose.randint(1, 3)]:
        kind = choose.choice(("exception", "sigkill")) if can_lose else "exception"
        absent = {
            "micro": not case.micro,
            "entry": not planned,
            TORN: not can_lose or (case.scaler == "on" and step == OVERFLOW),
        }
        point = choose.choice([each for each in (*POINTS, TORN) if not absent.get(each)])
        if point == "entry" and not is_whole:
            kind = "exception"  # the new copies are not with the buddies yet
        planned.append(Planned(kind, point, step, choose.randrange(case.ranks)))
        if is_whole and choose.random() < 0.7:
            planned.append(_in_recovery(choose, case, planned[-1]))
    return tuple(planned)


def _in_recovery(choose: random.Random, case: Case, first: Planned) -> Planned:
    is_lost = first.kind == "sigkill" or first.point == TORN
    of_first: tuple[str, ...] = ()
    if first.step == 0:
        pass  # the seal of the first recovery may still be unknown: then no rank sends or rolls anything
    elif is_lost and case.form == "ddp":  # with replicas of shards another rank may take its place
        of_first = OF_RECEIVERS
    elif (
        first.point == "after vote"
        and not case.moves
        and not (case.scaler == "on" and first.step == OVERFLOW)
    ):
        of_first = (ROLL,)
    point = choose.choice((*RECOVERY_POINTS, *(2 * of_first), *OF_RANK_0))
    rank = first.rank if point in of_first else 0 if point in OF_RANK_0 else choose.randrange(case.ranks)
    may_kill = case.form == "ddp" and (not is_lost or rank == first.rank or case.ranks > 2)
    kind = choose.choice(("exception", "sigkill")) if may_kill else "exception"
    return Planned(kind, point, first.step, rank)
