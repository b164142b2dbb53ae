"""Begins a step of a framework's loop, and says whether its end should be saved because of a notice."""

from ..wrapper import CallWrapper


def begins_noticed(call_wrapper: CallWrapper, step: int) -> bool:
    """Reports a step, as ``call_wrapper.ping``; returns whether all ranks see a new notice from here on."""
    before = call_wrapper.notice
    call_wrapper.ping(step)
    notice = call_wrapper.notice
    return notice is not None and (before is None or before.id != notice.id)
