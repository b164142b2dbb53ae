"""``DistributedDataParallel`` over a state's modules, made once in a process where that is possible."""

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_HAS_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel).parameters  # not torch 2.6
_DEFAULTS = {"init_sync": False} if _HAS_INIT_SYNC else {}


class DataParallel:
    """The DDP objects of a process, by the names of their modules, over the iterations of a call."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[DistributedDataParallel, dict[str, Any]]] = {}

    def over(
        self, name: str, module: nn.Module, options: dict[str, Any], group: Any
    ) -> DistributedDataParallel:
        """Takes up the one that was made in an earlier iteration, or makes one.

        One that lays out its buckets again after the first backward pass cannot stay: a rank that is new
        would have its gradients in others.

        Args:
            name: of the module.
            module: that of this iteration.
            options: for ``DistributedDataParallel``.
            group: the default process group, if it has stayed; else None.
        """
        ddp, its_options = self._kept.pop(name, (None, None))
        if group is None or ddp is None or ddp.module is not module or its_options != options:
            del ddp  # with its hooks, before another one gets its own
            ddp = DistributedDataParallel(module, **{**_DEFAULTS, **options})
        else:
            _reset(ddp, group)
        has_fixed_buckets = options.get("find_unused_parameters") and not options.get("static_graph")
        if group is not None and has_fixed_buckets and "process_group" not in options:
            self._kept[name] = ddp, options
        return ddp


def _reset(ddp: Any, group: Any) -> None:
    """Forgets the step that a fault has ended half-way."""
    ddp._update_process_group(group)  # resets the reducer, too
    ddp.training = ddp.module.training
    ddp.require_backward_grad_sync = True  # it may have been in no_sync()
    ddp.require_forward_param_sync = True
