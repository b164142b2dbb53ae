"""What drawn trainings are built of: layers, buffers, optimizers, averages, and their step; see draws.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.utils.prune
from draw_cases import LATER, OVERFLOW, REST, STEPS, Case
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH = 8
BATCH = 4
CODES = (1 << 18) + 40

warnings.filterwarnings("ignore")

Objects = dict[str, Any]


# Buffers -------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """A layer with a buffer, or something like it, which a forward pass changes by the rank's own batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        zeros = torch.zeros(WIDTH)
        match kind:
            case "not persistent":
                self.register_buffer("mean", zeros, persistent=False)
            case "grown":
                self.register_buffer("cache", torch.zeros(2))
            case "registered in forward":
                pass
            case "None at first":
                self.register_buffer("mean", None)
            case "codebook":
                self.register_buffer("codes", torch.zeros(CODES))
            case "attribute in place":
                self.scale = torch.ones(1, device="cpu")
            case "extra state":
                self.seen: dict[str, Any] = {"steps": 0, "history": []}
            case "view":
                self.register_buffer("both", torch.zeros(2, WIDTH))
                self.register_buffer("mean", self.both[1])
            case "expanded":
                self.register_buffer("mask", torch.ones(WIDTH).expand(BATCH, WIDTH))
            case "whole numbers":
                self.register_buffer("seen", torch.tensor(0))
                self.register_buffer("is_started", torch.tensor(False))
                self.register_buffer("bins", torch.zeros(WIDTH, dtype=torch.int32))
            case "resized":
                self.register_buffer("mean", torch.zeros(0))
            case _:
                self.register_buffer("mean", zeros)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the batch, in the buffer's type if there is one."""
        mean: Any = next((one for one in self.buffers() if one.is_floating_point()), x)
        return x.detach().mean(0).to(mean.dtype)

    @torch.no_grad()
    def _learn(self, x: torch.Tensor) -> None:
        now = self._mean(x)
        match self.kind:
            case "in place" | "not persistent" | "view":
                self.mean.lerp_(now, 0.1)
            case "by .data":
                self.mean.data.mul_(0.9).add_(now, alpha=0.1)
            case ".data set":
                self.mean.data = 0.9 * self.mean + 0.1 * now
            case "assigned":
                self.mean = 0.9 * self.mean + 0.1 * now
            case "registered in forward":
                if not hasattr(self, "mean"):
                    self.register_buffer("mean", torch.zeros_like(now))
                self.mean.lerp_(now, 0.1)
            case "None at first":
                self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
            case "codebook":
                rows = (torch.arange(WIDTH) * 4001).to(now.device)
                self.codes.index_add_(0, rows, now.to(self.codes.dtype))
            case "whole numbers":
                self.seen += int(now.abs().sum() * 100)
                self.is_started.fill_(True)
                self.bins += (now.float() * 100).to(torch.int32)
            case "resized":
                if not self.mean.numel():
                    self.mean.resize_(WIDTH).zero_()
                self.mean.lerp_(now, 0.1)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Something of the buffer goes into the output, so that other bits are seen."""
        if self.kind == "grown":
            if step + 2 > len(self.cache):
                cache = torch.cos(torch.arange(float(step + 2), device=x.device)).to(self.cache.dtype)
                self.register_buffer("cache", cache)
            return x * self.cache[step + 1].to(x.dtype)
        if self.training:
            self._learn(x)
        match self.kind:
            case "codebook":
                return x - self.codes[:WIDTH].to(x.dtype)
            case "attribute in place":
                return x * self.scale.to(x.dtype)
            case "extra state":
                return x * (1 + self.seen["steps"] / 10)
            case "whole numbers":
                return x * (1 + self.seen / 1000).to(x.dtype)
            case "expanded":
                return x * self.mask[0].to(x.dtype)
        return x if self.mean is None else x - self.mean.to(x.dtype)

    @torch.no_grad()
    def update(self) -> None:
        """What is not a forward pass's to change."""
        match self.kind:
            case "attribute in place":
                self.scale *= 0.9
            case "extra state":
                self.seen["steps"] += 1
                self.seen["history"].append(self.seen["steps"])

    def get_extra_state(self) -> Any:
        """See `Module`."""
        return copy.deepcopy(vars(self).get("seen")) if self.kind == "extra state" else None

    def set_extra_state(self, state: Any) -> None:
        """See `Module`."""
        if state is not None:
            self.seen = copy.deepcopy(state)


class Norm(nn.BatchNorm1d):
    """Batch norm with the signature of the others."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:  # type: ignore[override]
        """See `BatchNorm1d`."""
        return super().forward(x)

    def update(self) -> None:
        """Nothing."""


# The model -----------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen layer, and a small one that learns."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 10)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Module`."""
        learned: torch.Tensor = self.layer(x) + x @ self.down.t() @ self.up.t()
        return learned


def _middle(wrap: str) -> nn.Module:
    layer: Any = nn.Linear(WIDTH, WIDTH)
    other: Any = nn.Linear(WIDTH, WIDTH)
    made: Any = layer
    match wrap:
        case "tied":
            other.weight = layer.weight
            made = nn.Sequential(layer, other)
        case "same module twice":
            made = nn.Sequential(layer, layer)
        case "weight_norm":
            made = nn.utils.parametrizations.weight_norm(layer)
        case "old spectral_norm":
            made = nn.utils.spectral_norm(layer)
        case "checkpoint_wrapper":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            made = checkpoint_wrapper(layer)
        case "pruned":
            nn.utils.prune.random_unstructured(layer, "weight", amount=0.3)
        case "adapter":
            made = Adapter(layer)
    return made


class Model(nn.Module):
    """A front, a middle and a last layer, a buffer, and a layer that a second optimizer updates."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.body = case.body
        if case.body == "conv":
            self.front: nn.Module = nn.Sequential(
                nn.Conv2d(3, WIDTH, 3), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3)
            )
        elif "embedding" in case.body:
            self.front = nn.Embedding(20, WIDTH, sparse=case.body.startswith("sparse"))
        else:
            self.front = nn.Linear(6, WIDTH)
        self.middle = _middle(case.wrap)
        if case.buffer == "batch norm":
            self.statistics: Any = Norm(WIDTH)
        else:
            self.statistics = Statistics(case.buffer) if case.buffer else None
        self.dropout = nn.Dropout(0.1)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, step: int, *, has_extra: bool) -> torch.Tensor:
        """One number for each sample."""
        x = self.front(x)
        if self.body == "conv":
            x = x.mean((2, 3))
        elif "embedding" in self.body:
            x = x.mean(1)
        if self.statistics is not None:
            x = self.statistics(x, step)
        x = self.dropout(torch.relu(self.middle(x)))
        if has_extra:
            x = x + self.extra(x)
        scores: torch.Tensor = self.last(x)
        return scores


def batch(case: Case) -> torch.Tensor:
    """This rank's, by the step's random numbers."""
    if "embedding" in case.body:
        return torch.randint(0, 20, (BATCH, 3))
    shape = (BATCH, 3, 6, 6) if case.body == "conv" else (BATCH, 6)
    x = (torch.randn(shape) * (1 + random.random() / 4)).to(getattr(torch, case.dtype))
    return x.contiguous(memory_format=torch.channels_last) if case.layout else x


# Optimizers ----------------------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """What the optimizers below have in common."""

    def __init__(self, parameters: Any, lr: Any = 0.1, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """See `Optimizer`."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.update(each, self.state[each], group["lr"])

    def update(self, each: Any, state: dict[str, Any], lr: Any) -> None:
        """Steps one parameter."""
        raise NotImplementedError


class Bf16Moments(Own):
    """Moments of fewer bits than the parameters."""

    def update(self, each: Any, state: dict[str, Any], lr: Any) -> None:
        """See `Own`."""
        moment = state.setdefault("moment", torch.zeros_like(each, dtype=torch.bfloat16))
        moment.mul_(0.9).add_(each.grad.to(torch.bfloat16))
        each.sub_(moment.to(each.dtype) * lr)


class Fp32Masters(Own):
    """Masters of more bits than the parameters."""

    def update(self, each: Any, state: dict[str, Any], lr: Any) -> None:
        """See `Own`."""
        master = state.setdefault("master", each.detach().float().clone())
        master.sub_(each.grad.float() * lr)
        each.copy_(master)


class OddState(Own):
    """State of all kinds: numbers, None, lists that grow, tensors of another shape; and random numbers."""

    def __init__(self, parameters: Any, lr: Any = 0.1) -> None:
        super().__init__(parameters, lr, seen=torch.zeros(1, device="cpu"))

    def step(self, closure: Any = None) -> None:
        """See `Optimizer`."""
        for group in self.param_groups:
            group["seen"] += 1
        super().step()

    def update(self, each: Any, state: dict[str, Any], lr: Any) -> None:
        """See `Own`."""
        if not state:
            state.update(count=0, last=None, history=[], inner={"row": torch.zeros(3)})
        state["count"] += 1
        state["history"] = [*state["history"][-2:], torch.full((state["count"],), 0.5)]
        state["inner"]["row"] += 1.0
        last = 0.0 if state["last"] is None else state["last"]
        each.sub_(lr * (each.grad + 0.5 * last) / state["count"])
        if not isinstance(each, DTensor):
            each.add_(torch.randn_like(each), alpha=1e-3)
        state["last"] = each.grad.clone()


_RATES = {"Adadelta": 1.0, "Rprop": 0.01, "SGD": 0.05, "LBFGS": 0.2, "ASGD": 0.05}


def _optimizer(case: Case, parameters: list[Any]) -> torch.optim.Optimizer:
    kind = globals().get(case.optimizer) or getattr(torch.optim, case.optimizer)
    rate: Any = _RATES.get(case.optimizer, 0.02)
    if case.tensor_lr:
        rate = torch.tensor(rate, device="cpu")
    if case.optimizer == "LBFGS":
        made: Any = kind(parameters, lr=rate, max_iter=2, history_size=3, **dict(case.options))
    else:
        made = kind(parameters, lr=rate, **dict(case.options))
    return made


def _scheduler(name: str, optimizer: Any) -> Any:
    lr = torch.optim.lr_scheduler
    match name:
        case "ChainedScheduler":
            return lr.ChainedScheduler([lr.ExponentialLR(optimizer, 0.9), lr.StepLR(optimizer, 2)])
        case "ExponentialLR":
            return lr.ExponentialLR(optimizer, 0.9)
        case "LambdaLR":
            return lr.LambdaLR(optimizer, lambda step: 0.95)
        case "LambdaLR of an object":
            return lr.LambdaLR(optimizer, Falling())
        case "OneCycleLR":
            return lr.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1, cycle_momentum=False)
        case "SequentialLR":
            parts = [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, STEPS)]
            return lr.SequentialLR(optimizer, parts, milestones=[2])
        case "SWALR":
            return torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.005, anneal_epochs=3)
    return lr.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)


class Falling:
    """A factor that depends on how often it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 0.97**self.asked


# Objects beside them -------------------------------------------------------------------------------------


class Average:
    """Averaged weights, by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.values = {name: one.detach().clone() for name, one in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the weights in."""
        self.count += 1
        for name, one in model.named_parameters():
            self.values[name].lerp_(one.detach(), 0.2)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"count": self.count, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it over."""
        self.count, self.values = state["count"], dict(state["values"])


class Lookahead(Average):
    """Slow weights, which the model gets again each second step."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the weights in, and gives them back."""
        self.count += 1
        if self.count % 2 == 0:
            for name, one in model.named_parameters():
                one.copy_(self.values[name].lerp_(one, 0.5))


class Counter:
    """Plain values of many kinds."""

    def __init__(self) -> None:
        self.steps, self.losses, self.random = 0, [0.0], random.Random(7)

    def update(self, loss: float) -> None:
        """Counts a step."""
        self.steps += 1
        self.losses.append(loss + self.random.random())

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"steps": self.steps, "losses": list(self.losses), "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it over."""
        self.steps, self.losses = state["steps"], list(state["losses"])
        self.random.setstate(state["random"])


# All of it -----------------------------------------------------------------------------------------------


def build(case: Case, mesh: Any, before: Callable[[str], None]) -> Objects:
    """What LiveState is given as ``build``.

    Args:
        case: says what.
        mesh: with shards.
        before: called in an update, between its parts.
    """
    with torch.device("meta") if case.deferred else contextlib.nullcontext():
        model: Any = Model(case).to(getattr(torch, case.dtype))
    if case.layout == "build":
        model = model.to(memory_format=torch.channels_last)
    if "thaw" in case.later:
        model.extra.requires_grad_(False)
    if mesh is not None:
        if case.parts:
            fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if case.deferred:
        _fill(model)
    if case.wrap == "compiled":
        model.middle = torch.compile(model.middle, backend="eager")
    objects: Objects = {"model": model}
    second = [*model.extra.parameters()] if case.second or "group" in case.later else []
    apart = {id(each) for each in second}
    first = [each for each in model.parameters() if id(each) not in apart]
    rest: list[Any] = []
    if case.optimizer == "Muon":
        rest = [each for each in first if each.ndim != 2]
    elif case.optimizer == "SparseAdam":
        rest = [each for each in first if each is not model.front.weight]
    others = {id(each) for each in rest}
    objects["optimizer"] = _optimizer(case, [each for each in first if id(each) not in others])
    objects["optimizer"].register_step_post_hook(lambda *_: before("in update"))
    if rest:
        objects["rest"] = torch.optim.AdamW(rest, lr=0.01)
    if case.second:
        objects["second"] = torch.optim.Adam(second, lr=0.01)
    if case.scheduler:
        objects["schedule"] = _scheduler(case.scheduler, objects["optimizer"])
    if case.scaler:
        objects["scaler"] = torch.amp.GradScaler(
            "cpu", init_scale=2.0**6, growth_interval=3, enabled=case.scaler == "on"
        )
    match case.average:
        case "AveragedModel, buffers":
            objects["average"] = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        case "AveragedModel, many":
            many = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            objects["average"] = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=many)
        case "own":
            objects["average"] = Average(model)
        case "lookahead":
            objects["average"] = Lookahead(model)
        case "copy":
            objects["average"] = copy.deepcopy(model)
    if case.average.startswith(("Averaged", "copy")):
        objects["average"].requires_grad_(False)
    if case.counter:
        objects["counter"] = Counter()
    return objects


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for one in model.parameters():
        (one.to_local() if isinstance(one, DTensor) else one).normal_(0, 0.3)
    for name, one in model.named_buffers():
        one.fill_(float(name.endswith("running_var")))


def _modified(case: Case, model: Any, optimizer: Any) -> None:
    """Changes the structure; does nothing where it has changed."""
    if "thaw" in case.later:
        model.extra.requires_grad_(True)
    if case.later == "freeze":
        model.front.requires_grad_(False)
    if "group" in case.later:
        there = {id(each) for group in optimizer.param_groups for each in group["params"]}
        new = [each for each in model.extra.parameters() if id(each) not in there]
        if new:
            optimizer.add_param_group({"params": new, "lr": 0.01})


def update(case: Case, objects: Objects, step: int, loss: float, *, works: bool) -> None:
    """What LiveState is given as ``update``, if the default one does not do.

    Args:
        case: says what.
        objects: that are changed.
        step: that is done.
        loss: of all ranks.
        works: whether the second optimizer does.
    """
    model, scaler = objects["model"], objects.get("scaler")
    first, idle = objects["optimizer"], () if works else ("second",)
    for name, one in objects.items():
        if not isinstance(one, torch.optim.Optimizer) or (case.second == "update" and name in idle):
            continue
        if case.optimizer == "LBFGS" and one is first:
            one.step(functools.partial(_again, case, model, first, step))
        elif scaler is None:
            one.step()
        elif name not in idle:
            scaler.step(one)
    if scaler is not None:
        scaler.update()
    if "schedule" in objects:
        arguments = (loss,) if case.scheduler == "ReduceLROnPlateau" else ()
        objects["schedule"].step(*arguments)
    if case.average.startswith("Averaged"):
        objects["average"].update_parameters(model)
    elif case.average == "copy":
        with torch.no_grad():
            for mine, its in zip(objects["average"].parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.2)
    elif case.average:
        objects["average"].update(model)
    if "counter" in objects:
        objects["counter"].update(loss)
    if getattr(model, "statistics", None) is not None:
        model.statistics.update()
    if case.later_in == "update" and step == LATER - 1:
        _modified(case, model, first)


def _again(case: Case, model: Any, optimizer: Any, step: int) -> torch.Tensor:
    """LBFGS computes the loss as often as it wants: alone, on a batch that is the same on all ranks."""
    optimizer.zero_grad()
    with torch.enable_grad():
        model.eval()
        torch.manual_seed(step)
        random.seed(step)
        loss: torch.Tensor = (
            model(batch(case), step, has_extra=_has_extra(case, step)).float().square().mean()
        )
        loss.backward()
        model.train()
    return loss.detach()


def train(
    case: Case,
    live: Any,
    names: list[str],
    wrapped: Callable[[nn.Module], Any],
    before: Callable[[str, int], None],
) -> None:
    """All steps that are left.

    Args:
        case: says what a step is.
        live: a `LiveState`, or what looks like it.
        names: of its objects.
        wrapped: makes of the module what is called.
        before: called at each point of a step.
    """
    if case.layout == "entry":
        live["model"].to(memory_format=torch.channels_last)
    model, scaler = None, live["scaler"] if case.scaler else None
    optimizers = [live[name] for name in ("optimizer", "rest", "second") if name in names]
    for step in live.steps(STEPS):
        before("step", step)
        if case.later and step == LATER and case.later_in == "loop":
            _modified(case, live["model"], live["optimizer"])
        if model is None or (case.later and step == LATER):
            model = wrapped(live["model"])
        works = not case.second or step % REST == 1
        if not case.zero_after:
            for one in optimizers:
                one.zero_grad()
        total = torch.zeros(())
        for part in range(1 + case.micro):
            if part:
                before("micro", step)
            out = model(batch(case), step, has_extra=works and _has_extra(case, step))
            before("forward", step)
            if part == case.micro:
                out.register_hook(lambda _, step=step: before("backward", step))
            loss = (out.float() - 1).square().mean()
            total += loss.detach()
            if scaler is not None:
                infinite = case.scaler == "on" and step == OVERFLOW
                loss = scaler.scale(loss * (float("inf") if infinite else 1.0))
            loss.backward()
        if scaler is not None and case.clip:
            for one in optimizers:
                if works or one is not (live["second"] if case.second else None):
                    scaler.unscale_(one)
        if case.clip and case.optimizer not in ("SparseAdam",):
            nn.utils.clip_grad_norm_(live["model"].parameters(), 1.0)
        before("before commit", step)
        if case.has_update:
            dist.all_reduce(total)
            live.commit(step, total.item(), works)
        else:
            live.commit()
        before("after commit", step)
        if case.zero_after:
            for one in optimizers:
                one.zero_grad()


def _has_extra(case: Case, step: int) -> bool:
    """A layer without an optimizer is not used."""
    return not case.later or case.later == "freeze" or step >= LATER


# What comes out ------------------------------------------------------------------------------------------


def described(objects: Objects) -> dict[str, str]:
    """All values of all objects, by path: of tensors their type, shape and bits."""
    said: dict[str, str] = {}
    named = {
        id(one): f"{name}.{inner}"
        for name, module in objects.items()
        if isinstance(module, nn.Module)
        for inner, one in module.named_parameters()
    }
    for name, one in objects.items():
        if isinstance(one, nn.Module):
            for inner, parameter in one.named_parameters():
                _describe(said, f"{name}.{inner}", parameter)
                said[f"{name}.{inner} requires_grad"] = str(parameter.requires_grad)
            for inner, buffer in one.named_buffers(remove_duplicate=False):
                _describe(said, f"{name}.{inner}", buffer)
            for prefix, part in one.named_modules():
                # What a layer of torch's has there a forward pass computes, as with spectral_norm.
                is_torchs = type(part).__module__.startswith("torch.nn.modules.")
                for inner, value in vars(part).items():
                    if isinstance(value, torch.Tensor) and not is_torchs:
                        _describe(said, f"{name}.{prefix}.{inner} (attribute)", value)
                if isinstance(part, Statistics):
                    _describe(said, f"{name}.{prefix} extra", part.get_extra_state())
                said[f"{name}.{prefix} training"] = str(part.training)
        elif isinstance(one, torch.optim.Optimizer):
            for number, group in enumerate(one.param_groups):
                plain = {**group, "params": [named.get(id(each), "?") for each in group["params"]]}
                _describe(said, f"{name}.groups.{number}", plain)
            for key, value in one.state.items():
                _describe(said, f"{name}.state.{named.get(id(key), key)}", value)
        else:
            _describe(said, name, one.state_dict())
    return said


def _describe(said: dict[str, str], path: str, value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.is_sparse else value.detach()
        bits = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        what = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        number = f" {value.item()!r}" if value.numel() == 1 else ""
        said[path] = f"{what}{number} {hashlib.sha256(bits).hexdigest()[:12]}"
    elif isinstance(value, dict):
        for key in value:
            _describe(said, f"{path}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        said[f"{path} length"] = str(len(value))
        for number, each in enumerate(value):
            _describe(said, f"{path}.{number}", each)
    elif not callable(value):
        said[path] = repr(value)


def is_finite(objects: Objects) -> bool:
    """Whether the weights say something."""
    weights = [one.to_local() if isinstance(one, DTensor) else one for one in objects["model"].parameters()]
    return all(bool(one.isfinite().all()) for one in weights)
