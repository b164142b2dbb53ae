"""What a user of the wrapper may count on: the promises of the restart loop, with real processes."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any, Optional

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


class OwnBaseException(BaseException):
    """A user's own."""


#: Iterations after the first four, and who leaves in them by what; None: the test sends SIGINT.
LEAVERS: list[tuple[int, BaseException | None]] = [(3, OwnBaseException()), (0, SystemExit(3)), (1, None)]


def fails_in_turn(rank: Rank) -> Any:
    """In four iterations one rank after the other fails, then they leave until one is left.

    Those that are interrupted in an odd iteration swallow that: not what the exception is for.
    """

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        n, place, world = call_wrapper.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        kinds = [[record.rank, record.interruption.name] for record in call_wrapper.faults]
        rank.say("in", n=n, place=[place, world], faults=kinds)
        if n < 4 and place == n:
            raise ValueError(f"round {n}")
        if 4 <= n < 7 and LEAVERS[n - 4][0] == rank.slot and (error := LEAVERS[n - 4][1]):
            raise error
        if n == 7:
            return [n, place, world]
        try:
            return rank.hang()
        except RankShouldRestart:
            if n % 2 == 0:
                raise
        return []

    return train()


def test_an_exception_restarts_all_ranks_and_a_base_exception_ends_its_rank(job: Job) -> None:
    job.start(4, fails_in_turn)
    job.expect("in", 1, 2, n=6)
    job.send_signal(1, signal.SIGINT)
    job.wait_for_end()
    assert job[2].value == [7, 0, 1]
    ends = [(job[slot].error, job[slot].code) for slot in (3, 0)]
    assert ends == [("OwnBaseException", 1), ("SystemExit", 3)]
    # A process that ends as Python would, as at night, ends by the signal.
    assert job[1].error == "KeyboardInterrupt" and job[1].code in (1, -signal.SIGINT)
    entered = {said["n"]: said for said in job[2].said("in")}
    assert entered[2]["place"] == [2, 4]  # of the others it may hear before it is in
    assert entered[6]["place"] == [1, 2] and entered[6]["faults"] == [[0, "BASE_EXCEPTION"]]
    assert entered[7]["faults"] == [[0, "BASE_EXCEPTION"]]
    for slot in range(4):
        own = {slot, *(n for n, (leaver, _) in enumerate(LEAVERS, 4) if leaver == slot)}
        assert own <= {said["n"] for said in job[slot].said("in")}


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
    return [ports, asked[0], bare(1), with_brackets(2)]


def test_the_arguments_stay_and_the_variables_lead_to_a_store_of_the_iteration(job: Job) -> None:
    """Rank 0's address is the one on its way to the launcher's MASTER_ADDR, whatever keeps the store."""
    job.start(1, reads_the_variables)
    [[ports, asked, *other_decorators]] = job.wait()
    assert other_decorators == [[1, 0], [2, 0]]
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


def test_the_decorator_keeps_the_functions_name_and_disabled_is_the_function_itself() -> None:
    assert (bare.__name__, bare.__doc__) == ("bare", "Bare.")

    def without_call_wrapper(value: int) -> int:
        return value

    assert Wrapper(enabled=False)(without_call_wrapper) is without_call_wrapper


# ---- 4: a blocked main thread is freed: see tests/process/monitor/test_interrupt.py, and in a collective


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


# ---- 5: a C call that never returns is ended at hard_timeout, and the others go on


def never_returns(rank: Rank) -> Any:
    """Slot 1 hangs with the GIL, and once it is gone slot 2 without."""
    settings = {**SETTINGS, "soft_timeout": 1.5, "hard_timeout": 4.5}

    @Wrapper(**with_limits(**settings))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        world = int(os.environ["WORLD_SIZE"])
        if world > 2 and rank.slot == 5 - world:
            library = ctypes.PyDLL(None) if world == 4 else ctypes.CDLL(None)
            mutex = ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)  # no signal ends this
        if world > 2:
            rank.train()
        return sorted((record.rank, record.interruption.name) for record in call_wrapper.faults)

    return train()


def test_a_c_call_that_never_returns_is_ended(job: Job) -> None:
    job.start(4, never_returns)
    faults = [[1, "HARD_TIMEOUT"], [1, "SOFT_TIMEOUT"]]
    assert job.wait(killed=(1, 2)) == [faults, faults]
    lines = [line for slot in range(4) for line in job[slot].log.splitlines()]
    waits = [line for line in lines if "the restart waits for " in line]
    for slot, what in ((1, "held the GIL"), (2, "made no progress")):
        who = f"slot {slot} (on {os.uname().nodename} pid {job[slot].pid})"
        told = f"the restart waits for {who} to leave the function: ended within "
        assert any(told in line for line in waits)
        (restart,) = [line for line in lines if f"restart {slot}:" in line]
        assert f" {what} for hard_timeout=4.5 s and stood at test_promises.py:" in restart
        assert " in train (and " in restart or " in train; no spare stepped in" in restart


# ---- 6: nothing is left behind: `Job.wait` looks after every test; here is a hard case


def uses_everything(rank: Rank) -> Any:
    """In the end slot 0 leaves, and slot 1 returns."""

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
        if rank.slot == 0:
            raise SystemExit(0)
        if call_wrapper.iteration == 2:
            rank.hang()

    try:
        train()
    finally:
        signal.signal(signal.SIGRTMIN + 1, previous)


def test_nothing_is_left_after_restarts(job: Job) -> None:
    job.start(2, uses_everything)
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
