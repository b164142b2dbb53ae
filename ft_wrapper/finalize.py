"""Plug-ins that clean up after the function has left an iteration."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from .settings import as_timeout, check_callable
from .state import FrozenState
from .store.bounded import call_in_thread
from .torch_groups import cuda_device


class Finalize(abc.ABC):
    """Base of the ``finalize`` plug-ins of `Wrapper`: makes the process ready for the next iteration.

    It runs after a fault, once the function has left and before the health check: the place to drop global
    state and to wait for what the function had started. What it raises ends this rank; the others go on.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Cleans up, or raises.

        Args:
            state: the rank's state in the iteration that is over.

        Returns:
            The state.
        """


class ThreadedFinalize(Finalize):
    """Calls a function in a thread of its own, so that a function that hangs ends this rank, not the job.

    Where the process uses a GPU, the thread does, too: the one that ``LOCAL_RANK`` names, else the current
    one. What the function raises is raised; what it returns is dropped.

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
        check_callable("fn", fn, "ThreadedFinalize(timeout=timedelta(seconds=10), fn=torch.cuda.empty_cache)")
        if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
            raise TypeError(f"args={args!r} must be a tuple, not {type(args).__name__}; pass args=(value,)")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(
                f"kwargs={kwargs!r} must be a dict, not {type(kwargs).__name__}; "
                "pass kwargs={'name': value}"
            )
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """Calls the function and waits for it.

        Args:
            state: the rank's state in the iteration that is over.

        Returns:
            The state.

        Raises:
            ft_wrapper.exception.TimeoutError: it took longer than ``timeout``. Its thread is left behind: the
                process should end, and this error ends it.
        """
        device = cuda_device()

        def call() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name = getattr(self.fn, "__qualname__", None) or repr(self.fn)
        call_in_thread(
            call,
            what=f"{type(self).__name__} on rank {state.rank}: fn={name}",
            seconds=self.timeout.total_seconds(),
        )
        return state
