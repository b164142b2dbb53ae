"""What the function can do with its CallWrapper, and wrapped calls that follow each other."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.store import TCPStoreServer
from ft_wrapper.testing.etcd_server import free_port

# ---- hang protection and ping


def is_unprotected(rank: Rank) -> Any:
    settings = {**SETTINGS, "soft_timeout": 1.5, "hard_timeout": 2.0}

    @Wrapper(**settings)
    def train(call_wrapper: CallWrapper) -> int:
        if rank.slot == 0:
            with call_wrapper.disable_hang_protection(), call_wrapper.disable_hang_protection():
                time.sleep(3.0)  # a hang, were it not announced
            return call_wrapper.iteration
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            time.sleep(0.02)
        return call_wrapper.iteration

    return train()


def test_hang_protection_can_be_suspended(job: Job) -> None:
    job.start(2, is_unprotected)
    assert job.wait() == [0, 0]


def stops_pinging(rank: Rank) -> Any:
    settings = {**SETTINGS, "soft_timeout": 1.5}

    @Wrapper(**settings)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0:
            call_wrapper.ping()
            rank.train()  # runs bytecode, but makes no progress of its own
        if call_wrapper.iteration == 1:
            until = time.monotonic() + 3.0
            while time.monotonic() < until:
                call_wrapper.ping()
                time.sleep(0.02)
        return [call_wrapper.iteration, [r.interruption.name for r in call_wrapper.faults]]

    return train()


def test_who_stops_pinging_is_restarted(job: Job) -> None:
    job.start(1, stops_pinging)
    assert job.wait() == [[1, ["SOFT_TIMEOUT"]]]


# ---- numbers and faults


def counts(rank: Rank, rejoin: bool) -> Any:
    settings = {**SETTINGS, "rejoin": rejoin}
    seen: list[int] = []
    kinds: list[Any] = []

    @Wrapper(**settings)
    def train(call_wrapper: CallWrapper, faults: int) -> None:
        first = not seen or len(seen) == 3
        seen.append(call_wrapper.iteration)
        assert call_wrapper.state.iteration == seen[-1]
        kinds.append([[record.rank, record.interruption.name] for record in call_wrapper.faults])
        if first:
            entered.append(seen[-1])
        if seen[-1] - entered[-1] < faults:
            call_wrapper.store.barrier([int(os.environ["RANK"])], "both are in", 2, timedelta(minutes=1))
            if os.environ["RANK"] == "1":
                raise ValueError
            rank.hang()

    entered: list[int] = []
    train(faults=2)
    train(faults=1)
    return [seen, kinds]


@pytest.mark.parametrize(("rejoin", "announced"), [(True, False), (True, True), (False, True)])
def test_the_numbers_of_the_iterations(job: Job, rejoin: bool, announced: bool) -> None:
    with contextlib.ExitStack() as owned:
        env = {}
        if announced:
            _, env["FT_WRAPPER_STORE"] = owned.enter_context(job.announced_store())
        job.start(2, counts, rejoin, env=env)
        values = job.wait()
    # A store that the job hosts itself ends with each call.
    expected = [0, 1, 2, 3, 4] if rejoin and job.store_is_elsewhere else [0, 1, 2, 0, 1]
    fault = [[1, "EXCEPTION"]]
    assert values == [[expected, [[], fault, fault, [], fault]]] * 2


def is_called_again_by_the_survivors(rank: Rank) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper, dies: int) -> list[int]:
        if call_wrapper.iteration == 0 and dies >= 0:
            if rank.slot == dies:
                os._exit(9)
            rank.train()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return [call_wrapper.iteration, int(os.environ["RANK"]), int(total.item())]

    return [train(1), train(-1), train(0), train(-1)]


def test_calls_follow_each_other_without_the_lost_ranks(job: Job) -> None:
    job.start(4, is_called_again_by_the_survivors)
    job.wait_for_end()
    for rank, slot in enumerate((2, 3)):
        assert job[slot].value == [[1, rank + 1, 3], [0, rank + 1, 3], [1, rank, 2], [0, rank, 2]]


def hosts_its_store(rank: Rank, port: int) -> Any:
    @Wrapper(**SETTINGS, store_kwargs={"host_name": "127.0.0.1", "port": port})
    def train(call_wrapper: CallWrapper) -> int:
        return call_wrapper.iteration

    return train()


def test_the_store_of_store_kwargs_is_hosted_where_they_say(job: Job) -> None:
    port = free_port(consecutive=2)
    job.start(1, hosts_its_store, port, env={"MASTER_PORT": None, "MASTER_ADDR": None})
    assert job.wait() == [0]


def uses_a_store(rank: Rank, **settings: Any) -> Any:
    @Wrapper(**{**SETTINGS, "completion_timeout": 600.0, **settings})
    def train(call_wrapper: CallWrapper) -> int:
        return call_wrapper.iteration

    return train()


def test_no_rank_waits_for_the_end_of_a_store_that_is_not_the_jobs(job: Job) -> None:
    server = TCPStoreServer(0, "127.0.0.1")
    kwargs = {"host_name": "127.0.0.1", "port": server.port}
    try:
        job.start(2, uses_a_store, store_kwargs=kwargs)
        assert job.wait() == [0, 0]  # long before completion_timeout
    finally:
        server.close()


# ---- outside the main thread


def runs_in_a_thread(rank: Rank) -> Any:
    settings = {**SETTINGS, "soft_timeout": 1.5, "hard_timeout": 3.0}
    results: list[Any] = []

    @Wrapper(**settings)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        n = call_wrapper.iteration
        rank.say("in", n=n)
        if n == 0:
            if rank.slot == 1:
                assert rank.hear() == "fail"
                raise ValueError
            rank.train()
        if n == 1:
            until = time.monotonic() + 3.0
            while time.monotonic() < until:  # longer than soft_timeout: the main thread only waits
                time.sleep(0.02)
        return [n, threading.current_thread() is threading.main_thread()]

    thread = threading.Thread(target=lambda: results.append(train()))
    thread.start()
    thread.join()
    return results[0]


def test_the_function_may_run_outside_the_main_thread(job: Job) -> None:
    job.start(2, runs_in_a_thread)
    job.expect("in", n=0)
    job.tell("fail", 1)
    assert job.wait() == [[1, False], [1, False]]
