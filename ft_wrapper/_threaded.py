"""Calls that may hang, made in a thread of their own; and the GPU that they are about."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch

from .exception import TimeoutError


def call_with_timeout(fn: Callable[[], object], timeout: timedelta, name: str, what: str) -> None:
    """Calls a function in a daemon thread and waits for it.

    What the function raises is raised here. A thread that does not end in time is left behind: Python cannot
    end it, only the process can.

    Args:
        fn: what to call.
        timeout: how long to wait at the longest.
        name: name of the thread.
        what: what is being done, for the error.

    Raises:
        ft_wrapper.exception.TimeoutError: it took longer than ``timeout``.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            fn()
        except BaseException as ex:
            raised.append(ex)

    thread = threading.Thread(target=run, name=f"ft_wrapper.{name}", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise TimeoutError(f"{what} did not finish within timeout={timeout}")
    if raised:
        # Popped: the exception's traceback holds this frame, which would hold the exception.
        raise raised.pop()


def cuda_device() -> int | None:
    """Index of the GPU that this process uses; None where it has not used any so far.

    It is the one that ``LOCAL_RANK`` names, if the process sees it, else the current one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    local_rank = os.environ.get("LOCAL_RANK", "")
    # A launcher that shows each rank its own GPU only makes all of them number 0.
    if local_rank.isdecimal() and int(local_rank) < torch.cuda.device_count():
        return int(local_rank)
    return torch.cuda.current_device()
