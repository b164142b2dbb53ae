"""What users see of live state, with real ranks: what goes on, and what they are told.

A job is many wrapped calls, each with a plan of its faults; all must end with the bits of the one without.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # as the first optimizer does, which takes its time
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, LiveState, Wrapper, events
from ft_wrapper.live import copies, live_state
from ft_wrapper.live.performer import TorchPerformer
from ft_wrapper.live.state import Form
from ft_wrapper.live.wire import Gather
from ft_wrapper.protocol import keys
from ft_wrapper.store.secret import use

STEPS = 6
Objects = dict[str, Any]
Plan = dict[str, Any]
"""Kinds of faults by point, step and active rank, with colons in between; each happens once."""


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


def update(objects: Objects, **_: Any) -> None:
    objects["optimizer"].step()
    objects["scheduler"].step()


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
    live = LiveState(call_wrapper, build, seed=3, **arguments)
    first = live.step
    ddp = live.data_parallel(find_unused_parameters=True)
    for step in live.steps(STEPS):
        live["optimizer"].zero_grad()
        loss_of(ddp, step).backward()
        at(step)
        live.commit(**({"name": f"step {step}"} if "update" in arguments else {}))
    names = ("model", "optimizer", "scheduler")
    return [digest({name: live[name] for name in names}), first, live.plan.rung.name]


# ---- faults


class Faults:
    """The faults of one call, in this process.

    Args:
        folder: notes there what has happened.
        plan: what is to happen.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.entries = self.adoptions = 0
        self.in_step = False

    def at(self, point: str, step: int) -> str | None:
        """The kind of the fault that happens here and now."""
        name = f"{point}:{step}:{dist.get_rank()}"
        if name in self.plan:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / name).touch(exist_ok=False)
                return str(self.plan[name])
        return None

    def fail(self, point: str, step: int) -> None:
        """Raises if an exception is planned here."""
        if self.in_step and self.at(point, step):
            raise ValueError(point)


current = Faults(Path(), {})
"""Those of the call that is on."""


class Fails(TorchPerformer):
    """Has faults happen."""

    def gather(self, mine: Any) -> Any:
        """What comes as this rank's is not signed: as by who came first to gloo's keys."""
        if self.at_entry():
            sign, rank = self._sign, f" {self.rank}"
            self._gather = Gather(
                lambda what, said: bytes(16) if what.endswith(rank) else sign(what, said), self._group
            )
        return super().gather(mine)

    def at_entry(self) -> bool:
        return current.at("gather", 0) is not None

    def vote(self, step: int) -> None:
        current.fail("before vote", step)
        if current.in_step and current.at("in vote", step):
            vote = struct.pack("!qqqq", step, -step, -1, 0)
            self._ballot._say(0, vote)
            self._ballot._hear(0, len(vote))  # rank 0 is ready, too
            raise ValueError("in vote")
        super().vote(step)
        current.fail("after vote", step)

    def update(self, step: int, arguments: tuple[Any, ...]) -> None:
        kind = current.at("in update", step)
        if kind is not None:
            if kind == "all":
                dist.barrier()  # or the first one's fault interrupts another one before its half
            self._kept.objects["model"][0].weight.data.zero_()
            raise ValueError("in update")
        super().update(step, arguments)

    def adopt(self, received: Any) -> None:
        if current.adoptions < current.plan.get("adoptions that fail", 0):
            current.adoptions += 1
            raise RuntimeError("a load_state_dict() that fails")
        super().adopt(received)


def trains(
    rank: Rank, folder: str, plans: list[Plan], active: int = 2, secret: str = "", **arguments: Any
) -> None:
    """One wrapped call for each plan; says what each returns, or its error."""
    global current
    live_state.TorchPerformer = Fails  # type: ignore[misc]
    if secret:
        use(secret.encode())

    @Wrapper(**SETTINGS, active_world_size=active)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        current.in_step = False
        current.entries += 1
        if current.at("entry", current.entries):
            raise ValueError("before the state")

        def at(step: int) -> None:
            current.in_step = True
            kind = current.at("step", step)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "kill all":  # at once: the one that lives longest would still have the state
                pids = [0] * dist.get_world_size()
                dist.all_gather_object(pids, os.getpid())
                for pid in reversed(pids if dist.get_rank() == 0 else []):
                    os.kill(pid, signal.SIGKILL)
                rank.hang()
            if kind == "forge":  # somebody writes that another recovery was sealed
                call_wrapper.services.store.set(keys.live("state"), "99 99")
            if kind is not None or f"always:{step}" in current.plan:
                raise ValueError(f"in step {step}")

        return trained(call_wrapper, at, **arguments)

    for number, plan in enumerate(plans):
        current = Faults(Path(folder, str(number)), plan)
        try:
            value = train()
        except (Exception, SystemExit) as error:
            value = [type(error).__name__, str(error)]
        rank.say("call", number=number, value=value)


def calls_of(job: Job, *, leftovers: bool = True) -> list[list[Any]]:
    """Of each call what its ranks returned, killed later or not; spares return nothing."""
    job.wait_for_end(leftovers=leftovers)
    found: dict[int, list[Any]] = {}
    for process in job.ranks.values():
        for said in process.messages:
            if said["event"] == "call" and said["value"] is not None:
                found.setdefault(said["number"], []).append(said["value"])
    return [found[number] for number in sorted(found)]


def log_of(job: Job) -> str:
    return "".join(process.log for process in job.ranks.values())


def restores(rank: Rank, folder: str, plans: list[Plan]) -> None:
    """With ``update`` and ``restore``; notes when they are called."""

    def restore(objects: Objects) -> int:
        rank.say("restore")
        return 0

    def named(objects: Objects, *, name: str) -> None:
        rank.say("update", name=name)
        update(objects)

    trains(rank, folder, plans, restore=restore, update=named)


CALLS: list[tuple[Plan, set[int], str]] = [
    ({}, {0}, "CHECKPOINT"),
    ({"step:2:1": "raise", "entry:2:1": "raise"}, {2}, "PEERS"),
    ({"step:2:1": "raise", "step:4:0": "raise"}, {4}, "PEERS"),
    # Before the vote all are prepared here, or one is not: the plan takes what all can reach.
    ({"before vote:2:1": "raise"}, {2, 3}, "PEERS"),
    ({"in vote:2:1": "raise"}, {3}, "PEERS"),
    ({"after vote:2:1": "raise"}, {3}, "PEERS"),
    ({"in update:2:1": "raise"}, {3}, "PEERS"),
    # An open job loses its steps by this.
    ({"step:3:0": "forge"}, {0}, "CHECKPOINT"),
    # What a new process receives cannot be taken over, so many times.
    ({"step:3:0": "kill", "adoptions that fail": 1}, {3}, "PEERS"),
    ({"step:3:0": "kill", "adoptions that fail": 9}, {0}, "CHECKPOINT"),
]


def test_a_fault_loses_no_step(job: Job, tmp_path: Path) -> None:
    """A step is done by all or by none; where no rank can say what the others need, all begin again."""
    path = tmp_path / "events"
    plans = [plan for plan, _, _ in CALLS]
    plans.append({"always:3": "raise"})
    job.start(4, trains, str(tmp_path), plans, env={events.ENV: str(path)})
    *calls, last = calls_of(job, leftovers=False)  # the last call failed: a monitor keeps the store
    for (plan, begins, rung), call in zip(CALLS, calls, strict=True):
        assert call and all(one[0] == calls[0][0][0] and one[2] == rung for one in call), plan
        assert {one[1] for one in call} <= begins, plan
    assert sorted(name for name, _ in last) == ["JobEnded", "ValueError"]
    assert "5 times in a row without progress" in str(last)
    assert re.search(r"0 steps lost; active rank \d received", log_of(job))
    ends = [record for record in events.load(str(path)) if record["event"] in ("left", "done")]
    for slot in range(2):  # the first call, and the second one's iterations
        said = [record.get("committed") for record in ends if record["slot"] == slot]
        assert said[:4] == [STEPS, 2, None, STEPS]


def test_an_update_of_ones_own_and_the_last_rung(job: Job, tmp_path: Path) -> None:
    """The update has the arguments of commit() in a recovery, too."""
    torn = {"in update:2:0": "all", "in update:2:1": "all"}
    job.start(2, restores, str(tmp_path), [{}, {"after vote:2:1": "raise"}, torn])
    clean, rolls, restored = calls_of(job)
    bits = clean[0][0]
    assert rolls == [[bits, 3, "PEERS"]] * 2 and restored == [[bits, 0, "CHECKPOINT"]] * 2
    steps = [*range(STEPS)]
    expected = ["restore", *steps, "call", "restore", *steps, "call"]
    expected += ["restore", 0, 1, "restore", *steps, "call", "returned"]
    for process in job.ranks.values():
        seen = [int(said["name"][5:]) if "name" in said else said["event"] for said in process.messages]
        assert seen == expected
    line = "goes on at step 0 from checkpoint; 2 steps lost; no living holder of whole"
    assert line in log_of(job)


def test_a_secret(job: Job, tmp_path: Path) -> None:
    """All that ranks say to each other is signed: gathers, hellos, a transfer, copies, the register."""
    plans = [{"gather:0:1": "unsigned", "step:3:0": "forge"}, {"step:2:1": "kill", "step:4:0": "raise"}]
    job.start(3, trains, str(tmp_path), plans, secret="of this job", buddies=1, copy_every=2)
    calls = calls_of(job)
    bits = calls[0][0][0]
    assert all(one == [bits, 3, "PEERS"] for one in calls[0])
    assert calls[1] == [[bits, 4, "PEERS"]] * 2
    assert "active rank 1's is not signed with the job's secret" in log_of(job)


def trains_in_a_thread(*arguments: Any) -> None:
    """Where no signal reaches the function."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(trains, *arguments).result()


def test_who_waits_in_a_vote_outside_the_main_thread_is_freed(job: Job, tmp_path: Path) -> None:
    job.start(2, trains_in_a_thread, str(tmp_path), [{"before vote:2:1": "raise"}])
    (call,) = calls_of(job)
    assert len(call) == 2 and all(one[1] in (2, 3) and one[2] == "PEERS" for one in call)
    assert "hard_timeout" not in log_of(job)


# ---- what users are told


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
    objects = build()
    return {**objects, "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(objects["optimizer"])}


def without(name: str) -> Callable[[], Objects]:
    return lambda: {key: value for key, value in build().items() if key != name}


def sharded(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    ("build={'model': 1} must be callable", {"model": 1}, {}),
    ("seed=-1 is too small", build, {"seed": -1}),
    ("copy_every=0 is too small", build, {"buddies": 1, "copy_every": 0}),
    ("mesh=3", build, {"mesh": 3}),
    ("name='a/b'", build, {"name": "a/b"}),
    ("restore=7 must be callable", build, {"restore": 7}),
    ("on_notice=7 must be callable", build, {"on_notice": 7}),
    ("it must return a dict such as", lambda: nn.Linear(1, 1), {}),
    ("'step' is int, without state_dict or load_state_dict", lambda: {"step": 3}, {}),
    ("'m' is a DistributedDataParallel", lambda: {"m": DistributedDataParallel(nn.Linear(1, 1))}, {}),
    ("'optimizer' updates 6 parameters of no module", without("model"), {}),
    ("'optimizer' has a scheduler that build() did not return", without("scheduler"), {}),
    ("pass update= to LiveState", with_plateau, {}),
    ("'model.0.weight' has no shape yet", lambda: {"model": nn.Sequential(nn.LazyLinear(1))}, {}),
    ("'optimizer' is a ZeroRedundancyOptimizer, of which no rank has all", with_zero, {}),
    (
        "'average'.state_dict() fails: it calls the collective c10d.allreduce_",
        lambda: {**build(), "average": Gathers()},
        {},
    ),
    ("buffers.model.neighbours cannot be sent: it is a Tensor (torch.sparse_coo, cpu)", with_sparse, {}),
    ("cannot be sent: it is a DTensor", lambda: {"model": sharded(nn.Linear(2, 2))}, {}),
    (
        "is a FullyShardedDataParallel, of which no rank has all",
        lambda: {"model": fsdp1(nn.Linear(2, 2))},
        {},
    ),
    ("restore() returned None", build, {"restore": lambda objects: None}),
    ("there is a LiveState of this name", build, {"name": "restore() returned None"}),
    ("buddies=2 and no other rank is no error", build, {"buddies": 2}),
]


def step_wrongly(live: LiveState, what: str) -> None:
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


MISUSE = {
    "outside of a step": "commit() belongs in a step",
    "twice": "commit() belongs in a step",
    "no commit": "ended without commit()",
    "no gradient": "no parameter of any optimizer has a gradient",
    "update outside": "step 0: parameter 'model.0.weight' was changed outside of commit()",
    "clips": "step 1: parameter 'model.0.weight' was changed outside of commit()",
    "another head": "step 0: parameter 'model.3.",
    "another module": "buffer 'model.meter.",
    "another parameter": "step 0: 'optimizer' updates 1 parameters of no module",
}


UNFIT = {"modle": "build() returned 'model', 'optimizer'", "optimizer": "takes a module of a state without"}
"""What `LiveState.data_parallel` does not wrap."""


def said_by(function: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    try:
        function(*arguments, **keywords)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def complains(rank: Rank) -> Any:
    """All that a rank does wrong, in one call and after it; returns what is said to it."""
    said: dict[str, str] = {}
    kept: list[LiveState] = []

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group("gloo")
        if kept:
            said["other iteration"] = said_by(kept[0].commit)
            return
        live = LiveState(call_wrapper, build, name="data_parallel")
        said.update({name: said_by(live.data_parallel, name) for name in UNFIT})
        said["no call_wrapper"] = said_by(LiveState, None, build)
        for text, wrong, arguments in WRONG:
            said[text] = said_by(LiveState, call_wrapper, wrong, **{"name": text, **arguments})
        for what in MISUSE:
            live = LiveState(call_wrapper, build, name=what)
            said[what] = said_by(step_wrongly, live, what)
        kept.append(LiveState(call_wrapper, build))
        raise ValueError("the next iteration")

    train()
    said["outside"] = said_by(kept[0].commit)
    return said


def test_what_would_come_again_ends_the_call(job: Job) -> None:
    job.start(1, complains)
    job.wait_for_end(leftovers=False)  # an optimizer has the process group, and the test the states
    said = job[0].value
    for what in ("other iteration", "outside"):
        text = (
            "RuntimeError: commit() of a LiveState of another iteration, or outside of the wrapped function"
        )
        assert said.pop(what).startswith(text)
    assert said.pop("buddies=2 and no other rank is no error") == "nothing was said"
    assert log_of(job).count("live state: buddies=2, but there are 0 other ranks") == 1
    for name, text in UNFIT.items():
        assert text in said.pop(name)
    texts = {**{text: text for text, _, _ in WRONG[:-1]}, **MISUSE}
    texts["no call_wrapper"] = "call_wrapper=None must be the CallWrapper"
    assert said.keys() == texts.keys()
    for what, text in texts.items():
        assert said[what].startswith("JobAbort: ") and text in said[what], said[what]


def different(rank: Rank) -> list[str]:
    def other() -> Objects:
        model = build()["model"]
        parameters = [*model.parameters()]
        return {"model": model, "optimizer": torch.optim.AdamW(parameters[:: -1 if rank.slot else 1])}

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[str]:
        dist.init_process_group("gloo")
        ours = (lambda objects: rank.slot) if rank.slot else (lambda objects: 7)
        return [
            said_by(LiveState, call_wrapper, other, name="order"),
            said_by(LiveState, call_wrapper, build, name="update", update=ours),
        ]

    return train()


def test_ranks_that_differ_are_told_how_before_anything_is_overwritten(job: Job) -> None:
    job.start(2, different)
    for said in job.wait():
        for one, text in zip(said, ("parameters of group 0 of optimizer", "update"), strict=True):
            assert "JobAbort: the ranks do not build the same state" in one and text in one


# ---- replicas that differ


def differs(rank: Rank) -> Any:
    """Two states: in one all ranks but one agree, in the other none."""

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        return [ends_of(call_wrapper, "one differs", rank.slot == 0), ends_of(call_wrapper, "all", rank.slot)]

    def ends_of(call_wrapper: CallWrapper, name: str, offset: float) -> list[Any]:
        steps: list[int] = []

        def updates(objects: Objects, **_: Any) -> None:
            update(objects)
            if not steps:
                objects["model"][0].weight.data[0, 0] += offset
            steps.append(len(steps))

        return trained(call_wrapper, name=name, update=updates, verify_every=2)

    return train()


def test_replicas_that_differ_take_the_state_of_the_most_or_of_the_lowest_rank(job: Job) -> None:
    job.start(3, differs)
    ends = job.wait()
    assert ends == [ends[0]] * 3 and [one[1:] for one in ends[0]] == [[0, "CHECKPOINT"]] * 2  # no restart
    for other, giver in ((0, 1), (1, 0)):
        line = f"active rank {other} has another parameters.model.0.weight than active rank {giver},"
        assert f"replicas differ at step 2: {line} and takes over its state" in job[0].log


# ---- copies in memory


def has_buddies(*arguments: Any) -> None:
    """All ranks hold a shard of their own: none has a replica. Copies may not arrive."""

    class Alone(Form):
        def __init__(self, build: Callable[[], Objects]) -> None:
            super().__init__(build)
            self.shard = f"shard {dist.get_rank()}"

    live_state.Form = Alone  # type: ignore[misc]
    exchange = copies.Buddies._exchange

    def exchanges(self: copies.Buddies, packed: copies.Packed, *pair: Any) -> copies.Packed:
        if current.at("exchange", packed.copy.step):
            raise ConnectionError("cut short")
        return exchange(self, packed, *pair)

    copies.Buddies._exchange = exchanges  # type: ignore[method-assign]
    trains(*arguments, 3, buddies=1, copy_every=2)


def test_without_a_living_holder_all_go_back_to_the_copies(job: Job, tmp_path: Path) -> None:
    """Copies that did not arrive are sent again after the restart."""
    plans = [
        {},
        {"step:3:2": "kill", "step:5:1": "kill"},
        {**{f"exchange:4:{rank}": "cut" for rank in range(3)}, "step:5:2": "kill"},
    ]
    job.start(6, has_buddies, str(tmp_path), plans)
    clean, *others = calls_of(job)
    for call in others:
        assert {one[0] for one in call} == {one[0] for one in clean}
        assert [one[1:] for one in call] == [[4, "COPIES"]] * 3
    assert "buddies=1, but" not in log_of(job)


def test_that_all_who_had_the_state_are_lost_is_said(job: Job, tmp_path: Path) -> None:
    """Spares begin from the start, with the result of a run without faults."""
    job.start(6, has_buddies, str(tmp_path), [{f"step:3:{rank}": "kill all" for rank in range(3)}, {}])
    lost, clean = calls_of(job)
    assert [one[0] for one in lost] == [clean[0][0]] * 3
    line = "goes on at step 0 from checkpoint; the steps behind it are lost: no rank is left that had them"
    assert log_of(job).count(line) == 1


def sends_slowly(rank: Rank) -> Any:
    """A copy begins its way when the next step is committed. Returns what was stored at each vote."""
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
        dist.init_process_group("gloo")
        trained(call_wrapper, buddies=1, copy_every=2)
        commits.release()  # the last copy's
        return stored

    return train()


def test_a_copy_is_with_the_buddies_before_the_next_step_is_committed(job: Job) -> None:
    job.start(2, sends_slowly)
    assert job.wait() == [[[step, step - step % 2] for step in range(STEPS)]] * 2
    assert "buddies=1, but" not in log_of(job)
