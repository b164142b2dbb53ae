"""A killed process is started again and takes part again: real processes, a real store, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import TIMEOUT, Job, Rank
from rejoin_job import Training, hold, trains
from support.nightly import at_night

from ft_wrapper.protocol import keys
from ft_wrapper.store import EtcdStore, StoreMixin, TCPStore
from ft_wrapper.torch_groups import warm_up

# ---- ranks 0 to 2 active, rank 3 spare


def test_killed_ranks_come_back_after_the_others_have_gone_on(run: Training, job: Job) -> None:
    # Held, so that two deaths make one restart.
    # A window in which also a slow machine starts both.
    run.start(4, active_world_size=3, on_join="now", join_window=4.0, held=2)
    job.expect("in", 0, 1, 2, n=0)
    run.abort(0, 1)
    job.tell("go on", 2)
    job.expect("in", 2, 3, n=1, world=2)
    job.start_again(0, 1)
    # They have their predecessors' places again, and the spare is a spare.
    job.expect("in", 0, 1, 2, n=2, world=3)
    run.finish()
    run.check(2, {0: 2, 1: 2})
    assert [job[slot].value for slot in range(4)] == [[2, 0, 3], [2, 1, 3], [2, 2, 3], None]


def test_killed_ranks_come_back_before_the_others_go_on(run: Training, job: Job) -> None:
    """The spare is warm, and steps in; the first new process is the next spare."""
    run.start(4, active_world_size=3, held=2)
    job.expect("in", 0, 1, 2, n=0)
    run.abort(0, 1)
    job.start_again(0, 1)
    run.await_join(0, 0, 1)
    job.tell("go on", 2)
    job.expect("in", 1, 2, 3, n=1, world=3)
    run.finish()
    run.check(1, {0: 1, 1: 1})
    assert [job[slot].value for slot in range(4)] == [None, [1, 1, 3], [1, 2, 3], [1, 0, 3]]


def makes_its_context(rank: Rank, folder: str, settings: dict[str, Any]) -> Any:
    """CUDA is a fake, and a context is there only once the call ends."""
    ends = threading.Event()
    zeros, await_context = torch.zeros, warm_up.await_early_context

    def zeros_somewhere(*size: Any, device: Any = None, **how: Any) -> torch.Tensor:
        if str(device).startswith("cuda"):
            rank.say("context", device=device)
            assert ends.wait(TIMEOUT)
            rank.say("made")
            device = None
        return zeros(*size, device=device, **how)

    def await_it() -> None:
        ends.set()
        await_context()

    patches: Any = torch, torch.backends.cuda, torch.cuda, warm_up
    patches[0].zeros = zeros_somewhere
    patches[1].is_built = lambda: True
    patches[2].device_count = lambda: 2
    patches[3].await_early_context = await_it
    patches[3].announce_cuda = lambda store: store.set(keys.CUDA, "2")
    return trains(rank, folder, settings)


def test_a_new_process_makes_its_context_while_the_others_leave_and_holds_up_no_one(
    run: Training, job: Job
) -> None:
    run.env["LOCAL_RANK"] = "1"
    run.start(3, makes_its_context, held=2)
    job.expect("in", 0, 1, 2, n=0)
    run.abort(1)
    job.start_again(1)
    job.expect("context", 1, device="cuda:1")
    run.await_join(0, 1)
    job.tell("go on", 2)
    job.expect("in", 0, 1, 2, n=1, world=3)
    assert not job[1].said("made")
    run.finish()
    run.check(1, {1: 1})
    assert [len(job[slot].said("made")) for slot in range(3)] == [0, 1, 0]


# ---- the proposer dies


def dies_proposing(rank: Rank, folder: str, settings: dict[str, Any], after: bool) -> Any:
    """Slot 2 leaves iteration 0 last, so it proposes; it dies right before or after it moves head.

    Its next process does not, though it may move head from there.
    """
    has_died = Path(folder, "proposer-died")
    if rank.slot == 2 and not has_died.exists():
        hold(rank)
        # On etcd head moves in one transaction with all that belongs to it.
        owner, name = (EtcdStore, "execute") if rank.store == "etcd" else (TCPStore, "_call")
        operation = getattr(owner, name)

        def dies(store: StoreMixin, *arguments: Any) -> Any:
            is_it = "0:1:" in str(arguments) and keys.HEAD in str(arguments)
            if is_it:
                has_died.touch()
            if is_it and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            done = operation(store, *arguments)
            if is_it:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        setattr(owner, name, dies)
    return trains(rank, folder, settings)


@pytest.mark.parametrize("after", [False, True])
def test_the_proposer_is_killed_while_it_advances_and_comes_back(
    run: Training, job: Job, after: bool
) -> None:
    run.start(4, dies_proposing, after, active_world_size=3, on_join="now", join_window=4.0)
    job.expect("in", 0, 1, 2, n=0)
    run.abort(1)
    run.await_gone(0, 3)  # 0 and 3 have left, and 1 is known to be dead: else its monitor may propose
    job.tell("arrive", 2)
    job.wait_for_end(2)
    # Killed after it had moved head, it is a member of iteration 1, which ends by that.
    gone = 2 if after else 1
    job.expect("in", 0, 3, n=gone, world=2)
    job.start_again(1, 2)
    job.expect("in", 0, 1, 2, n=gone + 1, world=3)
    run.finish()
    run.check(gone + 1, {1: gone + 1, 2: gone + 1})


# ---- paused processes

PAUSE = {
    # Longer than any pause.
    "soft_timeout": 80.0,
    "hard_timeout": 90.0,
    "barrier_timeout": 100.0,
    "heartbeat_interval": 0.1,
    "heartbeat_timeout": 2.0,
    "monitor_process_interval": 0.1,
    "active_world_size": 3,
    "on_join": "now",
}
EVERY_TIMEOUT = {
    **PAUSE,
    "soft_timeout": 3.5,
    "hard_timeout": 4.5,
    "barrier_timeout": 6.0,
    "monitor_thread_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}


@pytest.mark.parametrize(
    ("is_replaced", "hard"),
    [(False, False), (True, False), *at_night("softer settings run always", [(True, True)])],
)
def test_a_paused_host_never_comes_back_as_what_it_was(
    run: Training, job: Job, is_replaced: bool, hard: bool
) -> None:
    # It is paused outside gloo, which may lose a write to a peer that has gone meanwhile, and hang: then its
    # monitor would end it.
    run.start(4, waits=1, **(EVERY_TIMEOUT if hard else PAUSE))
    job.expect("in", 0, 1, 2, n=0)
    paused, monitor = job[1], job.monitors()[1]
    for pid in (monitor, paused.pid):
        os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    job.expect("in", 0, 2, 3, n=1, world=3)
    if is_replaced:
        job.start_again(1)
        job.expect("in", 0, 1, 2, n=2, world=3)
    else:
        job.forget(1)
    if hard:
        time.sleep(max(0.0, since + EVERY_TIMEOUT["hard_timeout"] + 0.1 - time.monotonic()))
    os.kill(monitor, signal.SIGCONT)
    with contextlib.suppress(ProcessLookupError):  # in the hard case its monitor may be quicker
        os.kill(paused.pid, signal.SIGCONT)
    run.await_end_of(paused)
    assert run.saw(paused) == [0]
    if not hard:
        assert paused.error == "RankDiscarded"
        host = os.uname().nodename
        assert (f"taken over by process {job[1].pid} on {host}" if is_replaced else "left out") in paused.text
    # It has ended no iteration of the others: they have been in the same one ever since.
    run.finish()
    run.check(2 if is_replaced else 1, {1: 2})
