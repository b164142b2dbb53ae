"""Jobs of up to two dozen nodes with much happening to them, all from a seed, and what must hold meanwhile.

Beside what `simulated_nodes.World` checks after each step: a lost node is out within a time that does not
depend on how many were lost; who lives and was not stopped is never called silent, also where the nodes come
back from an outage of the store at different times; everybody is told the newest record soon; keys stay
bounded, and so does what each node asks of the store.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable, Sequence

from simulated_nodes import SimulatedNode, World, check_settled
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from ft_wrapper.agent.ft_nodes import what_follows
from ft_wrapper.agent.rounds import What
from ft_wrapper.exception import StoreUnavailable
from ft_wrapper.rendezvous.executor import REFRESH
from ft_wrapper.rendezvous.moves import adopt_rank_policy, close
from ft_wrapper.rendezvous.presence import LOOK_AGAIN, RECONNECTS, WATCHED
from ft_wrapper.rendezvous.register import KEPT_VERSIONS, RecordRegister
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import Scheduler, Task

BEGIN = 40.0
"""By then all have joined."""
QUIET = 100.0
"""From then on nothing new happens."""
TOLD_WITHIN = 12.0
OUT_WITHIN = 34.0
"""A timeout, two looks in which one stands still, one more, and what a slow node takes."""
_LOOK = 2.0


class DisturbedWorld(World):
    """Checks more, once in a virtual second.

    Attributes:
        over: nodes end their work.
        speed: seconds that an operation of a node takes.
        cut_off: by node, until when its client does not reach the store.
        failed_at: by node, since when its heart's next operation fails.
        quiet_from: until then something is going on, as far as known.
    """

    def __init__(self, scheduler: Scheduler, settings: RendezvousSettings, hosted: bool) -> None:
        super().__init__(scheduler, settings, hosted=hosted)
        self.over = False
        self.speed: dict[str, float] = {}
        self.cut_off: dict[str, float] = {}
        self.failed_at: dict[str, float] = {}
        self.quiet_from = 0.0
        self.may_hold = False  # somebody may have to give others time before it judges them
        self.stale_entries = 0
        self.may_be_deaf: dict[str, float] = {}  # until when a node need not be told
        self.heart_stopped: dict[str, float] = {}  # until when: its sweep tells of a wake that was lost
        self.pending: dict[str, str] = {}
        self.entered_at: dict[str, float] = {}
        self.asked: collections.Counter[str] = collections.Counter()
        self.store.on_operation(self._take_time)
        self.scheduler.spawn("checks", self._look_after)

    def disturb(self, until: float) -> None:
        """Notes that something goes on until then."""
        self.quiet_from = max(self.quiet_from, until)
        self.disturbed_at = max(self.disturbed_at, until)

    def kill(self, node: SimulatedNode) -> None:
        for task in (node.agent, *node.others):
            if self.pending.get(task.name) == "multi_set":
                self._wakes_nobody()
        self.disturb(self.scheduler.now())
        super().kill(node)

    def _wakes_nobody(self) -> None:
        now = self.scheduler.now()
        for node in self.nodes:
            before = self.may_be_deaf.get(node.node.name, 0.0)
            # Of two in a row that were lost only the last is passed on.
            longer = LOOK_AGAIN if before > now else REFRESH + self.settings.keep_alive_interval
            begins = max(now, self.heart_stopped.get(node.node.name, 0.0))
            self.may_be_deaf[node.node.name] = max(begins + longer + TOLD_WITHIN, before)

    def lose_wakes(self) -> None:
        """The next record that a node's heart writes wakes no one."""
        self.store.fail("multi_set", client="heart *", error=StoreUnavailable("simulated"))

    def stop(self, node: SimulatedNode, tasks: Sequence[Task], seconds: float) -> None:
        """Stops tasks of a node."""
        now = self.scheduler.now()
        end, name = now + seconds, node.node.name
        watcher, heart = node.others
        if heart in tasks:
            self.heart_stopped[name] = max(end, self.heart_stopped.get(name, 0.0))
            if self.may_be_deaf.get(name, 0.0) > now:
                self.may_be_deaf[name] += seconds
        for task in tasks:
            if task is watcher:
                waits = task._waiter is not None and bool(task._waiter.missing)
                deaf = end + TOLD_WITHIN + (0.0 if waits else LOOK_AGAIN)
                self.may_be_deaf[name] = max(deaf, self.may_be_deaf.get(name, 0.0))
            if task is heart and seconds > self.settings.keep_alive_interval:
                excused = end + 2 * self.settings.keep_alive_interval
                node.excused_until = max(excused, node.excused_until)
            self.scheduler.pause(task, seconds)
        self.disturb(end)
        self.may_hold = True
        self.stale_entries += 1

    def cut(self, seconds: float, lag: Callable[[], float]) -> None:
        """The store cannot be reached; each node notices its return when its own client tries again."""
        end = self.scheduler.now() + seconds
        for node in self.nodes:
            back = end + lag()
            self.cut_off[node.node.name] = back
            self._excuse_both(node)
            before = self.may_be_deaf.get(node.node.name, 0.0)
            # It may be about to wait for a key that is gone by then.
            longer = LOOK_AGAIN if before > self.scheduler.now() else 0.0
            self.may_be_deaf[node.node.name] = max(back + longer + TOLD_WITHIN, before)
            self.disturb(back)
        self.may_hold = True

    def fail_once(self, node: SimulatedNode) -> None:
        """The next sign of life of a node fails, or its next look."""
        self.store.fail("add", client=f"heart {node.node.name}", error=StoreUnavailable("simulated"))
        self.failed_at[node.node.name] = self.scheduler.now()
        self._excuse_both(node)

    def _excuse_both(self, node: SimulatedNode) -> None:
        """A sign of life that failed and an outage may be longer than the timeout together."""
        now, interval = self.scheduler.now(), self.settings.keep_alive_interval
        failed, back = self.failed_at.get(node.node.name, -math.inf), self.cut_off.get(node.node.name, 0.0)
        if abs(failed - back) < 2 * self.settings.keep_alive_timeout or 0.0 <= failed <= now < back:
            node.excused_until = max(now, back, node.excused_until) + 3 * interval

    def _take_time(self, client: str, operation: str, args: Sequence[object]) -> None:
        self.pending[client] = operation
        what, _, name = client.partition(" ")
        self.asked["looks" if operation == "add" and args[1] == 0 else what] += 1
        now = self.scheduler.now()
        seconds = max(self.speed.get(name, 0.0), self.cut_off.get(name, 0.0) - now)
        if seconds > 0 and self.scheduler.current is not None:
            self.scheduler.sleep(seconds)
        if operation == "multi_set" and any(f.operation == "multi_set" for f in self.store._contents.faults):
            self._wakes_nobody()

    # What must hold ----------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        while not self.over:
            self.scheduler.sleep(_LOOK)
            self._check_lost()
            self._check_told()
            self._check_keys()

    def _check_lost(self) -> None:
        now = self.scheduler.now()
        there = {node.name for node in self.record.nodes}
        for name in there:
            self.entered_at.setdefault(name, now)
        if self.record.closed or not any(self.by_name[name].alive for name in there):
            return
        held = (RECONNECTS + self.settings.keep_alive_interval) * self.may_hold
        within = OUT_WITHIN + held
        since = max(self.quiet_from, *(self.entered_at[name] for name in there))
        if any(until > since for until in self.may_be_deaf.values()):
            # Who is there may not be known to those that watch, until the next sweep.
            within += REFRESH + self.settings.keep_alive_interval
        late = [name for name in there if self.by_name[name].dead]
        assert not late or now <= since + within, (
            f"lost nodes are still in the record after {now - since:g} s: {late}"
        )

    def _check_told(self) -> None:
        now = self.scheduler.now()
        old = [version for version, at in self.changes.items() if at <= now - TOLD_WITHIN]
        if not old:
            return
        newest = max(old)
        for node in self.nodes:
            deaf = now < max(self.may_be_deaf.get(node.node.name, 0.0), node.began_at + TOLD_WITHIN)
            if not node.alive or node.told is None or deaf:
                continue
            assert node.told.version >= newest, (
                f"{node.node} was not told version {newest} of {self.changes[newest]:g} s"
            )

    def _check_keys(self) -> None:
        kinds = collections.Counter(key.split("/")[3] for key in self._contents)
        # One more for each that may have died before it deleted one.
        dead = sum(node.dead for node in self.nodes)
        assert kinds["version"] <= KEPT_VERSIONS + 4 + dead, f"keys left over: {kinds}"
        most = 3 + self.stale_entries + dead
        assert max(kinds["log"], kinds["count"]) <= most, f"keys left over: {kinds}"

    def check_traffic(self, seconds: float, before: collections.Counter[str], changes: int) -> None:
        """What the nodes asked of the store while nothing happened."""
        n, spares = len(self.record.nodes), len(self.record.spares)
        asked = self.asked - before
        looks = seconds / self.settings.keep_alive_interval + 1
        most = looks * WATCHED * (n + spares)
        assert asked["looks"] <= most, f"hearts looked {asked['looks']} times in {seconds:g} s, not {most:g}"
        # A heartbeat of each, and the first one's look at who is kept out.
        most = looks * (n + 1) + 4 * n * (seconds / REFRESH + 1)
        assert asked["heart"] <= most, f"hearts asked {asked['heart']} times in {seconds:g} s, not {most:g}"
        most = n * (2 * changes + 2 * (seconds / LOOK_AGAIN + 2))
        assert asked["watch"] <= most, f"watchers asked {asked['watch']} times for {changes} changes"


def disturbed_world(seed: int) -> DisturbedWorld:
    """A job with many things happening to it."""
    dice = random.Random(seed)
    scheduler = Scheduler(seed, max_steps=60_000, max_time=1500.0)
    is_large = dice.random() < 0.25
    seated = dice.randint(10, 22) if is_large else dice.randint(2, 6)
    spares = dice.choice([0, 0, 1, 2, 3])
    settings = RendezvousSettings(
        "job", 1, seated, join_timeout=10_000.0, last_call_timeout=dice.choice([0.0, 1.0])
    )
    world = DisturbedWorld(scheduler, settings, hosted=dice.random() < 0.5)
    rank_policy = dice.random() < 0.5

    def plan(node: SimulatedNode) -> None:
        node.join()
        while not world.over:
            if rank_policy:
                node.executor.register.change(adopt_rank_policy)
            while not world.over and not _has_to_come(node):
                scheduler.sleep(_LOOK)
            if not world.over:
                node.join()
        node.executor.register.change(close)

    def start(node_id: str) -> SimulatedNode:
        made = world.start(node_id, plan)
        world.disturb(scheduler.now())
        world.may_hold = world.may_hold or scheduler.now() > BEGIN - 1.0
        world.speed[made.node.name] = dice.choice([0.0, 0.0, 0.001, 0.01, 0.05])
        return made

    def starts() -> None:
        for number in range(seated + spares):
            start(str(number))
            if dice.random() < 0.5:
                scheduler.sleep(dice.uniform(0, 3.0))

    def living() -> list[SimulatedNode]:
        return [node for node in world.nodes if node.alive and node.others]

    def lose_some() -> None:
        """Neighbours in the ring, one or many; or the spares' sake: all that have seats."""
        alive = {node.node.name: node for node in living()}
        ring = [node.name for node in world.record.nodes if node.name in alive]
        if len(ring) < 2:
            return
        first = dice.randrange(len(ring))
        ring = ring[first:] + ring[:first]
        if dice.random() < 0.2 and world.record.spares:
            ring = [node.name for node in world.record.participants if node.name in alive]
            many = min(len(ring), len(alive) - 1)
        else:
            many = dice.choice([1, 2, len(ring) // 2, len(ring) - 1])
        lost = [alive[name] for name in ring[: max(1, min(many, len(alive) - 1))]]
        for node in lost:
            world.kill(node)
        if dice.random() < 0.5:
            scheduler.sleep(dice.choice([0.5, 5.0, 20.0]))
            for node in lost[: dice.randint(1, 2)]:
                start(node.node.id)

    def pick() -> SimulatedNode:
        return dice.choice(living())

    def freeze() -> None:
        node = pick()
        world.stop(node, [node.agent, *node.others], dice.choice([3.0, 12.0, 25.0, 60.0]))

    def deafen() -> None:
        """A watcher, or a whole node for a moment, is stopped while the record changes often."""
        node = pick()
        seconds = dice.choice([8.0, 20.0])
        watcher, kind = node.others[0], dice.random()
        if kind < 0.25:  # by its own agent
            node.slow_to_note = seconds
            begins = max(scheduler.now(), watcher._paused_until, world.cut_off.get(node.node.name, 0.0))
            deaf = begins + 1.0 + seconds + TOLD_WITHIN
            world.may_be_deaf[node.node.name] = max(deaf, world.may_be_deaf.get(node.node.name, 0.0))
            churn(1)
        elif kind < 0.7:  # after it was woken: before it reads, or before it waits again
            step = watcher.steps + dice.randint(1, 3)
            scheduler.at_step(watcher, step, lambda: world.stop(node, [watcher], seconds))
            churn(1)
        else:
            world.stop(node, [node.agent, *node.others] if dice.random() < 0.5 else [watcher], seconds)
        scheduler.sleep(1.0)
        churn(dice.choice([3, KEPT_VERSIONS + 8, 2 * KEPT_VERSIONS + 16]))

    def churn(changes: int) -> None:
        world.speed["churn"] = 0.01  # else so many versions would pass while a slow node is about to wait
        for name, back in world.cut_off.items():
            if back > scheduler.now():  # it may be about to wait
                deaf = back + LOOK_AGAIN + TOLD_WITHIN
                world.may_be_deaf[name] = max(deaf, world.may_be_deaf.get(name, 0.0))
        board = pick().board.__class__(scheduler)
        register = RecordRegister(world.store.clone("churn churn"), world.initial, board)
        for _ in range(changes):
            register.read()
            register.touch()

    def cut() -> None:
        seconds = dice.choice([3.0, 8.0, 20.0, 45.0])
        longest = min(16.0, seconds + 1.0) + 1.0  # each attempt lasts as long as all before it
        world.cut(seconds, lambda: dice.choice([0.0, dice.uniform(0, 1.0), longest * dice.random(), longest]))
        scheduler.sleep(seconds)

    def leave() -> None:
        node = pick()
        if len(living()) < 2 or node.joins_since is not None:
            return
        node.leaving = True

        def go() -> None:
            node.inside = None
            scheduler.crash(node.agent)
            began = scheduler.now()
            try:
                node.executor.exit()
            except RendezvousTimeoutError:
                assert world.cut_off.get(node.node.name, 0.0) >= began + settings.close_timeout
                world.kill(node)
            else:
                node.stop_others()

        scheduler.spawn(f"agent {node.node.name}", go)
        if dice.random() < 0.5:
            scheduler.sleep(dice.choice([0.0, 10.0]))
            start(node.node.id)

    def again() -> None:
        start(pick().node.id)

    def fail() -> None:
        for operation in ("append", "add", "compare_set"):
            world.store.repeat(operation, "*/[slc]*", times=dice.randint(1, 3))
        world.fail_once(pick())

    def lose_wakes() -> None:
        world.lose_wakes()
        if len(living()) > 1:
            world.kill(pick())
            scheduler.sleep(30.0)  # until it is taken out

    happenings = [lose_some, lose_some, freeze, deafen, deafen, deafen, cut, cut, leave, again, fail]
    happenings += [lose_wakes, lose_wakes]

    def disturb() -> None:
        scheduler.sleep(BEGIN)
        for happen in dice.sample(happenings, dice.randint(1, 4)):
            if living():
                happen()
                world.disturb(scheduler.now())
            scheduler.sleep(dice.choice([0.0, 1.0, 7.0, 20.0]))
        world.store._contents.faults.clear()
        settle = max(world.quiet_from, *world.may_be_deaf.values(), 0.0) + 110.0
        scheduler.sleep(settle - scheduler.now())
        before, version = world.asked.copy(), world.record.version
        scheduler.sleep(30.0)
        check_settled(world)
        world.check_traffic(30.0, before, world.record.version - version)
        world.over = True

    scheduler.spawn("starts", starts)
    scheduler.spawn("disturbs", disturb)
    return world


def _has_to_come(node: SimulatedNode) -> bool:
    """As our own agent sees it: by what it was told."""
    assert node.told is not None
    assert node.joined is not None
    if node.told.version < node.joined.version:
        return False
    assert node.last_round is not None
    news = what_follows(node.told, node.node, node.last_round)
    return news is not None and news.what in (What.COME, What.GONE)
