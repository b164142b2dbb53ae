"""The rendezvous on a FakeStore under the scheduler: orders at random, crashes at every step, a paused node.

`simulated_nodes.World` checks after every step; each plan ends with what holds once all is quiet.
"""

from __future__ import annotations

import random

import pytest
from simulated_nodes import SimulatedNode, World, check_settled, random_world
from support.nightly import at_night
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from ft_wrapper.rendezvous import moves
from ft_wrapper.rendezvous.moves import adopt_rank_policy
from ft_wrapper.rendezvous.record import RendezvousRecord, RoundPolicy
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import Scheduler, SchedulerError

END = 300.0


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("draws", [40, *at_night("40 are drawn always", [600])])
def test_random_schedules(draws: int) -> None:
    """Always the same ones, and as many from fresh seeds, which a failure tells."""
    fresh = random.SystemRandom().randrange(10**9)
    for seed in [*range(draws // 2), *range(fresh, fresh + draws // 2)]:
        try:
            random_world(seed).scheduler.run()
        except SchedulerError as error:
            raise AssertionError(f"random_world({seed}): {error}") from error


def crash_world(step: int, *, rank_policy: bool, respawns: bool, task: str) -> tuple[World, bool]:
    """Three nodes of which two are enough; the third dies just before a step of its agent or its heart."""
    scheduler = Scheduler(7, max_time=2000.0)
    world = World(scheduler, RendezvousSettings("job", 2, 3, join_timeout=200.0, last_call_timeout=2.0))
    died = False

    def plan(node: SimulatedNode) -> None:
        node.join()
        if rank_policy:
            node.executor.register.change(adopt_rank_policy)
        elif node.node.id == "2" and node.node.incarnation == 0:
            node.join()  # a worker failed: a restart of all
        node.work(END)
        check_settled(world)
        node.executor.register.change(moves.close)

    def die() -> None:
        nonlocal died
        died = True
        if respawns:
            world.start("2", plan)
        world.kill(victim)

    for number in range(3):
        victim = world.start(str(number), plan)
    if task == "agent":
        scheduler.at_step(victim.agent, step, die)
    else:
        victim.on_begin = lambda: scheduler.at_step(victim.others[1], step, die)
    scheduler.run()
    return world, died


@pytest.mark.parametrize("stride", [4, *at_night("each fourth step is tried always", [1])])
@pytest.mark.parametrize("respawns", [False, True])
@pytest.mark.parametrize("rank_policy", [False, True])
def test_crash_at_every_step(rank_policy: bool, respawns: bool, stride: int) -> None:
    for task, most in (("agent", 40), ("heart", 12)):
        for step in range(1 + rank_policy + 2 * respawns, most, stride):
            world, died = crash_world(step, rank_policy=rank_policy, respawns=respawns, task=task)
            if died:
                size = 3 if respawns else 2
                assert len([node for node in world.nodes if node.rounds]) >= size
            assert world.record.closed


def test_policy_rank_keeps_the_others_where_they_are() -> None:
    """A node is lost, a spare takes its seat, it comes back as a spare: no one else joins again."""
    scheduler = Scheduler(3, max_time=2000.0)
    world = World(scheduler, RendezvousSettings("job", 2, 2, last_call_timeout=0.0))

    def first(node: SimulatedNode) -> None:
        node.join()
        node.executor.register.change(adopt_rank_policy)
        node.work(END)
        assert node.rounds == [0]
        node.executor.register.change(moves.close)

    def spare(node: SimulatedNode) -> None:
        scheduler.sleep(5.0)
        node.join()
        node.work(END)
        node.executor.register.change(moves.close)

    world.start("0", first)
    lost = world.start("1", first)
    helper = world.start("2", spare)

    def disaster() -> None:
        scheduler.sleep(20.0)
        world.kill(lost)
        scheduler.sleep(40.0)
        assert [n.id for n in world.record.participants] == ["0", "2"]
        world.start("1", spare)
        scheduler.sleep(20.0)
        assert [n.id for n in world.record.spares] == ["1"]
        assert world.record.policy is RoundPolicy.RANK

    scheduler.spawn("disaster", disaster)
    scheduler.run()
    assert helper.rounds == [0]
    (seats,) = [node.unseated for node in world.nodes if node.unseated]
    assert [(seat.base_slot, seat.occupant.name) for seat in seats if seat.occupant] == [(1, "1:0")]


def test_paused_node_is_out_and_comes_back() -> None:
    """Longer silent than it may be: the others go on without it; it learns so, and joins the next round."""
    scheduler = Scheduler(5, max_time=2000.0)
    world = World(scheduler, RendezvousSettings("job", 1, 2, last_call_timeout=1.0), pauses=True)

    def plan(node: SimulatedNode) -> None:
        node.join()
        node.work(END)
        check_settled(world)
        node.executor.register.change(moves.close)

    world.start("0", plan)
    paused = world.start("1", plan)

    def pause() -> None:
        scheduler.sleep(10.0)
        for task in (paused.agent, *paused.others):
            scheduler.pause(task, 60.0)
        scheduler.sleep(40.0)
        assert [n.id for n in world.record.participants] == ["0"]

    scheduler.spawn("pause", pause)
    scheduler.run()
    assert len(paused.rounds) == 2


def test_closing_while_others_join() -> None:
    for seed in range(20):
        scheduler = Scheduler(seed)
        world = World(scheduler, RendezvousSettings("job", 2, 3, last_call_timeout=5.0))

        def plan(node: SimulatedNode) -> None:
            if node.node.id == "0":
                node.executor.register.change(moves.close)
            else:
                with pytest.raises(RendezvousClosedError):
                    while True:
                        node.join()

        for number in range(3):
            world.start(str(number), plan)
        scheduler.run()
        assert world.record.closed


# The checks are checked, too; other mistakes are those of `test_small_jobs`. --------------------------------


def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All seats are given, and more."""
    monkeypatch.setattr(RendezvousRecord, "is_full", property(lambda self: False))
    with pytest.raises(SchedulerError):
        for seed in range(200):
            random_world(seed).scheduler.run()
