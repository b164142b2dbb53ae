"""A rank that hangs, in whatever code of a call: it is ended at ``hard_timeout``, and the others go on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
from rank_harness import SETTINGS, Job, Rank, with_limits
from support.nightly import at_night

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.abort import Abort
from ft_wrapper.completion import Completion
from ft_wrapper.exception import RestartAbort
from ft_wrapper.finalize import Finalize
from ft_wrapper.health_check import HealthCheck
from ft_wrapper.initialize import Initialize
from ft_wrapper.rank_assignment import RankAssignment
from ft_wrapper.restart.settings import default_assignment
from ft_wrapper.terminate import Terminate

LIMITS = {"soft_timeout": 1.5, "hard_timeout": 3.0, "heartbeat_timeout": 6.0, "barrier_timeout": 8.0}

#: What is replaced by a function that does not return, though it is none of the user's.
REPLACED = {
    "the group that is kept": "ft_wrapper.torch_groups.kept.KeptGroup.close",
    "compiled code": "ft_wrapper.torch_groups.caches.reset_compiled_code",
    "aborted sockets": "ft_wrapper.restart.call.close_aborted_sockets",
    "the cache of the device": "torch.cuda.empty_cache",
    "the device": "ft_wrapper.torch_groups.device.take_device",
    "the user's signals": "ft_wrapper.monitor.signals.KeptHandlers.put_back",
}
PLUG_INS = ("initialize", "health_check", "abort", "finalize", "rank_assignment", "completion", "terminate")
PLACES = [*PLUG_INS, "on_restart", "a destructor", *REPLACED]

is_armed = False


def holds_the_gil(slot: int) -> bool:
    return slot % 2 == 0


def stuck(*_: Any, **__: Any) -> None:
    """A C call that never returns: with the GIL or without."""
    if not is_armed:
        return
    library = ctypes.PyDLL(None) if holds_the_gil(int(os.environ["LOCAL_RANK"])) else ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


class PlugIn(Initialize, HealthCheck, Abort, Finalize, Completion, Terminate):
    """One of any kind."""

    def __call__(self, state: Any) -> Any:
        stuck()
        return state


class Assigns(RankAssignment):
    """As the default."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def __call__(self, ctx: Any) -> Any:
        if self.hangs:
            stuck()
        return default_assignment(None)(ctx)


class Cycle:
    """What the collector alone frees."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        stuck()


def hangs(rank: Rank, places: list[str]) -> Any:
    """Each slot but 0 hangs at a place of its own, once it has been in the function."""
    global is_armed
    place = ("none", *places)[rank.slot]
    settings: dict[str, Any] = {**SETTINGS, **LIMITS}
    if place in PLUG_INS:
        settings[place] = PlugIn()
    elif place == "on_restart":
        settings[place] = stuck
    elif place in REPLACED:
        mock.patch(REPLACED[place], stuck).start()
    elif place == "a destructor before the call":
        gc.disable()  # or it may be there before this process has joined
        is_armed = True
        Cycle()
    # The same on all ranks.
    settings["rank_assignment"] = Assigns(place == "rank_assignment")

    @Wrapper(**with_limits(**settings, max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> int:
        global is_armed
        # These fail again: another rank's fault may have come before their own.
        fails = place in ("terminate", "the cache of the device")
        if not fails and (is_armed or (place == "none" and call_wrapper.iteration > 0)):
            return call_wrapper.iteration
        is_armed = place != "none"
        if place == "a destructor":
            gc.disable()  # else another thread may be the one that collects
            Cycle()
        if place in ("completion", "the group that is kept"):
            return 0
        if place == "terminate":
            raise RestartAbort("it leaves")
        if place == "the cache of the device":
            raise torch.cuda.OutOfMemoryError("none is left")
        raise ValueError("told to")

    return train()


def catches_all(rank: Rank) -> None:
    @Wrapper(
        **{
            **SETTINGS,
            "soft_timeout": 1.0,
            "hard_timeout": 2.0,
            "heartbeat_timeout": 3.5,
            "barrier_timeout": 4.0,
        }
    )
    def train() -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(600)

    train()


def test_ranks_that_all_catch_what_interrupts_them_are_ended(job: Job) -> None:
    job.start(2, catches_all)
    job.wait_for_end()
    for slot in range(2):
        assert job[slot].code < 0, "it ended by itself"
        log = job[slot].output.with_name(f"monitor-of-{job[slot].output.name}").read_text()
        (line,) = [line for line in log.splitlines() if ": its process is ended" in line]
        assert "did not leave the function within barrier_timeout=4 s, though interrupted" in line
        assert " stood at test_watched_places.py:" in line


def raises_once(rank: Rank) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> float:
        if call_wrapper.iteration == 0:
            if rank.slot == 0:
                raise ValueError("told to")
            rank.train()
        return call_wrapper._call.own.memory.leave_stamp

    return train()


def test_no_rank_is_still_to_leave_once_it_has_entered_again(job: Job) -> None:
    """Neither the one that left by itself, before it was asked to, nor the other one."""
    job.start(2, raises_once)
    job.wait_for_end()
    assert [job[slot].value for slot in (0, 1)] == [0.0, 0.0]


@pytest.mark.parametrize(
    "places", [PLACES, *at_night("each place is there always", [(PLACES[1:],)])], ids=["all", "shifted"]
)
def test_a_rank_that_hangs_anywhere_is_ended(job: Job, places: list[str]) -> None:
    """In the second case those hold the GIL that do not in the first one."""
    job.start(1 + len(places), hangs, places)
    job.wait_for_end()
    for slot, place in enumerate(places, start=1):
        assert job[slot].code < 0, f"{place}: it ended by itself"
        log = job[slot].output.with_name(f"monitor-of-{job[slot].output.name}").read_text()
        (line,) = [line for line in log.splitlines() if ": its process is ended" in line]
        # A rank that leaves the job may be seen to be left out before its hard_timeout.
        left_out = place == "terminate" and "though the next iteration began without it" in line
        what = "held the GIL" if holds_the_gil(slot) else "made no progress"
        assert left_out or f"{what} for hard_timeout=3 s and stood " in line, place
        if place != "abort":  # the main thread waits for that
            assert "test_watched_places.py:" in line and " in stuck: " in line, place
        elif not holds_the_gil(slot):
            assert " in _settle: " in line
    assert job[0].value > 0


def test_a_rank_that_hangs_before_it_has_joined_is_ended(job: Job) -> None:
    job.start(2, hangs, ["a destructor before the call"])
    job.wait_for_end()
    assert job[1].code < 0 and job[0].error == "RestartTimeout"
