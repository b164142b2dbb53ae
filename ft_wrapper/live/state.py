"""What a state consists of: whole on each rank, or in shards.

There is one description of it, for transfers, copies and checks alike. Each part is taken as it is: no dtype
is cast and no layout changed, as ``Optimizer.load_state_dict`` would do.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys

from ..torch_groups.caches import clear_caches
from .tree import Flat, flatten, is_dense, is_plain, named, unflatten

# What a user's ``build`` returns: objects with ``state_dict`` and ``load_state_dict``, by name.
Objects = dict[str, Any]
# Modules, each with its object's name before its own.
Parts = list[tuple[str, torch.nn.Module]]
# By name: that of the module as in `Parts`, and the tensor's own.
Tensors = dict[str, torch.Tensor | None]


class Form:
    """One rank's view of the state of the job in one iteration: each rank has all of it.

    Args:
        build: the user's: makes the objects.

    Attributes:
        shard: name of the part of the state that belongs to this rank; replicas have the same.
        is_sharded: parameters are DTensors.
    """

    shard: str = "whole"
    is_sharded = False

    def __init__(self, build: Callable[[], Objects]) -> None:
        self._build = build

    def build(self) -> Objects:
        """Makes the objects in their state before the first step."""
        return self._build()

    def rebind(self, objects: Objects) -> Objects:
        """Makes objects that were built in an earlier iteration fit for this one, with the same state."""
        return objects

    def parameters(self, objects: Objects) -> dict[str, torch.nn.Parameter]:
        """The parameters of all modules, each once, with its module's name before its own."""
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for name, part in parts(objects):
            for leaf, parameter in part._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), (f"{name}.{leaf}", parameter))
        return dict(found.values())

    def describe(self, objects: Objects) -> dict[str, Any]:
        """All of the state that replicas have in common.

        Returns:
            Containers of tensors and plain values. The tensors are the objects' own, not copies.
        """
        parameters = self.parameters(objects)
        names = {parameter: name for name, parameter in parameters.items()}
        return {
            "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
            "trained": [name for name, parameter in parameters.items() if parameter.requires_grad],
            "buffers": buffers_of(parts(objects)),
            "transient": [
                f"{name}.{leaf}" for name, part in parts(objects) for leaf in part._non_persistent_buffers_set
            ],
            "extra": {name: part.get_extra_state() for name, part in parts(objects) if _has_extra(part)},
            "optimizers": {name: _describe_optimizer(each, names) for name, each in optimizers(objects)},
            "others": {name: each.state_dict() for name, each in _others(objects)},
        }

    def export(self, objects: Objects) -> Flat:
        """Takes the state apart, with what is a rank's own; nothing is copied.

        Raises:
            TypeError: a tensor cannot be sent; names it.
        """
        with torch.no_grad():
            return flatten({**self.describe(objects), "own": attributes_of(parts(objects))}, self.local)

    def adopt(self, objects: Objects, flat: Flat) -> Objects:
        """Puts an exported state into the objects, or into new ones.

        Args:
            objects: the existing ones; they may be of another iteration.
            flat: from `export`, on this rank or another. Its tensors belong to the objects from now on.
        """
        self.fill(objects, flat)
        return objects

    def fill(self, objects: Objects, flat: Flat) -> None:
        """Puts an exported state into objects of this iteration.

        Raises:
            RuntimeError: the state has other parameters.
        """
        state = unflatten(flat, self.together)
        odd = sorted(self.parameters(objects).keys() ^ state["parameters"].keys())
        if odd:
            raise RuntimeError(f"the state that this rank receives and the one it has differ in {odd[0]!r}")
        with torch.no_grad():
            self._fill_parameters(objects, state["parameters"])
            put_buffers(objects, state["buffers"])
            put_attributes(objects, state["own"])
        parameters = self.parameters(objects)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in state["trained"])
        for name, part in parts(objects):
            new = (leaf for leaf in part._buffers if f"{name}.{leaf}" in state["transient"])
            part._non_persistent_buffers_set.update(new)
            if name in state["extra"]:
                part.set_extra_state(state["extra"][name])
        for name, optimizer in optimizers(objects):
            _fill_optimizer(optimizer, state["optimizers"][name], parameters)
        for name, value in _others(objects):
            value.load_state_dict(state["others"][name])

    def _fill_parameters(self, objects: Objects, values: dict[str, Any]) -> None:
        for name, parameter in self.parameters(objects).items():
            parameter.data = filled(parameter.data, values[name])

    def local(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The part of a tensor on this rank, and where it lies in the whole."""
        return tensor, None

    def together(self, tensor: torch.Tensor, layout: Any) -> torch.Tensor:
        """Puts together what `local` took apart."""
        return tensor


def optimizers(objects: Objects) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers among the objects."""
    return ((name, value) for name, value in objects.items() if isinstance(value, torch.optim.Optimizer))


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is anything to step; an optimizer may rest."""
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])


def _others(objects: Objects) -> Iterator[tuple[str, Any]]:
    known = torch.nn.Module, torch.optim.Optimizer
    return ((name, value) for name, value in objects.items() if not isinstance(value, known))


def parts(objects: Objects) -> Parts:
    """All modules, and the modules in them, each once; ``named_modules`` is too slow for each step."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    todo = [one for one in reversed(objects.items()) if isinstance(one[1], torch.nn.Module)]
    while todo:
        name, part = todo.pop()
        if part is not None and id(part) not in found:
            found[id(part)] = name, part
            todo += [(f"{name}.{leaf}", child) for leaf, child in reversed(part._modules.items())]
    return [*found.values()]


def filled(old: torch.Tensor | None, new: torch.Tensor | None) -> Any:
    """The new values, in the old tensor's memory where they fit, since others may refer to it."""
    if old is None or new is None or old.is_meta or old.is_inference():
        return new
    is_alike = old.stride() == new.stride() or not is_dense(old)  # a view of another tensor stays one
    if (old.shape, old.dtype) != (new.shape, new.dtype) or not is_alike or 0 in old.stride():
        return new.to(old.device)
    return old if old.data_ptr() == new.data_ptr() else old.copy_(new)


def buffers_of(modules: Parts) -> Tensors:
    """All buffers, as they are registered now."""
    return {f"{name}.{leaf}": each for name, part in modules for leaf, each in part._buffers.items()}


def attributes_of(modules: Parts) -> Tensors:
    """Tensors that are neither parameters nor buffers: a rank's own, as its forward passes leave them.

    Not those that a forward pass computes from parameters, nor those that cannot be sent.
    """
    return {
        f"{name}.{leaf}": value
        for name, part in modules
        if not type(part).__module__.startswith("torch.nn.modules.")
        for leaf, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is None and is_plain(value)
    }


def put_buffers(objects: Objects, values: Tensors, into: Tensors | None = None) -> None:
    """Makes these the modules' only buffers, in the memory of ``into``; by default of the present ones."""
    _put(parts(objects), buffers_of, values, lambda part: part._buffers, into)


def put_attributes(objects: Objects, values: Tensors, into: Tensors | None = None) -> None:
    """Makes these the modules' only tensors in attributes; ``into``: as for buffers."""
    _put(parts(objects), attributes_of, values, vars, into)


@torch.no_grad()  # some may require gradients
def _put(
    modules: Parts, find: Callable[[Parts], Tensors], values: Tensors, table: Callable[[Any], Any], into: Any
) -> None:
    owners, present = dict(modules), find(modules)
    for name in present.keys() | values.keys():
        owner, _, leaf = name.rpartition(".")
        tensors = table(owners[owner]) if owner in owners else {}  # a module that the loop has added
        if name in values:
            tensors[leaf] = filled((into or present).get(name), values[name])
        else:
            del tensors[leaf]


def _has_extra(part: torch.nn.Module) -> bool:
    return type(part).get_extra_state is not torch.nn.Module.get_extra_state


def _describe_optimizer(optimizer: torch.optim.Optimizer, names: dict[Any, str]) -> Any:
    own = {} if type(optimizer).state_dict is torch.optim.Optimizer.state_dict else optimizer.state_dict()
    return {
        "groups": [
            {**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups
        ],
        "state": {names.get(key, key): each for key, each in optimizer.state.items()},
        "own": {key: each for key, each in own.items() if key not in ("state", "param_groups")},
    }


def _fill_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], parameters: dict[str, torch.nn.Parameter]
) -> None:
    if state["own"]:
        optimizer.load_state_dict({**optimizer.state_dict(), **state["own"]})
    for group in state["groups"]:
        group["params"] = [parameters[name] for name in group["params"]]
    optimizer.param_groups[:] = state["groups"]
    optimizer.state.clear()
    for name, values in state["state"].items():
        if name not in parameters:
            optimizer.state[name] = values
            continue
        device = parameters[name].device
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.device.type == device.type:
                values[key] = value.to(device)  # it was moved to the first device of the kind
        optimizer.state[parameters[name]] = values


# Shards -----------------------------------------------------------------------------------------------------
#
# As ``fully_shard`` makes them: local tensors outlive the mesh that they were made on. An FSDP2 module keeps
# its iteration's process groups in many places. So it is not repaired but built again, on the meta device,
# where that costs neither memory nor time for values, and takes over the local tensors.

# On the module, so that they go with it. It refers to them anyway, and they may refer to it.
_CAPTURED = "_ft_wrapper_parameters"


class Sharded(Form):
    """A shard of the state on each rank: FSDP2 on a mesh of one dimension, HSDP on one of two.

    As in ``fully_shard`` the last dimension shards, and along the first of two there are replicas.

    Args:
        build: the user's: makes the objects, all modules with ``fully_shard(..., mesh=mesh)``.
        mesh: of this iteration.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: it has more than two dimensions, or this rank is not in it.
    """

    is_sharded = True

    def __init__(self, build: Callable[[], Objects], mesh: DeviceMesh) -> None:
        from torch.distributed.tensor import DTensor  # here: its import takes a second

        super().__init__(build)
        self._dtensor = DTensor
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh={mesh!r} must be a DeviceMesh; pass this iteration's init_device_mesh(…)")
        if mesh.ndim > 2:
            raise ValueError(f"mesh={mesh} has {mesh.ndim} dimensions; pass one (FSDP2) or two (HSDP)")
        place = mesh.get_coordinate()
        if place is None:
            raise ValueError(f"mesh={mesh} does not have this rank; pass one of all active ranks")
        self.shard = f"shard {place[-1]} of {mesh.size(mesh.ndim - 1)}"
        self._mesh = mesh

    def build(self) -> Objects:
        """See `Form`.

        Raises:
            ValueError: a parameter is not sharded, or on another mesh.
        """
        return self._capture(self._build())

    def rebind(self, objects: Objects) -> Objects:
        """See `Form`. Gradients stay behind, with the old objects."""
        return self.adopt(objects, self.export(objects))

    def adopt(self, objects: Objects, flat: Flat) -> Objects:
        """See `Form`. Always makes new objects: the given ones may be of an old mesh.

        Raises:
            RuntimeError: ``build`` cannot run on the meta device, or something has stayed there.
        """
        # An update of old objects in this iteration has filled DTensor's caches with the old mesh again.
        clear_caches()
        objects = self._capture(self._build_on_meta())
        self.fill(objects, flat)
        _check_not_on_meta(objects)
        return objects

    def parameters(self, objects: Objects) -> dict[str, torch.nn.Parameter]:
        """See `Form`. Between forward and backward a module itself may name the unsharded ones instead."""
        return {
            f"{name}.{inner}": parameter
            for name, value in objects.items()
            for inner, parameter in getattr(value, _CAPTURED, {}).items()
        }

    def _capture(self, objects: Objects) -> Objects:
        """Notes the parameters of the modules on them."""
        for name, value in objects.items():
            if isinstance(value, torch.nn.Module):
                found = super().parameters({name: value})
                vars(value)[_CAPTURED] = {key.removeprefix(f"{name}."): each for key, each in found.items()}
        for name, parameter in self.parameters(objects).items():
            if not isinstance(parameter, self._dtensor):
                raise ValueError(f"build(): {name!r} is not sharded; apply fully_shard(module, mesh=mesh)")
            if parameter.device_mesh != self._mesh:
                raise ValueError(f"build(): {name!r} is on {parameter.device_mesh}, and mesh={self._mesh}")
        return objects

    def _build_on_meta(self) -> Objects:
        try:
            with torch.device("meta"):
                return self._build()
        except Exception as error:
            raise RuntimeError(
                f"build() failed on the meta device, where tensors have no values: {error}. Give those "
                'that it reads a device (torch.tensor(1e-3, device="cpu")), and load checkpoints in restore='
            ) from error

    def _fill_parameters(self, objects: Objects, values: dict[str, Any]) -> None:
        """See `Form`. Those on the meta device are replaced."""
        new: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for name, old in dict[str, Any](self.parameters(objects)).items():
            if old.is_meta:
                new[old] = torch.nn.Parameter(values[name], requires_grad=False)
            else:
                filled(old._local_tensor, values[name]._local_tensor)
        for _, part in parts(objects):
            for leaf, parameter in part._parameters.items():
                if parameter in new:  # one object under all its names, so that tied weights stay tied
                    part._parameters[leaf] = new[parameter]
        self._capture(objects)
        for _, part in parts(objects):
            for hook in part._load_state_dict_post_hooks.values():  # FSDP2 looks at its parameters again
                hook(part, _IncompatibleKeys([], []))

    # ---- tensors

    def local(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Form`."""
        if not isinstance(tensor, self._dtensor):
            return tensor, None
        return tensor.to_local().detach(), (tuple(tensor.placements), tensor.shape, tensor.stride())

    def together(self, tensor: torch.Tensor, layout: Any) -> torch.Tensor:
        """See `Form`."""
        if layout is None:
            return tensor
        placements, shape, stride = layout
        return self._dtensor.from_local(
            tensor, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _check_not_on_meta(objects: Objects) -> None:
    for name, value in objects.items():
        # A tensor that is an attribute and was not filled is one that forward passes compute.
        contents = {
            where: {leaf: each for leaf, each in vars(part).items() if not isinstance(each, torch.Tensor)}
            for where, part in parts({name: value})
        }
        for path, tensor in named(contents or {name: value.state_dict()}):
            if tensor.is_meta:
                raise RuntimeError(
                    f"{path} has stayed on the meta device; make it a buffer, give it a device= in build(), "
                    "or let load_state_dict() assign what it is given"
                )
