"""Plug-ins that clean up after the function has left an iteration."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from .compose import PlugIn
from .settings import as_timeout, check_callable, check_kind
from .state import FrozenState
from .store.bounded import call_in_thread
from .torch_groups.device import cuda_device


class Finalize(PlugIn):
    """Base of the ``finalize`` plug-ins of `Wrapper`: prepares the process for the next iteration.

    It runs after a fault, between the function and the health check, and gets the rank's state in the
    iteration that has ended. Use it to drop global state and to wait for work that the function has started.
    If it raises, this rank ends with that error, and the other ranks go on.
    """


class ThreadedFinalize(Finalize):
    """Calls a function in a thread, with a timeout: if it hangs, this rank ends, and the other ranks go on.

    If the process uses a GPU, the thread uses the same one: the GPU that ``LOCAL_RANK`` names, else the
    current one. Errors of the function are raised; its result is dropped.

    Args:
        timeout: how long it may take: a ``timedelta`` or seconds.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``timeout`` is not positive.
    """

    def __init__(
        self,
        timeout: timedelta | float,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout = as_timeout("timeout", timeout)
        check_callable("fn", fn, "fn=torch.cuda.empty_cache")
        check_kind("args", args, Sequence | None, "a tuple, such as args=(value,)", but=str | bytes)
        check_kind("kwargs", kwargs, Mapping | None, "a dict, such as kwargs={'name': value}")
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """Calls the function and waits for it.

        Raises:
            ft_wrapper.exception.RestartTimeout: it took longer than ``timeout``. Its thread keeps running, so
                the process should end: this error ends it.
        """
        device = cuda_device()

        def call() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name = getattr(self.fn, "__qualname__", None) or repr(self.fn)
        what = f"{type(self).__name__} on rank {state.rank}: fn={name}"
        call_in_thread(call, what, self.timeout.total_seconds())
        return state
