"""The operation of ``torch.distributed`` that a thread is in, and how many operations each group has begun.

The thread's stack shows the operation. The numbers are torch's own: each group counts to match its
collectives. Flight Recorder would show the same and more. But it has to be switched on before the groups are
made, and dumps all operations that it remembers.
"""

import traceback
from types import FrameType
from typing import Any

from ..monitor.frames import SourceLocation, current_frames, describe_stack, locations
from ..protocol.records import CollectivePosition, GroupSequence
from ..store.bounded import in_background
from .abort import backends_of, c10d

_COUNTED_WITHIN = 0.05  # seconds; a backend may hold a lock while it hangs
_MOST_GROUPS = 8
_LONGEST_NAME = 8  # some of torch's group names have 40 digits


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
