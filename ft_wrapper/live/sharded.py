"""A state in shards, as ``fully_shard`` makes them: local tensors outlive the mesh that they were made on.

An FSDP2 module keeps its iteration's process groups in many places. So it is not mended but built again, on
the meta device, where that costs neither memory nor time for values, and takes the local tensors over.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..torch_groups.forget import forget_old_ranks
from .form import Form, Objects, modules, optimizers

# On the module, so that they go with it. It refers to them anyway, and they may refer to it.
_CAPTURED = "_ft_wrapper_parameters"


class Layout(NamedTuple):
    """How a local tensor lies in a DTensor.

    Args:
        placements: by dimension of the mesh.
        shape: of the whole.
        stride: of the whole.
    """

    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class Local(NamedTuple):
    """A tensor as it is exported.

    Args:
        tensor: this rank's own memory.
        device: the type of the device where it belongs; it may arrive on another one.
        layout: of the DTensor that it was in; None if it was in none.
    """

    tensor: torch.Tensor
    device: str
    layout: Layout | None


class Sharded(Form):
    """A shard of the state on each rank: FSDP2 on a mesh of one dimension, HSDP on one of two.

    As in ``fully_shard`` the last dimension shards, and along the first of two there are replicas.

    Args:
        build: the user's: makes the objects, all modules with ``fully_shard(..., mesh=mesh)``.
        mesh: of this iteration.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: it has more than two dimensions, or this rank is not in it.
    """

    def __init__(self, build: Callable[[], Objects], mesh: DeviceMesh) -> None:
        super().__init__(build)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh={mesh!r} must be a DeviceMesh, not {type(mesh).__name__}; pass this iteration's, from "
                "torch.distributed.device_mesh.init_device_mesh"
            )
        if mesh.ndim > 2:
            raise ValueError(
                f"mesh={mesh} has {mesh.ndim} dimensions; pass one of one dimension (FSDP2) or two (HSDP: "
                "replicas, shards). Tensor or pipeline parallelism is not supported beside them"
            )
        place = mesh.get_coordinate()
        if place is None:
            raise ValueError(f"mesh={mesh} does not have this rank; pass one of all active ranks")
        self.shard: Hashable = f"shard {place[-1]} of {mesh.size(mesh.ndim - 1)}"
        self._mesh = mesh

    def build(self) -> Objects:
        """See `Form`.

        Raises:
            ValueError: a parameter is not sharded, or on another mesh.
        """
        objects = self._build()
        self._capture(objects)
        return objects

    def rebind(self, objects: Objects) -> Objects:
        """See `Form`. Gradients stay behind, with the old objects."""
        return self.adopt(None, self.export(objects))

    def export(self, objects: Objects) -> Any:
        """See `Form`."""
        names = {id(parameter): name for name, parameter in self.parameters(objects)}
        with torch.no_grad():
            return {name: self._export(value, names) for name, value in objects.items()}

    def adopt(self, objects: Objects | None, state: Any) -> Objects:
        """See `Form`. The objects are always new ones: those that are given may be of an old mesh.

        Raises:
            RuntimeError: ``build`` cannot run on the meta device, or something has stayed there.
        """
        # An update of old objects in this iteration has filled DTensor's caches with the old mesh again.
        forget_old_ranks()
        objects = self._build_on_meta()
        for name, module in modules(objects):
            self._fill_module(module, self._together(state[name]))
        self._capture(objects)
        parameters = dict(self.parameters(objects))
        for name, optimizer in optimizers(objects):
            _fill_optimizer(optimizer, self._together(state[name]), parameters)
        for name, value in objects.items():
            if not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                value.load_state_dict(self._together(state[name]))
        _check_not_on_meta(objects)
        return objects

    def parameters(self, objects: Objects) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """See `Form`. Between forward and backward a module itself may name the unsharded ones instead."""
        for name, module in modules(objects):
            for inner, parameter in vars(module)[_CAPTURED].items():
                yield f"{name}.{inner}", parameter

    def _capture(self, objects: Objects) -> None:
        for _, module in modules(objects):
            vars(module)[_CAPTURED] = dict(module.named_parameters())
        for name, parameter in self.parameters(objects):
            if not isinstance(parameter, DTensor):
                raise ValueError(
                    f"build(): the parameter {name!r} is not sharded; apply fully_shard(module, mesh=mesh) "
                    "to all modules that build() returns, or leave out mesh= if each rank has the whole state"
                )
            if parameter.device_mesh != self._mesh:
                raise ValueError(
                    f"build(): the parameter {name!r} is on {parameter.device_mesh}, and mesh={self._mesh}; "
                    "pass the same mesh, made in this iteration, to fully_shard and here"
                )

    # ---- taking apart

    def _export(self, value: Any, names: dict[int, str]) -> Any:
        if isinstance(value, torch.nn.Module):
            return _apart(
                {
                    "parameters": vars(value)[_CAPTURED],
                    "buffers": dict(value.named_buffers()),
                    "attributes": dict(_attributes(value)),
                    "extra": dict(_extra_states(value)),
                }
            )
        if isinstance(value, torch.optim.Optimizer):
            groups = [
                {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
                for group in value.param_groups
            ]
            state = {names.get(id(key), key): each for key, each in value.state.items()}
            return _apart({"groups": groups, "state": state})
        return _apart(value.state_dict())

    # ---- putting together

    def _build_on_meta(self) -> Objects:
        try:
            with torch.device("meta"):
                return self._build()
        except Exception as error:
            raise RuntimeError(
                "build() failed on the meta device, where it is called for a state that is there already: "
                f"{error}. Tensors have no values there. Give those whose values build() reads a device "
                '(torch.tensor(1e-3, device="cpu")), and load checkpoints in restore='
            ) from error

    def _together(self, value: Any) -> Any:
        if isinstance(value, Local):
            tensor = value.tensor
            if tensor.device.type != value.device:
                tensor = tensor.to(value.device)
            if value.layout is None:
                return tensor
            placements, shape, stride = value.layout
            return DTensor.from_local(
                tensor, self._mesh, placements, run_check=False, shape=shape, stride=stride
            )
        return _in_containers(value, self._together)

    def _fill_module(self, module: torch.nn.Module, state: dict[str, Any]) -> None:
        values = dict(state["extra"])
        for first, names in _names(module.named_parameters(remove_duplicate=False)):
            # One object under all its names, so that tied weights stay tied.
            values.update(
                dict.fromkeys(names, torch.nn.Parameter(state["parameters"][first], requires_grad=False))
            )
        module.load_state_dict(values, strict=False, assign=True)
        aliases = dict(_names(module.named_buffers(remove_duplicate=False)))
        for first, buffer in state["buffers"].items():
            for name in aliases.get(first, [first]):
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner)._buffers[leaf] = buffer
        for name, value in state["attributes"].items():
            owner, _, leaf = name.rpartition(".")
            vars(module.get_submodule(owner))[leaf] = value


def _apart(value: Any) -> Any:
    if isinstance(value, DTensor):
        layout = Layout(tuple(value.placements), value.shape, value.stride())
        local = value.to_local().detach()
        return Local(local, local.device.type, layout)
    if isinstance(value, torch.Tensor):
        return Local(value.detach(), value.device.type, None)
    return _in_containers(value, _apart)


def _in_containers(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same containers, with the function's results in them; anything else as it is."""
    if isinstance(value, dict):
        return {key: function(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    return value


def _names(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """For each object its first name and all its names."""
    found: dict[int, list[str]] = {}
    for name, value in pairs:
        found.setdefault(id(value), []).append(name)
    return ((names[0], names) for names in found.values())


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are neither parameters nor buffers."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}".removeprefix("."), value


def _extra_states(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{prefix}._extra_state".removeprefix("."), part.get_extra_state()


def _fill_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], parameters: dict[str, torch.nn.Parameter]
) -> None:
    for group in state["groups"]:
        group["params"] = [parameters[name] for name in group["params"]]
    optimizer.param_groups[:] = state["groups"]
    optimizer.state.clear()
    optimizer.state.update((parameters.get(name, name), each) for name, each in state["state"].items())


def _check_not_on_meta(objects: Objects) -> None:
    for name, value in objects.items():
        if isinstance(value, torch.nn.Module):
            parts = [(f"{name}.{prefix}".rstrip("."), vars(part)) for prefix, part in value.named_modules()]
        else:
            parts = [(name, value.state_dict())]
        for where, content in parts:
            path = _path_on_meta(content)
            if path is not None:
                raise RuntimeError(
                    f"{where}{path} has stayed on the meta device, where build() is called for a state that "
                    "is there already; make it a buffer, or give it a device= in build(), or let "
                    "load_state_dict() assign what it is given instead of copying it"
                )


def _path_on_meta(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return "" if value.is_meta else None
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in pairs:
        if isinstance(each, (torch.Tensor, dict, list, tuple)):
            path = _path_on_meta(each)
            if path is not None:
                return f".{key}{path}"
    return None
