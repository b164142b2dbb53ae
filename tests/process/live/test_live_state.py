"""What users see of live state, with real ranks: what goes on, and what they are told."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as the first optimizer does, which takes its time
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, LiveState, Wrapper, events
from ft_wrapper.live.performer import TorchPerformer
from ft_wrapper.live.wire import Gather
from ft_wrapper.protocol import keys
from ft_wrapper.store.secret import use

pytestmark = pytest.mark.tcp_only("a test starts two jobs, each of which begins with its store")

STEPS = 6
Objects = dict[str, Any]


def build() -> Objects:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return (model(torch.randn(8, 4, generator=generator)) - 1).square().mean()


def digest(objects: Objects) -> str:
    found = hashlib.sha256()
    for tensor in tensors([each.state_dict() for each in objects.values()]):
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree.detach()
    elif isinstance(tree, (dict, list, tuple)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(each)


def trained(
    call_wrapper: CallWrapper, at: Callable[[int], None] = lambda step: None, **arguments: Any
) -> list[Any]:
    """Trains to the end; returns the digest, the step that this iteration began with, and the rung."""
    dist.init_process_group("gloo")
    live = LiveState(call_wrapper, arguments.pop("build", build), seed=3, **arguments)
    first = live.step
    ddp = live.data_parallel(find_unused_parameters=True)
    for step in live.steps(STEPS):
        live["optimizer"].zero_grad()
        loss_of(ddp, step).backward()
        at(step)
        live.commit()
    names = ("model", "optimizer", "scheduler")
    return [digest({name: live[name] for name in names}), first, live.plan.rung.name]


# ---- what goes on


def trains(rank: Rank, faults: dict[str, str], active: int = 2, secret: str = "", **arguments: Any) -> Any:
    if secret:
        use(secret.encode())

    @Wrapper(**SETTINGS, active_world_size=active)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        def at(step: int) -> None:
            kind = faults.get(f"{call_wrapper.iteration}:{step}:{dist.get_rank()}")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise ValueError(f"in step {step}")

        return trained(call_wrapper, at, **arguments)

    return train()


@pytest.fixture(scope="module")
def clean_digest() -> dict[str, str]:
    return {}


def test_an_exception_loses_no_step(job: Job, clean_digest: dict[str, str]) -> None:
    job.start(2, trains, {})
    clean = job.wait()
    assert clean[0] == clean[1] and clean[0][1:] == [0, "CHECKPOINT"]
    job.start(2, trains, {"0:2:1": "raise", "1:4:0": "raise"})
    assert job.wait() == [[clean[0][0], 4, "PEERS"]] * 2


def test_a_job_with_a_secret_loses_no_step_either(job: Job) -> None:
    """Whatever the ranks say to each other is signed: gathers, hellos, a transfer, copies, the register."""
    job.start(3, trains, {"0:2:1": "kill", "1:4:0": "raise"}, secret="of this job", buddies=1, copy_every=2)
    job.wait_for_end()
    lived = [process.value for process in job.ranks.values() if process.code == 0]
    assert len(lived) == 2 and lived[0] == lived[1]
    assert [one[1:] for one in lived] == [[4, "PEERS"]] * 2
    assert "outside the job" not in "".join(process.log for process in job.ranks.values())


def has_an_intruder(rank: Rank, secret: str) -> Any:
    """In iteration 0 what comes as active rank 1's is not signed: as by who came first to gloo's keys."""
    from ft_wrapper.live import live_state

    class Intruded(TorchPerformer):
        def gather(self, *arguments: Any) -> Any:
            assert self._services.store.seal is not None
            if self._services.iteration == 0 and self.rank == 1:
                sign = self._sign
                self._gather = Gather(
                    lambda what, said: bytes(16) if what.endswith(" 1") else sign(what, said), self._group
                )
            return super().gather(*arguments)

    live_state.TorchPerformer = Intruded  # type: ignore[misc]
    return trains(rank, {}, secret=secret)


def test_who_has_not_the_secret_costs_a_restart_and_no_more(job: Job) -> None:
    job.start(2, has_an_intruder, "of this job")
    for value in job.wait():
        assert value[1:] == [0, "CHECKPOINT"]
    logs = "".join(process.log for process in job.ranks.values())
    assert "active rank 1's is not signed with the job's secret" in logs


def has_a_forged_register(rank: Rank, secret: str) -> Any:
    """Somebody writes that another recovery was sealed: all that the ranks hold would be void."""
    if secret:
        use(secret.encode())

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        def at(step: int) -> None:
            if (call_wrapper.iteration, step) == (0, 3):
                call_wrapper.services.store.set(keys.live("state"), "99 99")
                raise ValueError("in step 3")

        return trained(call_wrapper, at)

    return train()


@pytest.mark.parametrize(("secret", "goes_on"), [("of this job", [3, "PEERS"]), ("", [0, "CHECKPOINT"])])
def test_a_forged_register_makes_no_state_void(job: Job, secret: str, goes_on: list[Any]) -> None:
    """In a job with a secret; an open one loses its steps."""
    job.start(2, has_a_forged_register, secret)
    assert [one[1:] for one in job.wait()] == [goes_on] * 2


def test_a_step_that_fails_on_each_try_ends_the_job(job: Job) -> None:
    job.start(2, trains, {f"{n}:3:1": "raise" for n in range(9)})
    job.wait_for_end()
    assert sorted(process.error for process in job.ranks.values()) == ["JobEnded", "ValueError"]
    assert "5 times in a row without progress" in job[0].text + job[1].text


def test_a_new_rank_receives_the_state(job: Job) -> None:
    job.start(3, trains, {})
    clean = job.wait()[0]
    job.start(3, trains, {"0:3:0": "kill"})
    job.wait_for_end()
    lived = [process.value for process in job.ranks.values() if process.code == 0]
    assert lived == [[clean[0], 3, "PEERS"]] * 2
    assert "0 steps lost; active rank 1 received" in "".join(process.log for process in job.ranks.values())


def says_how_far(rank: Rank, path: str) -> int:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        def at(step: int) -> None:
            if (call_wrapper.iteration, step, rank.slot) == (0, 2, 1):
                raise ValueError("in step 2")

        if call_wrapper.iteration == 1:
            raise ValueError("before the state")
        trained(call_wrapper, at)
        return call_wrapper.iteration

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(events.ENV, path)
        return train()  # type: ignore[no-any-return]


def test_the_event_that_ends_an_iteration_says_how_many_steps_are_committed(job: Job, tmp_path: Path) -> None:
    path = str(tmp_path / "events")
    job.start(2, says_how_far, path)
    assert job.wait() == [2, 2]
    ends = [record for record in events.load(path) if record["event"] in ("left", "done")]
    said = sorted((record["iteration"], record["slot"], record.get("committed")) for record in ends)
    assert said == [(n, slot, (2, None, STEPS)[n]) for n in range(3) for slot in range(2)]


# ---- a step that is cut short


def cut_short(rank: Rank, point: str) -> Any:
    """Fails on slot 1 at a point of step 2, once."""

    class Fails(TorchPerformer):
        def vote(self, step: int) -> None:
            fails = LIVE["iteration"] == 0 and step == 2 and rank.slot == 1 and LIVE["commits"]
            if fails and point == "before the vote":
                raise ValueError(point)
            if fails and point == "in the vote":
                vote = struct.pack("!qqq", step, -step, -1)
                self._ballot._say(0, vote)
                self._ballot._hear(0, len(vote))  # rank 0 is ready, too
                raise ValueError(point)
            super().vote(step)
            if fails and point == "after the vote":
                raise ValueError(point)

        def update(self, step: int, arguments: tuple[Any, ...]) -> None:
            if LIVE["iteration"] == 0 and step == 2 and rank.slot == 1 and point == "in the update":
                self._kept.objects["model"][0].weight.data.zero_()
                raise ValueError(point)
            super().update(step, arguments)

    LIVE: dict[str, int] = {}
    from ft_wrapper.live import live_state

    live_state.TorchPerformer = Fails  # type: ignore[misc]

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        LIVE.update(iteration=call_wrapper.iteration, commits=0)
        return trained(call_wrapper, lambda step: LIVE.update(commits=1))

    return train()


@pytest.mark.parametrize(
    ("point", "goes_on"),
    [
        pytest.param("before the vote", 2, marks=pytest.mark.nightly("fault runs kill there, too")),
        ("in the vote", 3),
        pytest.param("after the vote", 3, marks=pytest.mark.nightly("fault runs kill there, too")),
        ("in the update", 3),
    ],
)
def test_a_step_is_done_by_all_or_by_none(job: Job, point: str, goes_on: int) -> None:
    job.start(2, trains, {})
    clean = job.wait()[0]
    job.start(2, cut_short, point)
    results = job.wait()
    assert [one[0] for one in results] == [clean[0]] * 2
    assert all(one[2] == "PEERS" for one in results)
    # Before the vote all are prepared here, or one is not: the plan takes what all can reach.
    assert {one[1] for one in results} <= {2, 3} and (goes_on == 2 or results[0][1] == 3)


def rolls_with_arguments(rank: Rank) -> Any:
    """Fails on slot 1 once it has seen the vote of step 2 end. Returns what the update was called with."""
    from ft_wrapper.live import live_state

    class Fails(TorchPerformer):
        def vote(self, step: int) -> None:
            super().vote(step)
            if rank.slot == 1 and step == 2 and not fallen and self._kept.arguments:  # not the seal
                fallen.append(step)
                raise ValueError("after the vote")

    fallen: list[int] = []
    found: list[list[Any]] = []
    live_state.TorchPerformer = Fails  # type: ignore[misc]

    def update(objects: Objects, step: int, *, name: str) -> None:
        found.append([step, name])
        objects["optimizer"].step()
        objects["scheduler"].step()

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[list[Any]]:
        dist.init_process_group("gloo")
        with pytest.warns(DeprecationWarning, match="copy_every"):
            live = LiveState(call_wrapper, build, update=update, every=2)
        for step in live.steps(STEPS):
            live["optimizer"].zero_grad()
            loss_of(live["model"], step).backward()
            live.commit(step, name=f"step {step}")
        return [*found, [call_wrapper.iteration, ""]]

    return train()


def test_the_update_has_the_arguments_of_commit_in_a_recovery_too(job: Job) -> None:
    job.start(2, rolls_with_arguments)
    assert job.wait() == [[*([step, f"step {step}"] for step in range(STEPS)), [1, ""]]] * 2


def cut_short_in_a_thread(rank: Rank, point: str) -> Any:
    """The same, where no signal reaches the function."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(cut_short, rank, point).result()


def test_who_waits_in_a_vote_outside_the_main_thread_is_freed(job: Job) -> None:
    job.start(2, cut_short_in_a_thread, "before the vote")
    assert all(one[1] in (2, 3) and one[2] == "PEERS" for one in job.wait())
    assert all("hard_timeout" not in process.log for process in job.ranks.values())


# ---- the last rung


def restores(rank: Rank) -> Any:
    calls: list[int] = []

    def restore(objects: Objects) -> int:
        calls.append(len(calls))
        return 0

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        def at(step: int) -> None:
            if call_wrapper.iteration == 0 and step == 2:
                raise ValueError("on all ranks, in the update")

        def update(objects: Objects) -> None:
            objects["model"][0].weight.data.mul_(0.5)
            if call_wrapper.iteration == 0 and live_step[0] == 2:
                dist.barrier()  # or the first one's fault interrupts another one before its half
                raise ValueError("half of an update is done, on all ranks")
            live_step[0] += 1
            objects["optimizer"].step()
            objects["scheduler"].step()

        live_step = [0]
        return [*trained(call_wrapper, restore=restore, update=update)[1:], len(calls)]

    return train()


def test_without_a_whole_state_all_begin_with_the_checkpoint(job: Job) -> None:
    job.start(2, restores)
    assert job.wait() == [[0, "CHECKPOINT", 2]] * 2
    log = "".join(process.log for process in job.ranks.values())
    assert "goes on at step 0 from checkpoint; 2 steps lost; no living holder of whole" in log


# ---- what users are told


def lonely(rank: Rank, what: str) -> Any:
    wrong: dict[str, Callable[[CallWrapper], Any]] = {
        "build": lambda call: LiveState(call, {"model": 1}),  # type: ignore[arg-type]
        "call_wrapper": lambda call: LiveState(None, build),  # type: ignore[arg-type]
        "seed": lambda call: LiveState(call, build, seed=-1),
        "copy_every": lambda call: LiveState(call, build, buddies=1, copy_every=0),
        "every": lambda call: LiveState(call, build, buddies=1, copy_every=2, every=3),
        "mesh": lambda call: LiveState(call, build, mesh=3),
        "name": lambda call: LiveState(call, build, name="a/b"),
        "restore": lambda call: LiveState(call, build, restore=7),  # type: ignore[arg-type]
        "no dict": lambda call: LiveState(call, lambda: nn.Linear(1, 1)),  # type: ignore[arg-type,return-value]
        "no state_dict": lambda call: LiveState(call, lambda: {"step": 3}),
        "ddp": lambda call: LiveState(call, lambda: {"m": DistributedDataParallel(nn.Linear(1, 1))}),
        "no model": lambda call: LiveState(call, lambda: {"optimizer": build()["optimizer"]}),
        "no scheduler": lambda call: LiveState(
            call, lambda: {name: each for name, each in build().items() if name != "scheduler"}
        ),
        "plateau": lambda call: LiveState(call, with_plateau),
        "lazy": lambda call: LiveState(call, lambda: {"model": nn.Sequential(nn.LazyLinear(1))}),
        "zero": lambda call: LiveState(call, with_zero),
        "collective": lambda call: LiveState(call, lambda: {**build(), "average": Gathers()}),
        "sparse": lambda call: LiveState(call, with_sparse),
        "restored step": lambda call: LiveState(call, build, restore=lambda objects: None),  # type: ignore
        "twice": lambda call: [LiveState(call, build) for _ in range(2)],
    }

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group("gloo")
        wrong[what](call_wrapper)

    train()


class Gathers:
    """Talks to other ranks where only one may call it."""

    def state_dict(self) -> Objects:
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": total}

    def load_state_dict(self, state: Objects) -> None:
        pass


def with_zero() -> Objects:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)}


def with_sparse() -> Objects:
    model = nn.Linear(2, 2)
    model.register_buffer("neighbours", torch.eye(3).to_sparse())
    return {"model": model}


def with_plateau() -> Objects:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    }


NIGHTLY = pytest.mark.nightly("others of their kind run always")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("build", "build={'model': 1} must be callable"),
        pytest.param("call_wrapper", "call_wrapper=None must be the CallWrapper", marks=NIGHTLY),
        pytest.param("seed", "seed=-1 is too small", marks=NIGHTLY),
        pytest.param("copy_every", "copy_every=0 is too small", marks=NIGHTLY),
        pytest.param("every", "leave out every=3, the old name of copy_every=2", marks=NIGHTLY),
        ("mesh", "mesh=3"),
        pytest.param("name", "name='a/b'", marks=NIGHTLY),
        pytest.param("restore", "restore=7 must be callable", marks=NIGHTLY),
        ("no dict", "it must return a dict such as"),
        pytest.param("no state_dict", "'step' is int, which has no state_dict", marks=NIGHTLY),
        ("ddp", "'m' is a DistributedDataParallel"),
        pytest.param("no model", "'optimizer' updates 6 parameters of no module", marks=NIGHTLY),
        pytest.param(
            "no scheduler", "'optimizer' has a scheduler that build() did not return", marks=NIGHTLY
        ),
        ("plateau", "pass update= to LiveState"),
        ("lazy", "'model.0.weight' has no shape yet; call its lazy module once in build()"),
        ("zero", "'optimizer' is a ZeroRedundancyOptimizer, of which no rank has all"),
        ("collective", "'average'.state_dict() fails: it calls the collective c10d.allreduce_"),
        ("sparse", "buffers.model.neighbours cannot be sent: it is a Tensor (torch.sparse_coo, cpu)"),
        ("restored step", "restore() returned None"),
        ("twice", "there is a LiveState of this name"),
    ],
)
def test_what_would_come_again_ends_the_call(job: Job, what: str, text: str) -> None:
    job.start(1, lonely, what)
    job.wait_for_end(leftovers=what != "zero")  # the optimizer has the process group
    assert job[0].error == "JobAbort"
    assert text in job[0].text


def different(rank: Rank, what: str) -> Any:
    def other() -> Objects:
        objects = build()
        if rank.slot == 1 and what == "shape":
            objects["model"][3] = nn.Linear(8, 2)
            objects["optimizer"] = torch.optim.AdamW(objects["model"].parameters())
            del objects["scheduler"]
        if rank.slot == 1 and what == "order":
            parameters = reversed(list(objects["model"].parameters()))
            objects["optimizer"] = torch.optim.AdamW(parameters)
            del objects["scheduler"]
        return objects

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group("gloo")
        update = (lambda objects: rank.slot) if rank.slot and what == "update" else (lambda objects: 7)
        LiveState(call_wrapper, other, update=update if what == "update" else None)

    train()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("order", "what build() returned"),
        pytest.param(
            "shape", "what build() returned", marks=pytest.mark.nightly("another order runs always")
        ),
        pytest.param("update", "update", marks=pytest.mark.nightly("another order runs always")),
    ],
)
def test_ranks_that_differ_are_told_how_before_anything_is_overwritten(
    job: Job, what: str, text: str
) -> None:
    job.start(2, different, what)
    job.wait_for_end()
    # Which of the two is interrupted by the other's is chance; neither goes on alone.
    errors = [process.error for process in job.ranks.values()]
    assert "JobAbort" in errors and {*errors} <= {"JobAbort", "JobEnded"}
    assert all("the ranks do not build the same state" in process.text for process in job.ranks.values())
    assert all(text in process.text for process in job.ranks.values())


def misused(rank: Rank, what: str) -> Any:
    kept: list[LiveState] = []

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> str:
        dist.init_process_group("gloo")
        live = LiveState(call_wrapper, build)
        kept.append(live)
        if call_wrapper.iteration == 1:
            if what != "other iteration":
                return str(call_wrapper.faults and "restarted")
            try:
                kept[0].commit()
            except RuntimeError as error:
                return str(error)
        if what == "other iteration":
            raise ValueError
        if what == "outside of a step":
            live.commit()
        for step in live.steps(2):
            if what == "no commit":
                continue
            if what != "no gradient":
                loss_of(live["model"][:4], step).backward()
            if what == "update outside":
                live["optimizer"].step()
            if what == "another head":
                live["model"][3] = nn.Linear(8, 2)
            if what == "another module":
                live["model"].add_module("meter", nn.BatchNorm1d(2, affine=False))
            if what == "another parameter":
                live["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            live.commit()
            if what == "clips":
                live["model"][0].weight.detach().clamp_(-1.0, 1.0)
            if what == "twice":
                live.commit()
        return "nothing was said"

    result = train()
    if what == "outside of the function":
        try:
            kept[0].commit()
        except RuntimeError as error:
            return str(error)
    return result


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("outside of a step", "commit() belongs into a step"),
        ("twice", "commit() belongs into a step"),
        ("no commit", "ended without commit()"),
        ("no gradient", "no parameter of any optimizer has a gradient"),
        ("update outside", "step 0: parameter 'model.0.weight' was changed outside of commit()"),
        ("clips", "step 1: parameter 'model.0.weight' was changed outside of commit()"),
        ("another head", "step 0: parameter 'model.3."),
        ("another module", "buffer 'model.meter."),
        ("another parameter", "step 0: 'optimizer' updates 1 parameters of no module"),
    ],
)
def test_misuse_ends_the_call_at_once(job: Job, what: str, text: str) -> None:
    job.start(1, misused, what)
    job.wait_for_end(leftovers=False)  # the test keeps the state
    assert job[0].error == "JobAbort" and text in job[0].text


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("other iteration", "a LiveState of another iteration"),
        ("outside of the function", "outside of the wrapped function"),
    ],
)
def test_misuse_is_named(job: Job, what: str, text: str) -> None:
    job.start(1, misused, what)
    (value,) = job.wait()
    assert text in value


# ---- replicas that differ


def differs(rank: Rank, slots: list[int]) -> Any:
    done: list[bool] = []

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        def at(step: int) -> None:
            pass

        def update(objects: Objects) -> None:
            objects["optimizer"].step()
            objects["scheduler"].step()
            if rank.slot in slots and not done:
                done.append(True)
                objects["model"][0].weight.data[0, 0] += 1

        return trained(call_wrapper, at, update=update, verify_every=2)

    return train()


@pytest.mark.parametrize(("size", "slots"), [(3, [0]), (3, [1]), (2, [1])])
def test_replicas_that_differ_take_the_state_of_the_most_or_of_the_lowest_rank(
    job: Job, size: int, slots: list[int]
) -> None:
    job.start(size, differs, slots)
    ends = job.wait()
    assert ends == [ends[0]] * size and ends[0][1:] == [0, "CHECKPOINT"]  # without a restart
    giver = 1 if slots == [0] else 0
    line = f"active rank {slots[0]} has another parameters.model.0.weight than active rank {giver},"
    assert f"replicas differ at step 2: {line} and takes over its state" in job[0].log


# ---- a recovery that fails by itself


def fails_to_adopt(rank: Rank, errors: int) -> Any:
    """What a new process receives cannot be taken over, so many times."""
    from ft_wrapper.live import live_state

    class Fails(TorchPerformer):
        def adopt(self, received: Any) -> None:
            if len(failed) < errors:
                failed.append(True)
                raise RuntimeError("a load_state_dict() that fails")
            super().adopt(received)

    failed: list[bool] = []
    live_state.TorchPerformer = Fails  # type: ignore[misc]

    @Wrapper(**SETTINGS, active_world_size=2)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        def at(step: int) -> None:
            if call_wrapper.iteration == 0 and step == 3 and rank.slot == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return trained(call_wrapper, at, restore=lambda objects: 0)

    return train()


@pytest.mark.parametrize(("errors", "end"), [(1, [3, "PEERS"]), (9, [0, "CHECKPOINT"])])
def test_a_recovery_that_fails_by_itself_is_tried_twice_and_then_goes_down_the_ladder(
    job: Job, errors: int, end: list[Any]
) -> None:
    job.start(3, fails_to_adopt, errors)
    job.wait_for_end()
    lived = [process.value for process in job.ranks.values() if process.code == 0]
    assert len(lived) == 2 and lived[0] == lived[1] and lived[0][1:] == end


# ---- copies in memory


def has_buddies(rank: Rank, faults: dict[str, str], fails: int = -1) -> Any:
    """All ranks hold a shard of their own: none has a replica. The copies of a step do not arrive, once."""
    from ft_wrapper.live import copies, live_state
    from ft_wrapper.live.state import Form

    class Alone(Form):
        def __init__(self, build: Callable[[], Objects]) -> None:
            super().__init__(build)
            self.shard = f"shard {dist.get_rank()}"

    live_state._form = lambda build, mesh: Alone(build)  # type: ignore[assignment]
    exchange = copies.Buddies._exchange

    def exchanges(self: copies.Buddies, packed: copies.Packed, *pair: Any) -> copies.Packed:
        nonlocal fails
        if packed.copy.step == fails and rank.slot < 3:  # not on the spare that steps in
            fails = -1
            raise ConnectionError("cut short")
        return exchange(self, packed, *pair)

    copies.Buddies._exchange = exchanges  # type: ignore[method-assign]

    @Wrapper(**SETTINGS, active_world_size=3)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        def at(step: int) -> None:
            if faults.get(f"{call_wrapper.iteration}:{step}:{dist.get_rank()}"):
                os.kill(os.getpid(), signal.SIGKILL)

        return trained(call_wrapper, at, buddies=1, copy_every=2)

    return train()


def test_without_a_living_holder_all_go_back_to_the_copies(job: Job) -> None:
    job.start(5, has_buddies, {})
    clean = {one[0] for one in job.wait() if one}
    job.start(5, has_buddies, {"0:3:2": "kill", "1:5:1": "kill"})
    job.wait_for_end()
    lived = [process.value for process in job.ranks.values() if process.code == 0]
    assert {one[0] for one in lived} == clean
    assert [one[1:] for one in lived] == [[4, "COPIES"]] * 3


def lone(rank: Rank) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        return trained(call_wrapper, buddies=2)

    return train()


@pytest.mark.parametrize("ranks", [1, 3])
def test_more_buddies_than_other_ranks_are_told_and_no_error(job: Job, ranks: int) -> None:
    job.start(ranks, lone)
    job.wait()
    logged = "".join(process.log for process in job.ranks.values())
    assert logged.count("live state: buddies=2, but there are 0 other ranks") == (ranks == 1)
    assert logged.count("buddies=2, but") == (ranks == 1)


def test_copies_that_did_not_arrive_are_sent_again_after_the_restart(job: Job) -> None:
    job.start(4, has_buddies, {"1:5:2": "kill"}, 4)
    job.wait_for_end()
    lived = [process.value for process in job.ranks.values() if process.code == 0]
    assert [one[1:] for one in lived] == [[4, "COPIES"]] * 3


def sends_slowly(rank: Rank) -> Any:
    """A copy begins its way when the next step is committed. Returns what was stored at each vote."""
    from ft_wrapper.live import copies, live_state

    stored: list[list[int]] = []
    commits = threading.Semaphore(0)
    exchange = copies.Buddies._exchange

    def late(self: copies.Buddies, *arguments: Any) -> Any:
        assert commits.acquire(timeout=60)
        return exchange(self, *arguments)

    class Notes(TorchPerformer):
        def make_ready(self) -> None:
            if self._kept.newest % 2 == 0:
                commits.release()
            super().make_ready()

        def vote(self, step: int) -> None:
            if self._buddies is not None:  # not the seal
                stored.append([step, self._buddies.stored])
            super().vote(step)

    copies.Buddies._exchange = late  # type: ignore[method-assign]
    live_state.TorchPerformer = Notes  # type: ignore[misc]

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        trained(call_wrapper, buddies=1, copy_every=2)
        commits.release()  # the last copy's
        return stored

    return train()


def test_a_copy_is_with_the_buddies_before_the_next_step_is_committed(job: Job) -> None:
    job.start(2, sends_slowly)
    assert job.wait() == [[[step, step - step % 2] for step in range(STEPS)]] * 2
