"""The operation of ``torch.distributed`` that a thread is in, and how many operations each group has begun.

The thread's stack shows the operation, and torch's own counts the numbers: each group counts to match its
collectives. Torch's flight recorder also knows collectives that no stack shows, such as those of a backward
pass: an entry that is not retired has begun and has not ended.
"""

import bisect
import itertools
import math
import os
import pickle
import statistics
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch._C import _distributed_c10d

from ..monitor.evidence import StepTimings, Wait, Whereabouts
from ..monitor.frames import SourceLocation, current_frames, describe_stack, is_library, locations
from ..protocol.records import CollectivePosition, GroupSequence
from ..store.bounded import in_background
from .abort import backends_of, c10d

_COUNTED_WITHIN = 0.05  # seconds; a backend may hold a lock while it hangs
_MOST_GROUPS = 8
_LONGEST_NAME = 8  # some of torch's group names have 40 digits
# How much flight recorder remembers. A dump of torch's default, 2000, holds the GIL for 20 ms; of 64, 0.3 ms.
RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FEW_ENTRIES = "64"
# Modules at the root of a compilation; other modules of these packages also run compiled code.
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch._inductor.async_compile")
_TRITON = "triton.compiler"
# Modules whose objects wait for their process.
_PARENTS = ("subprocess", "multiprocessing.popen_fork")


def current_collective(thread: int) -> tuple[str, CollectivePosition] | None:
    """Describes what a thread is doing. It waits neither for a group's lock nor for the thread.

    Args:
        thread: the thread's ``threading.get_ident()``.

    Returns:
        A description like `ft_wrapper.monitor.frames.describe_thread`'s, but with the operation's number and
        group, and the same as data; None if there is no such thread.
    """
    frame = current_frames().get(thread)
    words = describe_stack(list(locations(frame)))
    if frame is None or words is None:
        return None
    operation = _operation(frame)
    # A list, since the thread may make groups meanwhile.
    names = [(group, _name(group, name)) for group, name in list(c10d._world.pg_names.items())]
    if operation is None:
        return words, CollectivePosition(counts=_counts(names[:_MOST_GROUPS]))
    group = operation.f_locals.get("group") or c10d._world.default_pg
    names.sort(key=lambda one: one[0] is not group)  # the operation's group first
    of = names[0][1] if names and names[0][0] is group else ""
    position = CollectivePosition(operation.f_code.co_name, of, _counts(names[:_MOST_GROUPS]))
    inner, *outer = locations(operation)
    return describe_stack([SourceLocation(inner.file, inner.line, str(position)), *outer]) or words, position


def _operation(frame: FrameType) -> FrameType | None:
    """The outermost operation of ``torch.distributed`` in a stack: operations on objects call others."""
    frames = [each for each, _ in traceback.walk_stack(frame) if each.f_code.co_filename == c10d.__file__]
    return next(filter(_is_operation, reversed(frames)), None)


def _is_operation(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name.startswith("_") or code.co_name == "destroy_process_group":
        return False
    return "group" in code.co_varnames[: code.co_argcount]


def _name(group: Any, name: object) -> str:
    said = str(getattr(group, "group_desc", ""))
    description = "" if said in ("", "undefined", "default_pg") else f" ({said})"
    return f"{str(name)[:_LONGEST_NAME]}{description}"


def _counts(names: list[tuple[Any, str]]) -> tuple[GroupSequence, ...]:
    """How many operations each group has begun; only of groups that count, and that answer at once."""
    found: list[GroupSequence] = []

    def ask() -> None:
        for group, name in names:
            try:
                number = int(group._get_sequence_number_for_group())
                found.append(GroupSequence(name, int(group.size()), number, _is_exact(group)))
            except Exception:
                continue  # not all backends count

    in_background("asking the groups for their numbers", ask).join(_COUNTED_WITHIN)
    return tuple(found)


def _is_exact(group: Any) -> bool:
    """Whether a group counts only collectives. NCCL does, and a group that is a Python class should."""
    return all(backend is group or backend.name() == "nccl" for backend in backends_of(group).values())


# ---- what a rank answers to its monitor under suspicion


def limit_recorder() -> None:
    """Makes flight recorder remember few collectives, unless the user has said how many; before any group."""
    if not any(name in os.environ for name in RECORDER_SIZE):
        os.environ[RECORDER_SIZE[0]] = _FEW_ENTRIES


def whereabouts(thread: int) -> Whereabouts:
    """Where a thread stands, to the monitor of this rank.

    Args:
        thread: the thread's ``threading.get_ident()``.
    """
    frame = current_frames().get(thread)
    stack = list(locations(frame))
    users = next((place for place in stack if not is_library(place.file)), None)
    begun, waits, inside, on_device = _recorded()
    operation = None if frame is None else _operation(frame)
    if not waits and operation is not None:
        waits = operation.f_code.co_name
    frames = [each for each, _ in traceback.walk_stack(frame)]
    return Whereabouts(
        threading.get_native_id(),
        "" if users is None else f"{users.file}:{users.line}",
        describe_stack(stack) or "",
        waits,
        inside,
        on_device,
        begun,
        any(_compiles(each) for each in frames),
        next(filter(None, map(_awaited_process, frames)), 0),
    )


def step_timings(begins: Sequence[tuple[int, float, float]]) -> StepTimings:
    """How long this rank took from the begin of each step to its first collective.

    Args:
        begins: of each step its number, its monotonic seconds, and the seconds of the vote before; in order.
    """
    ahead = time.time_ns() - time.monotonic_ns()  # the recorder has the clock
    times = sorted((entry["time_created_ns"] - ahead) * 1e-9 for entry in _entries())
    steps: dict[int, tuple[float, float, float]] = {}
    for (n, at, voted), (_, until, _) in itertools.pairwise([*begins, (0, math.inf, 0.0)]):
        first = bisect.bisect_left(times, at)
        if 0 < first < len(times) and times[first] < until:  # what came before may be forgotten
            steps[n] = at, times[first] - at, voted
    gaps = [later[0] - one[0] for one, later in itertools.pairwise(steps.values())]
    step = statistics.median(gaps) if gaps else 0.0
    measured = {n: (run_up, voted) for n, (_, run_up, voted) in steps.items()}
    return StepTimings(measured, step, len(times) / max(1, len(steps)))


def _entries() -> Sequence[Any]:
    """What flight recorder remembers; with an older torch nothing, so that the stack is all there is."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace", None)
    return () if dump is None else pickle.loads(dump(True, False, False))["entries"]


def _recorded() -> tuple[dict[str, int], str, Wait | None, bool]:
    """What flight recorder knows.

    Returns:
        By group the highest number that has begun; and of the oldest collective that has not ended its name,
        group and number, and whether it is on a device.
    """
    newest: dict[str, int] = {}
    begun: dict[str, int] = {}
    opened: list[tuple[str, Wait, bool]] = []
    for entry in _entries():
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["pg_id"] > newest.get(group, -1):  # of a restart: the names return, the ids never do
            newest[group], begun[group] = entry["pg_id"], 0
            opened = [one for one in opened if one[1][0] != group]
        if entry["pg_id"] == newest[group]:
            begun[group] = max(begun[group], number)
            if not entry["retired"]:
                backend, _, name = entry["profiling_name"].partition(":")
                opened.append((f"{name} #{number}", (group, number), backend == "nccl"))
    name, inside, on_device = opened[0] if opened else ("", None, False)
    return begun, name, inside, on_device


def _compiles(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module in _COMPILERS or module.startswith(_TRITON)


def _awaited_process(frame: FrameType) -> int:
    """The process for which a frame of Python's library or of torch's data loader waits; 0: for none."""
    if frame.f_globals.get("__name__") in _PARENTS:
        return getattr(frame.f_locals.get("self"), "pid", None) or 0
    if frame.f_code.co_name != "_try_get_data":
        return 0
    loader = frame.f_locals.get("self")
    try:
        number = loader._task_info[loader._rcvd_idx][0]  # type: ignore[union-attr]
        return int(loader._workers[number].pid)  # type: ignore[union-attr]
    except (AttributeError, IndexError, KeyError, TypeError):
        return 0
