"""Torch's own switches that outlive the function, and how they are put back before it is entered again.

A switch that the function turns off for a while, gradients say, stays off if an exception or an interrupt
comes meanwhile. The next entry would fail for a reason that has nothing to do with the fault, or go on with
other numbers. A `TorchState` is made before the first entry; its `restore` brings back what was there.

Only what was seen left behind is looked at; how often is said beside it, before interrupts waited for a safe
point (`ft_wrapper.monitor.safe_points`). Since then an interrupt has left none of these, 0 of 10,010. Nor has
it left what is not looked at: modes for functions and dispatch, the default device, cudnn's precision; nor,
0 of 400 each, inference mode, autocast, saved-tensor hooks, parametrize's cache, functorch's levels, forward
AD, anomaly detection, multithreaded backward, mkldnn's switches.

What is the user's stays as the function left it: the environment, standard output, warning filters, random
numbers. Names differ between versions of torch: what this one does not have is left out.
"""

import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

_C: Any = torch._C

# Of torch._C: what a person calls it, its getter and its setter.
_SWITCHES = (
    ("gradient mode", "is_grad_enabled", "_set_grad_enabled"),  # 107 of 800
    ("default dtype", "get_default_dtype", "_set_default_dtype"),  # 12 of 300
    # cudnn.flags(): 68 of 300
    ("cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("cudnn.benchmark_limit", "_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    ("cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    # sdpa_kernel(): 33 of 300
    ("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("math attention", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("memory-efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("cudnn attention", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("overrideable attention", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("order of attentions", "_get_sdp_priority_order", "_set_sdp_priority_order"),
)


class TorchState:
    """What torch's switches were, of the calling thread and of the process, when this was made."""

    def __init__(self) -> None:
        self._values = _values()
        self._logged: set[str] = set()

    def restore(self) -> list[str]:
        """Puts back what has changed since, and logs each thing once; to be called in the same thread.

        Returns:
            The names of what had changed.
        """
        now = _values()
        changed = [name for name, value in self._values.items() if now[name] != value]
        with _C.DisableTorchFunction():  # a function mode from before the call is not asked
            for name, _, setter in _SWITCHES:
                if name in changed:
                    getattr(_C, setter)(self._values[name])
        if fresh := [name for name in changed if name not in self._logged]:
            self._logged.update(fresh)
            log.warning(
                "the function left torch's state changed; put back, now and at each restart: %s. What is to "
                "hold in every iteration belongs into the function, or before its call",
                ", ".join(fresh),
            )
        return changed


def _values() -> dict[str, Any]:
    """The value of each switch, by what a person calls it."""
    there = [one for one in _SWITCHES if hasattr(_C, one[1]) and hasattr(_C, one[2])]
    return {name: getattr(_C, getter)() for name, getter, _ in there}
