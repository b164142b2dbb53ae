"""A state in shards, as ``fully_shard`` makes them: local tensors outlive the mesh that they were made on.

An FSDP2 module keeps its iteration's process groups in many places. So it is not mended but built again, on
the meta device, where that costs neither memory nor time for values, and takes the local tensors over.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ..torch_groups.caches import clear_caches
from .form import Form, Objects, filled, parts
from .tree import Flat, named

# On the module, so that they go with it. It refers to them anyway, and they may refer to it.
_CAPTURED = "_ft_wrapper_parameters"


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

    is_sharded = True

    def __init__(self, build: Callable[[], Objects], mesh: DeviceMesh) -> None:
        super().__init__(build)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh={mesh!r} must be a DeviceMesh; pass this iteration's init_device_mesh(…)")
        if mesh.ndim > 2:
            raise ValueError(
                f"mesh={mesh} has {mesh.ndim} dimensions; pass one of one dimension (FSDP2) or two (HSDP)"
            )
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
        objects = self._build()
        self._capture(objects)
        return objects

    def rebind(self, objects: Objects) -> Objects:
        """See `Form`. Gradients stay behind, with the old objects."""
        return self.adopt(objects, self.export(objects))

    def adopt(self, objects: Objects, flat: Flat) -> Objects:
        """See `Form`. The objects are always new ones: those that are given may be of an old mesh.

        Raises:
            RuntimeError: ``build`` cannot run on the meta device, or something has stayed there.
        """
        # An update of old objects in this iteration has filled DTensor's caches with the old mesh again.
        clear_caches()
        objects = self._build_on_meta()
        self._capture(objects)
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

    def _capture(self, objects: Objects) -> None:
        for name, value in objects.items():
            if isinstance(value, torch.nn.Module):
                found = super().parameters({name: value})
                vars(value)[_CAPTURED] = {key.removeprefix(f"{name}."): each for key, each in found.items()}
        for name, parameter in self.parameters(objects).items():
            if not isinstance(parameter, DTensor):
                raise ValueError(
                    f"build(): {name!r} is not sharded; apply fully_shard(module, mesh=mesh), or no mesh="
                )
            if parameter.device_mesh != self._mesh:
                raise ValueError(
                    f"{name!r} is on {parameter.device_mesh}, and mesh={self._mesh}; pass the same mesh"
                )

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
        if not isinstance(tensor, DTensor):
            return tensor, None
        return tensor.to_local().detach(), (tuple(tensor.placements), tensor.shape, tensor.stride())

    def together(self, tensor: torch.Tensor, layout: Any) -> torch.Tensor:
        """See `Form`."""
        if layout is None:
            return tensor
        placements, shape, stride = layout
        return DTensor.from_local(tensor, self._mesh, placements, run_check=False, shape=shape, stride=stride)


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
