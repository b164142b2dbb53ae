"""Aborts that come while data is on its way: gloo must not lose a send, or a rank waits for ever.

About one of thousands is lost all the same, so one is let pass; shut down in both directions, one of ten to
twenty is. How many times is set by the environment variable FT_WRAPPER_TEST_ABORTS.
"""

from __future__ import annotations

import collections
import os
import random
import threading
import time
from datetime import timedelta
from typing import Any

import abort_ranks
import torch
import torch.distributed as dist
from abort_ranks import MOST_ABORTS

from ft_wrapper.abort import close_aborted_sockets
from ft_wrapper.torch_groups.gloo import shut_down_gloo_sockets

CYCLES = int(os.environ.get("FT_WRAPPER_TEST_ABORTS", "0"))
MAY_BE_LOST = 1 + CYCLES // 500
AGAIN = 0.25  # seconds, as in the wrapper
LOST = timedelta(seconds=6)
"""Who waits for a lost send waits for so long, and then gets an error that says so."""


def freed_or_lost(error: RuntimeError) -> str:
    return "lost" if "Timed out" in str(error) else "freed"


def test_groups_within_one_process() -> None:
    """No interpreter's lock, nor processes, in the way: many aborts, and all ranks at the same moment."""
    seen: collections.Counter[str] = collections.Counter()
    descriptors = set()
    dice = random.Random(1)
    for cycle in range(CYCLES or 40):
        store = dist.HashStore()
        groups: dict[int, dist.ProcessGroupGloo] = {}

        def make(rank: int, store: dist.HashStore = store, groups: Any = groups) -> None:
            groups[rank] = dist.ProcessGroupGloo(store, rank, 3, LOST)

        def work(rank: int, stops_early: bool, groups: Any = groups) -> None:
            data = torch.ones(130_000)
            try:
                for count in range(1_000_000):
                    if stops_early and count == 3:
                        return
                    groups[rank].allreduce([data]).wait()
            except RuntimeError as error:
                seen[freed_or_lost(error)] += 1

        early = dice.random() < 0.5
        makers = [threading.Thread(target=make, args=(rank,)) for rank in range(3)]
        workers = [threading.Thread(target=work, args=(rank, early and rank == 0)) for rank in range(3)]
        for thread in makers:
            thread.start()
        for thread in makers:
            thread.join()
        for thread in workers:
            thread.start()
        time.sleep(dice.random() * 0.01)  # the moment is what is varied
        shut_down_gloo_sockets()
        for thread in workers:
            while thread.is_alive() and MOST_ABORTS > 1:  # this torch: again and again, as the wrapper does
                thread.join(AGAIN)
                shut_down_gloo_sockets()
            thread.join(2 * LOST.total_seconds())
            assert not thread.is_alive()
        groups.clear()
        close_aborted_sockets()
        if cycle > 2:
            descriptors.add(len(abort_ranks.fds()))
    assert seen["freed"] > 0
    assert seen["lost"] <= MAY_BE_LOST, f"sends were lost: {seen}"
    assert len(descriptors) == 1
