"""A device without memory left: how that is told, and what a process gives back after it."""

import re

import torch

from .exception import in_one_line

# What torch's allocators say, of CUDA and ROCm (free and in use are told there alone) and of XPU.
_SIZE = r"([\d.]+ \w+)"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"GPU (\d+) has a total capacity of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")


def has_run_out(error: BaseException | None) -> bool:
    """Whether an exception is torch's ``OutOfMemoryError``, or was raised from one."""
    return _out_of_memory(error) is not None


def in_words(error: BaseException, step: int | None) -> str:
    """Says that the device's memory ran out, and how much there was, if torch has said so.

    Args:
        error: of which `has_run_out` holds.
        step: in which it was raised; None if that is not known.
    """
    where = "" if step is None else f" in step {step}"
    return f"ran out of device memory{where}: {_how_much(in_one_line(_out_of_memory(error) or error))}"


def give_back() -> None:
    """Gives the device back what torch's allocator keeps for later; does nothing where CUDA is not in use.

    The allocator itself needs no such thing. NCCL's buffers, and other processes on the device, do.
    """
    torch.cuda.empty_cache()


def _out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def _how_much(said: str) -> str:
    tried, capacity = _TRIED.search(said), _CAPACITY.search(said)
    if tried is None:
        return said
    words = f"tried to allocate {tried[1]}"
    if capacity is not None:
        free, in_use = _FREE.search(said), _IN_USE.search(said)
        had = f"{free[1]} free of {capacity[2]}" if free is not None else capacity[2]
        words += f"; GPU {capacity[1]} had {had}"
        words += "" if in_use is None else f", and this process held {in_use[1]}"
        words += "".join(f", process {pid} {size}" for pid, size in _OTHERS.findall(said))
    return words
