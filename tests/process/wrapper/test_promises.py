"""What a user of the wrapper may count on: the promises of the restart loop, with real processes."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, with_limits

import ft_wrapper  # noqa: F401 (an annotation names it)
from ft_wrapper import CallWrapper, Limits, Wrapper
from ft_wrapper.exception import RankShouldRestart
from ft_wrapper.protocol.ends import Ends
from ft_wrapper.restart import resources
from ft_wrapper.restart.call import Call
from ft_wrapper.restart.on_restart import Reporter
from ft_wrapper.torch_groups import warm_up

# ---- 1: an Exception restarts all ranks, a BaseException ends its rank and restarts the others


def fails_in_turn(rank: Rank, rounds: int) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[int]:
        n, place, world = call_wrapper.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rank.say("in", n=n, rank=place, world=world)
        if n < rounds:
            if place == n % world:
                raise ValueError(f"round {n}")
            rank.hang()
        return [n, place, world]

    return train()


def test_an_exception_on_any_rank_restarts_all(job: Job) -> None:
    job.start(3, fails_in_turn, 4)
    assert job.wait() == [[4, slot, 3] for slot in range(3)]
    for slot in range(3):
        entered = [message["n"] for message in job[slot].said("in")]
        own = {n for n in range(4) if n % 3 == slot}  # one that is slow may be interrupted before it is in
        assert entered == sorted({*entered, *own, 4})


class OwnBaseException(BaseException):
    """A user's own."""


def leaves(rank: Rank, leaver: int) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0:
            if rank.slot == leaver:
                raise SystemExit(3) if leaver == 0 else OwnBaseException
            rank.hang()
        kinds = [[record.rank, record.interruption.name] for record in call_wrapper.faults]
        return [call_wrapper.iteration, os.environ["RANK"], os.environ["WORLD_SIZE"], kinds]

    return train()


@pytest.mark.parametrize(("leaver", "error", "code"), [(0, "SystemExit", 3), (1, "OwnBaseException", 1)])
def test_a_base_exception_ends_that_rank_and_restarts_the_others(
    job: Job, leaver: int, error: str, code: int
) -> None:
    job.start(3, leaves, leaver)
    job.wait_for_end()
    assert (job[leaver].error, job[leaver].code) == (error, code)
    others = [slot for slot in range(3) if slot != leaver]
    faults = [[leaver, "BASE_EXCEPTION"]]
    assert [job[slot].value for slot in others] == [[1, "0", "2", faults], [1, "1", "2", faults]]


def is_interrupted_from_outside(rank: Rank) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0:
            rank.say("in")
            rank.hang()
        return call_wrapper.iteration

    return train()


def test_ctrl_c_ends_that_rank(job: Job) -> None:
    job.start(2, is_interrupted_from_outside)
    job.expect("in")
    job.send_signal(0, signal.SIGINT)
    job.wait_for_end()
    assert job[0].error == "KeyboardInterrupt"
    assert job[1].value == 1


def swallows(rank: Rank) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0:
            if rank.slot == 1:
                assert rank.hear() == "go"
                raise ValueError
            try:
                rank.say("in")
                rank.hang()
            except RankShouldRestart:
                return -1  # not what the exception is for
            finally:
                rank.say("out")
        return call_wrapper.iteration

    return train()


def test_a_function_that_swallows_the_interruption_restarts_all_the_same(job: Job) -> None:
    job.start(2, swallows)
    job.expect("in", 0)
    job.tell("go", 1)
    assert job.wait() == [1, 1]
    assert job[0].said("out")


# ---- 2: plain init_process_group in every iteration, no key of an earlier one is seen


def makes_groups(rank: Rank, rounds: int) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[float]:
        n, place, world = call_wrapper.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if n < rounds and n % 2 == 1 and place == n % world:
            raise ValueError("before the group was made")  # the others wait in init_process_group
        is_given = n in (2, rounds)  # the iteration's store as an argument
        given = {"store": call_wrapper.store, "rank": place, "world_size": world} if is_given else {}
        dist.init_process_group("gloo", **given)
        assert (dist.get_rank(), dist.get_world_size()) == (place, world)
        group = dist.new_group([0, world - 1])
        default = dist.distributed_c10d._get_default_store()
        assert not default.check([f"seen by {place}"])
        assert not call_wrapper.store.check([f"seen by {place}"])
        default.set(f"seen by {place}", "1")
        call_wrapper.store.set(f"seen by {place}", "1")
        whole, ends = torch.ones(1), torch.ones(1)
        dist.all_reduce(whole)
        if place in (0, world - 1):
            dist.all_reduce(ends, group=group)
        if n < rounds and place == n % world:
            raise ValueError("in the midst")
        if n < rounds:
            while True:
                dist.all_reduce(whole)
        return [whole.item(), ends.item()]

    return train()


def test_a_plain_init_process_group_works_in_every_iteration(job: Job) -> None:
    job.start(3, makes_groups, 6)
    assert job.wait() == [[3.0, 2.0], [3.0, 1.0], [3.0, 2.0]]


def reads_the_variables(rank: Rank) -> Any:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    config = {"lr": 0.1}
    ports, given, asked = [], [], []
    own_address = resources.own_address

    def ask(towards: str) -> str:
        asked.append(towards)
        return own_address(towards)

    resources.own_address = ask

    @Wrapper(**SETTINGS)
    def train(
        config: dict[str, float], *rest: int, call_wrapper: CallWrapper | None = None, **more: str
    ) -> None:
        assert call_wrapper is not None
        given.append((id(config), rest, more))
        ports.append(os.environ["MASTER_PORT"])
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        os.environ["RANK"] = "nonsense of the function's own"
        if call_wrapper.iteration < 2:
            raise ValueError

    before = {name: os.environ.get(name) for name in names}
    train(config, 1, 2, name="x")
    assert {name: os.environ.get(name) for name in names} == before
    assert given == [(id(config), (1, 2), {"name": "x"})] * 3
    return [ports, asked[0]]


def test_the_arguments_stay_and_the_variables_lead_to_a_store_of_the_iteration(job: Job) -> None:
    """Rank 0's address is the one on its way to the launcher's MASTER_ADDR, whatever keeps the store."""
    job.start(1, reads_the_variables)
    [[ports, asked]] = job.wait()
    assert len({*ports}) == 3 and str(job.port) not in ports
    assert asked == "127.0.0.1"


# ---- 3: arguments, annotations, ways to write the decorator


ANNOTATIONS = {
    "class": CallWrapper,
    "Optional": Optional[CallWrapper],  # noqa: UP045
    "| None": CallWrapper | None,
    "None |": None | CallWrapper,
    "string": "CallWrapper",
    "string Optional": "Optional[CallWrapper]",
    "string | None": "CallWrapper | None",
    "string with module": "ft_wrapper.CallWrapper",
    "unknown to the runtime": "inprocess.CallWrapper",
    "unknown to the runtime, Optional": "typing_only.Optional[inprocess.CallWrapper]",
    "unknown to the runtime, | None": "inprocess.CallWrapper | None",
}


def fill_in(function: Any, annotation: Any, *args: Any, **kwargs: Any) -> None:
    """Calls a function whose argument ``wrapper`` has this annotation."""
    function.__annotations__ = {**function.__annotations__, "wrapper": annotation}
    wrapper, a, b = Wrapper(enabled=False)(function)(*args, **kwargs)
    assert isinstance(wrapper, CallWrapper), (function, annotation, wrapper)
    assert (a, b) == (1, 2), (function, a, b)


def test_the_argument_is_filled_in_by_its_annotation() -> None:
    """All spellings, and all places of the argument."""

    def first(wrapper: Any, a: int, b: int = 2) -> Any:
        return wrapper, a, b

    def middle(a: int, wrapper: Any = None, b: int = 2) -> Any:
        return wrapper, a, b

    def keyword_only(a: int, b: int = 2, *, wrapper: Any) -> Any:
        return wrapper, a, b

    def behind_defaults(a: int = 1, b: int = 2, wrapper: Any = None) -> Any:
        return wrapper, a, b

    class Trainer:
        def method(self, a: int, b: int = 2, wrapper: Any = None) -> Any:
            assert type(self) is Trainer
            return wrapper, a, b

    for annotation in ANNOTATIONS.values():
        fill_in(middle, annotation, 1)
    for function in (first, middle, keyword_only, behind_defaults):
        fill_in(function, CallWrapper, 1)
        fill_in(function, CallWrapper, 1, b=2)
        fill_in(function, CallWrapper, a=1)
    fill_in(first, CallWrapper, 1, 2)
    fill_in(middle, CallWrapper, 1, wrapper=None)
    fill_in(behind_defaults, CallWrapper, 1, 2, None)
    fill_in(behind_defaults, CallWrapper)
    fill_in(Trainer.method, CallWrapper, Trainer(), 1)


def test_call_wrapper_without_an_annotation_is_filled_in_by_its_name() -> None:
    def default(value: int, call_wrapper=None) -> Any:  # type: ignore[no-untyped-def]
        return isinstance(call_wrapper, CallWrapper)

    def plain(call_wrapper, value: int) -> Any:  # type: ignore[no-untyped-def]
        return isinstance(call_wrapper, CallWrapper)

    def another_is_annotated(value: int, call_wrapper=None, mine: CallWrapper | None = None) -> Any:  # type: ignore[no-untyped-def]
        return [call_wrapper, isinstance(mine, CallWrapper)]

    def annotated_otherwise(value: int, call_wrapper: str = "mine") -> Any:
        return call_wrapper

    def more(value: int, **call_wrapper: int) -> Any:
        return call_wrapper

    functions = (default, plain, another_is_annotated, annotated_otherwise, more)
    filled = [Wrapper(enabled=False)(function)(value=1) for function in functions]  # type: ignore[operator]
    assert filled == [True, True, [None, True], "mine", {}]


@Wrapper
def bare(value: int, call_wrapper: CallWrapper = None) -> tuple[int, int]:  # type: ignore[assignment]
    """Bare."""
    return value, call_wrapper.iteration


@Wrapper()
def with_brackets(value: int, call_wrapper: CallWrapper = None) -> tuple[int, int]:  # type: ignore[assignment]
    return value, call_wrapper.iteration


@Wrapper(soft_timeout=30.0, enabled=True)
def with_arguments(value: int, call_wrapper: CallWrapper = None) -> tuple[int, int]:  # type: ignore[assignment]
    return value, call_wrapper.iteration


def without_annotation(value: int, call_wrapper: str = "mine") -> tuple[int, str]:
    return value, call_wrapper


def calls_each_spelling(rank: Rank) -> Any:
    called = Wrapper()(without_annotation)
    return [bare(1), with_brackets(2), with_arguments(3), called(4)]


def test_all_ways_to_write_the_decorator(job: Job) -> None:
    assert bare.__name__ == "bare"
    assert bare.__doc__ == "Bare."
    job.start(1, calls_each_spelling)
    assert job.wait() == [[[1, 0], [2, 0], [3, 0], [4, "mine"]]]


def test_disabled_it_is_the_function_itself() -> None:
    assert Wrapper(enabled=False)(without_annotation) is without_annotation


# ---- 4: a blocked main thread is freed


def _receive(rank: Rank) -> None:
    rank.hear()


def _lock(rank: Rank) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _in_cleanup(rank: Rank) -> None:
    try:
        raise KeyError
    except KeyError:
        rank.hang()


BLOCKED: dict[str, Callable[[Rank], object]] = {
    "sleep": lambda rank: time.sleep(1000),
    "queue": lambda rank: queue.Queue[None]().get(),
    "simple queue": lambda rank: queue.SimpleQueue[None]().get(),
    "lock": _lock,
    "event": lambda rank: threading.Event().wait(),
    "socket": _receive,
    "busy": lambda rank: rank.train(),
    "except block": _in_cleanup,
}


def is_blocked(rank: Rank) -> Any:
    # Started here: a function that is interrupted while it starts a process leaves it running.
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        ways = [*BLOCKED.values(), lambda rank: sleeper.wait()]

        @Wrapper(**SETTINGS, limits=Limits(max_same_faults=None))
        def train(call_wrapper: CallWrapper) -> int:
            n = call_wrapper.iteration
            if n == len(ways):
                return n
            if rank.slot == 1:
                assert rank.hear() == "go"
                raise ValueError(n)
            try:
                rank.say("blocked", n=n)
                ways[n](rank)
            except RankShouldRestart:
                rank.say("freed", n=n)
                raise
            return -1

        try:
            return train()
        finally:
            sleeper.kill()


def test_a_blocked_thread_is_freed(job: Job) -> None:
    job.start(2, is_blocked)
    for n in range(len(BLOCKED) + 1):
        job.expect("blocked", 0, n=n)
        job.tell("go", 1)
        job.expect("freed", 0, n=n)
    assert job.wait() == [len(BLOCKED) + 1] * 2


def is_behind_a_hung_peer(rank: Rank) -> Any:
    settings = {"soft_timeout": 1.5, "hard_timeout": 10.0, "finalize": lambda state: rank.say("left")}

    @Wrapper(**with_limits(**{**SETTINGS, **settings}))
    def train(call_wrapper: CallWrapper) -> list[int]:
        dist.init_process_group("gloo")
        if call_wrapper.iteration == 0:
            if rank.slot == 2:
                rank.say("in")
                rank.hang()
            work = dist.all_reduce(torch.ones(1), async_op=True)
            rank.say("in")
            work.wait()
        total = torch.ones(1)
        dist.all_reduce(total)
        return [call_wrapper.iteration, int(total.item())]

    return train()


def test_a_collective_behind_a_stopped_peer_is_freed_before_that_is_ended(job: Job) -> None:
    job.start(3, is_behind_a_hung_peer)
    job.expect("in", 0, 1, 2)
    job.send_signal(2, signal.SIGSTOP)
    job.expect("left", 0, 1)
    assert job[2].code is None
    assert job.wait(killed=(2,)) == [[1, 2]] * 2


def waits_in_new_group(rank: Rank) -> Any:
    original = dist.distributed_c10d._new_process_group_helper

    def made(*args: Any, **kwargs: Any) -> Any:
        rank.say("making")
        return original(*args, **kwargs)

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[int]:
        if call_wrapper.iteration == 0:
            dist.init_process_group("gloo")
            if rank.slot == 1:
                assert rank.hear() == "go"
                raise ValueError
            dist.distributed_c10d._new_process_group_helper = made
            try:
                dist.new_group([0, 1])
            finally:
                dist.distributed_c10d._new_process_group_helper = original
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return [call_wrapper.iteration, int(total.item())]

    return train()


def test_a_group_that_waits_for_a_peer_is_freed(job: Job) -> None:
    job.start(2, waits_in_new_group)
    job.expect("making", 0)
    job.tell("go", 1)
    assert job.wait() == [[1, 2]] * 2


# ---- 5: a C call that never returns is ended at hard_timeout, and the others go on


def never_returns(rank: Rank, holding_the_gil: bool) -> Any:
    settings = {**SETTINGS, "soft_timeout": 1.5, "hard_timeout": 4.5}

    @Wrapper(**with_limits(**settings))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0 and rank.slot == 1:
            library = ctypes.PyDLL(None) if holding_the_gil else ctypes.CDLL(None)
            mutex = ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)  # no signal ends this
        if os.environ["WORLD_SIZE"] == "3":
            rank.train()
        return sorted((record.rank, record.interruption.name) for record in call_wrapper.faults)

    return train()


@pytest.mark.parametrize("holding_the_gil", [False, True])
def test_a_c_call_that_never_returns_is_ended(job: Job, holding_the_gil: bool) -> None:
    job.start(3, never_returns, holding_the_gil)
    faults = [[1, "HARD_TIMEOUT"], [1, "SOFT_TIMEOUT"]]
    assert job.wait(killed=(1,)) == [faults, faults]
    lines = [line for slot in (0, 2) for line in job[slot].log.splitlines()]
    who = f"slot 1 (on {os.uname().nodename} pid {job[1].pid})"
    waits = next(line for line in lines if "the restart waits for " in line)
    assert f"the restart waits for {who} to leave the function: it is ended within " in waits
    (restart,) = [line for line in lines if "restart 1:" in line]
    what = "held the GIL" if holding_the_gil else "made no progress"
    assert f" {what} for hard_timeout=4.5 s and stood at test_promises.py:" in restart
    assert " in train (and " in restart or " in train; no spare stepped in" in restart


# ---- 6: nothing is left behind: `Job.wait` looks after every test; here is a hard case


def uses_everything(rank: Rank, end: str) -> Any:
    def handler(signum: int, frame: object) -> None:
        pass

    previous = signal.signal(signal.SIGRTMIN + 1, handler)  # the first that the wrapper would take

    @Wrapper(**SETTINGS, limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> None:
        assert signal.getsignal(signal.SIGRTMIN + 1) is handler
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
        call_wrapper.store.set("x", "1")
        call_wrapper.ping()
        with call_wrapper.atomic(), call_wrapper.disable_hang_protection():
            pass
        if call_wrapper.iteration < 2:
            if rank.slot == 1:
                raise ValueError
            rank.hang()
        if end == "exit" and rank.slot == 0:
            raise SystemExit(0)
        if end == "exit" and call_wrapper.iteration == 2:
            rank.hang()

    try:
        train()
    finally:
        signal.signal(signal.SIGRTMIN + 1, previous)


@pytest.mark.parametrize("end", ["return", "exit"])
def test_nothing_is_left_after_restarts(job: Job, end: str) -> None:
    job.start(2, uses_everything, end)
    job.wait_for_end()
    assert [process.code for process in job.ranks.values()] == [0, 0]


# ---- words come after the abort


def says_in_which_order(rank: Rank) -> Any:
    order: list[str] = []

    def note(owner: Any, name: str, word: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            order.append(word)
            return real(*args, **more)

        setattr(owner, name, noted)

    note(Call, "_abort", "abort")
    for owner, name in ((warm_up, "announce_cuda"), (Ends, "log_fault"), (Reporter, "ended")):
        note(owner, name, name)

    @Wrapper(**{**SETTINGS, "soft_timeout": 1.5})
    def train(call_wrapper: CallWrapper) -> list[str]:
        if call_wrapper.iteration == 0:
            rank.hang()
        return order

    return train()


def test_nothing_is_written_before_the_abort(job: Job) -> None:
    job.start(2, says_in_which_order)
    for order in job.wait():
        assert order[0] == "abort"
        assert {"announce_cuda", "log_fault", "ended"} <= set(order)
