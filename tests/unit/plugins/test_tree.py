"""Tree: who takes over from whom, restart after restart, no matter who is lost and who computes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_job import Job

from ft_wrapper.rank_assignment import Layer, LayerFlag, RankDiscarded, Tree
from ft_wrapper.state import State

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def by(size: int) -> Callable[[State], str]:
    """A key that makes branches of so many neighbouring slots."""
    return lambda state: f"node {(state.initial_rank or 0) // size}"


def tree_job(world_size: int, *layers: Layer, keep: Callable[[int], int] | None = None) -> Job:
    return Job(world_size, lambda: Tree(layers, keep))


def nodes_of_two(world_size: int = 8) -> Job:
    """Whole nodes of two ranks, three of them active: as large training frameworks use it."""
    return tree_job(world_size, Layer(max_ranks=6, flag=RESERVE), Layer(2, 2, key_or_fn=by(2), flag=RESERVE))


def active_after(job: Job, *losses: set[int]) -> dict[int, int]:
    """Who is active once all have entered, and have restarted after each of these losses."""
    for lost in (set[int](), *losses):
        job.enter(lost=lost)
        job.check()
    return job.active()


def test_activates_in_depth_first_order_as_far_as_every_branch_allows() -> None:
    job = tree_job(8, Layer(max_ranks=3), Layer(max_ranks=2, key_or_fn=by(4)))
    assert active_after(job) == {0: 0, 1: 1, 4: 2}
    assert job.ranks() == {slot: slot for slot in range(8)}


def test_a_branch_that_is_too_small_is_terminated_whole_and_replaced() -> None:
    assert active_after(nodes_of_two()) == {slot: slot for slot in range(6)}
    job = nodes_of_two()
    assert active_after(job, {1}) == {7: 0, 6: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert job.ranks() == {2: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5}
    assert "min_ranks=2" in str(job.discarded[0])


def test_without_reserve_left_ranks_shift() -> None:
    job = nodes_of_two()
    assert active_after(job, {1}, {5}) == {7: 0, 6: 1, 2: 2, 3: 3}
    assert set(job.discarded) == {0, 4}


def test_the_nearest_reserve_comes_first_and_the_youngest_of_it() -> None:
    layers = Layer(flag=RESERVE), Layer(max_ranks=2, key_or_fn=by(4), flag=RESERVE)
    assert active_after(tree_job(8, *layers)) == {0: 0, 1: 1, 4: 2, 5: 3}
    assert active_after(tree_job(8, *layers), {1}) == {0: 0, 3: 1, 4: 2, 5: 3}
    # One reserve rank is left on the node, the other comes from the next.
    assert active_after(tree_job(8, *layers), {1}, {0, 3}) == {2: 0, 7: 1, 4: 2, 5: 3}


def test_a_reserve_rank_takes_one_place_only() -> None:
    """Slot 5 from another node, 2 from its own, and no one is left for the third."""
    nodes = "abbcdd"
    branches = Layer(max_ranks=1, key_or_fn=lambda s: nodes[s.initial_rank or 0], flag=RESERVE)
    assert active_after(tree_job(6, Layer(flag=RESERVE), branches), {0, 1, 3}) == {5: 0, 2: 1, 4: 2}


@pytest.mark.parametrize(
    ("layers", "losses", "active"),
    [
        ((Layer(), Layer(max_ranks=1, key_or_fn=by(2), flag=RESERVE)), [{0}], {1: 0, 2: 1}),
        ((Layer(), Layer(max_ranks=1, key_or_fn=by(2), flag=RESERVE)), [{0}, {1}], {2: 0}),
        ((Layer(flag=RESERVE), Layer(max_ranks=1, key_or_fn=by(2))), [{0}], {2: 0}),
    ],
)
def test_a_layer_without_the_flag_stops_the_search(
    layers: tuple[Layer, ...], losses: list[set[int]], active: dict[int, int]
) -> None:
    assert active_after(tree_job(4, *layers), *losses) == active


def test_backfill_takes_the_highest_active_ranks_of_the_branch() -> None:
    job = tree_job(8, Layer(), Layer(key_or_fn=by(4), flag=BACKFILL))
    assert active_after(job, {0}) == {3: 0, 1: 1, 2: 2, 4: 3, 5: 4, 6: 5, 7: 6}
    assert job.ranks() == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}


def test_backfill_reaches_as_far_as_the_flag_does() -> None:
    job = tree_job(8, Layer(flag=BACKFILL), Layer(key_or_fn=by(4), flag=BACKFILL))
    assert active_after(job, {0, 5}) == {6: 0, 1: 1, 2: 2, 3: 3, 4: 4, 7: 5}


def test_the_filter_limits_the_active_ranks_and_its_leavings_are_the_youngest_reserve() -> None:
    job = tree_job(7, Layer(max_ranks=6, flag=RESERVE), keep=lambda n: n // 4 * 4)
    assert active_after(job, {1}) == {0: 0, 5: 1, 2: 2, 3: 3}


def test_who_became_reserve_at_a_restart_is_younger_than_who_was_it_before() -> None:
    wanted = 3
    job = tree_job(6, Layer(flag=RESERVE), keep=lambda n: min(n, wanted))
    job.enter()
    wanted = 2
    assert active_after(job) == {0: 0, 1: 1}
    job.enter(lost={0})
    assert job.active() == {2: 0, 1: 1}
    job.enter(lost={2})
    assert job.active() == {5: 0, 1: 1}


def test_below_the_first_layers_minimum_all_are_discarded() -> None:
    job = tree_job(4, Layer(min_ranks=3))
    job.enter()
    assert job.enter(lost={0, 2}) == {}
    assert set(job.discarded) == {1, 3}


def test_small_branches_are_terminated_at_the_first_entry_too() -> None:
    """No RESERVE around the lost rank's own branch: the others move up, the reserve stays."""
    job = tree_job(5, Layer(flag=RESERVE, max_ranks=3), Layer(2, key_or_fn=lambda s: "ab"[s.rank != 0]))
    assert active_after(job) == {1: 0, 2: 1}
    assert set(job.discarded) == {0}


def test_a_restart_without_losses_changes_nothing() -> None:
    job = nodes_of_two()
    job.enter()
    before = job.enter(lost={1})
    assert job.enter() == before


def test_ranks_of_a_branch_become_neighbours_and_the_job_is_warned() -> None:
    job = tree_job(4, Layer(), Layer(key_or_fn=lambda state: "even" if state.rank % 2 == 0 else "odd"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.enter()
        assert {str(w.message).split(" of the job")[0] for w in caught} == {"rank 1", "rank 2"}
        assert job.ranks() == {0: 0, 2: 1, 1: 2, 3: 3}
        caught.clear()
        job.enter(lost={2})
        assert not caught
    job.check()


def test_a_marked_rank_is_discarded_before_it_takes_part() -> None:
    job = tree_job(2, Layer())
    job.enter()
    ctx: Any = dataclasses.make_dataclass("Ctx", ["state", "store", "terminated_ranks"])(
        job.states[1], None, {1}
    )
    with pytest.raises(RankDiscarded, match="rank 1"):
        Tree([Layer()])(ctx)


def replaced(job: Job, *slots: int, lost: set[int] | None = None) -> dict[int, int]:
    """Who is active once these have new processes, and others were lost meanwhile."""
    for slot in slots:
        job.replace_process(slot)
    job.enter(lost=lost or ())
    job.check()
    return job.active()


def test_a_replaced_process_takes_its_predecessors_place() -> None:
    job = nodes_of_two()
    active, ranks = active_after(job, {1}), job.ranks()
    assert (replaced(job, 6), job.ranks()) == (active, ranks)
    job.enter(lost={2})
    job.check()
    assert set(job.discarded) == {0, 3}


def test_a_replaced_process_on_another_node_does_not() -> None:
    """It is the youngest reserve, but cold."""
    nodes = dict(enumerate("aabbcc"))
    branches = Layer(key_or_fn=lambda s: nodes[s.initial_rank or 0], flag=RESERVE)
    job = tree_job(6, Layer(max_ranks=4, flag=RESERVE), branches)
    job.enter()
    nodes[0] = "c"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replaced(job, 0) == {5: 0, 1: 1, 2: 2, 3: 3}
    assert job.ranks() == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 0: 5}


def reserve_of_two() -> Job:
    """All of five ranks but two are active, in a single branch; they have entered."""
    job = tree_job(5, Layer(max_ranks=3, flag=RESERVE))
    job.enter()
    return job


def test_a_warm_reserve_rank_steps_in_before_the_lost_ranks_new_process() -> None:
    job = reserve_of_two()
    assert replaced(job, 1) == {0: 0, 4: 1, 2: 2}
    # By now it is warm, and the youngest.
    assert replaced(job, lost={0}) == {1: 0, 4: 1, 2: 2}


def test_places_that_no_process_comes_back_to_are_filled_first_and_the_others_kept() -> None:
    """Slot 3 is reserve, and it stays so."""
    assert replaced(reserve_of_two(), 0, 1, 3, lost={2}) == {0: 0, 1: 1, 4: 2}


def test_new_processes_step_in_where_there_are_too_few_warm_ones() -> None:
    assert replaced(reserve_of_two(), 3, lost={1, 2}) == {0: 0, 4: 1, 3: 2}


def test_a_new_process_keeps_its_place_where_no_reserve_may_take_it() -> None:
    """Slot 5 waits on another node."""
    job = tree_job(6, Layer(), Layer(max_ranks=2, key_or_fn=by(3), flag=RESERVE))
    active_after(job, {2})
    assert replaced(job, 0) == {0: 0, 1: 1, 3: 2, 4: 3}


def fails_on_all(job: Job, message: str) -> None:
    outcomes = job.try_enter()
    assert len(outcomes) == len(job.states)
    for outcome in outcomes.values():
        assert isinstance(outcome, RuntimeError)
        assert message in str(outcome)


def test_different_keys_in_the_first_layer_fail_on_all_ranks() -> None:
    fails_on_all(tree_job(4, Layer(key_or_fn=by(2))), "['node 0', 'node 1']")


@pytest.mark.parametrize("wanted", [5, -1, None, 2.0, True])
def test_a_filter_that_returns_nonsense_fails_on_all_ranks(wanted: Any) -> None:
    fails_on_all(tree_job(4, Layer(), keep=lambda n: wanted), f"world_size_filter(4) returned {wanted!r}")


def test_a_filter_that_raises_fails_on_all_ranks() -> None:
    fails_on_all(tree_job(4, Layer(), keep=lambda n: n // 0), "ZeroDivisionError")


def test_a_key_that_is_none_fails_and_says_so() -> None:
    job = tree_job(1, Layer(key_or_fn=lambda state: None))  # type: ignore[arg-type,return-value]
    (outcome,) = job.try_enter().values()
    assert isinstance(outcome, TypeError)
    assert "key_or_fn returned None on rank 0" in str(outcome)


@dataclasses.dataclass
class Scenario:
    world_size: int
    layers: list[Layer]
    keep: Callable[[int], int] | None
    losses: list[set[int]]
    new: list[set[int]]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    world_size = draw(st.integers(1, 9))
    layers = []
    for depth in range(draw(st.integers(1, 3))):
        branch = draw(st.lists(st.integers(0, 2), min_size=world_size, max_size=world_size))
        min_ranks = draw(st.integers(0, 3))
        max_ranks = draw(st.none() | st.integers(max(1, min_ranks), 6))
        flag = draw(st.sampled_from([None, RESERVE, BACKFILL, RESERVE | BACKFILL]))
        key: Any = "root" if depth == 0 else (lambda state, branch=branch: f"b{branch[state.initial_rank]}")
        layers.append(Layer(min_ranks, max_ranks, key, flag))
    keep = draw(st.sampled_from([None, lambda n: n // 2 * 2, lambda n: max(0, n - 1)]))
    some = st.sets(st.integers(0, world_size - 1), max_size=4)
    losses = draw(st.lists(some, max_size=4))
    new = draw(st.lists(some, min_size=len(losses), max_size=len(losses)))
    return Scenario(world_size, layers, keep, losses, new)


def play(scenario: Scenario, choose: Callable[[list[int]], int]) -> list[dict[int, State]]:
    job = Job(scenario.world_size, lambda: Tree(scenario.layers, scenario.keep), choose)
    history = []
    for loss, new in zip([set(), *scenario.losses], [set(), *scenario.new], strict=True):
        lost = loss & set(job.states)
        new = new & set(job.states) - lost if len(history) else set()
        if lost | new == set(job.states):
            break
        before, there = job.active(), set(job.states)
        for slot in new:
            job.replace_process(slot)
        history.append(dict(job.enter(lost)))
        job.check()
        check_promises(job, scenario, lost | new, before)
        anywhere = all(layer.has(RESERVE) for layer in scenario.layers)
        if anywhere and scenario.keep is None and there - lost == set(job.states):
            # A warm one that waits has taken the place of each new process.
            waiting = set(job.states) - new - set(job.active())
            assert not waiting or not (new & set(before) & set(job.active()))
    return history


def check_promises(job: Job, scenario: Scenario, lost: set[int], before: dict[int, int]) -> None:
    paths = {
        slot: [
            layer.key_or_fn(state) if callable(layer.key_or_fn) else layer.key_or_fn
            for layer in scenario.layers
        ]
        for slot, state in job.states.items()
    }
    for depth, layer in enumerate(scenario.layers):
        branches: dict[tuple[str, ...], int] = {}
        for path in paths.values():
            prefix = tuple(path[: depth + 1])
            branches[prefix] = branches.get(prefix, 0) + 1
        assert all(size >= layer.min_ranks for size in branches.values())
    if not lost and scenario.keep is None and before:
        assert job.active() == before
    if scenario.keep is None:
        # Reserve ranks only take the places of lost ones.
        assert len(job.active()) <= len(before) or not before


@settings(deadline=None, max_examples=80)
@given(scenarios())
@pytest.mark.filterwarnings("ignore:rank .* is elsewhere")
def test_ranks_have_no_gaps_and_are_the_same_whoever_computes(scenario: Scenario) -> None:
    assert play(scenario, min) == play(scenario, max) == play(scenario, lambda ranks: ranks[len(ranks) // 2])
