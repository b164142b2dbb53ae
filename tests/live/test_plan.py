"""Who rolls forward, sends and receives: cases by hand. The explorer tries the rest."""

from __future__ import annotations

import dataclasses

import pytest

from ft_wrapper.live.plan import Copy, Held, Holding, Plan, Register, Route, Rung, make_plan

SEALED = Register(sealed=3, origin=0)


def held(
    step: int, shard: str = "A", *, history: int = 3, ready: tuple[int, ...] = (), prepared: bool = False
) -> Held:
    return Held(shard, step, prepared, origin=0, history=history, ready=frozenset(ready))


def of(one: Held | None, needs: str = "A", copies: tuple[Copy, ...] = ()) -> Holding:
    return Holding(needs, one, copies)


def test_all_at_one_step_do_nothing() -> None:
    plan = make_plan([of(held(7)), of(held(7))], SEALED)
    assert plan == Plan(Rung.PEERS, 7, origin=0, history=3)


def test_prepared_ones_follow_a_rank_that_applied() -> None:
    plan = make_plan([of(held(8)), of(held(7, prepared=True)), of(None)], SEALED)
    assert (plan.rung, plan.step, plan.rolls) == (Rung.PEERS, 8, {1})
    assert plan.routes == (Route(2, (0, 1)),)


def test_all_prepared_go_on() -> None:
    assert make_plan([of(held(7, prepared=True)), of(held(7, prepared=True))], SEALED).step == 8


def test_one_that_is_not_prepared_holds_the_step_back() -> None:
    plan = make_plan([of(held(7, prepared=True)), of(held(7))], SEALED)
    assert (plan.step, plan.rolls, plan.routes) == (7, frozenset(), ())


def test_a_torn_rank_receives_the_step_of_the_others() -> None:
    plan = make_plan([of(None), of(held(8)), of(held(7, prepared=True))], SEALED)
    assert (plan.step, plan.routes) == (8, (Route(0, (1, 2)),))


def test_a_holder_of_a_history_that_went_on_without_it_is_void() -> None:
    plan = make_plan([of(held(9, history=2)), of(held(8))], SEALED)
    assert (plan.step, plan.void, plan.routes) == (8, {0}, (Route(0, (1,)),))


def test_the_register_makes_void_whom_no_one_here_can() -> None:
    plan = make_plan([of(held(9, history=2)), of(None)], SEALED)
    assert (plan.rung, plan.void, plan.missing) == (Rung.CHECKPOINT, {0}, ("A",))


def test_who_finished_without_seeing_the_seal_counts() -> None:
    plan = make_plan([of(held(8, history=2, ready=(3,))), of(None)], SEALED)
    assert (plan.rung, plan.step, plan.history, plan.ready) == (Rung.PEERS, 8, 3, {3})


def test_shards_take_a_step_that_all_of_them_reach() -> None:
    plan = make_plan(
        [of(held(8), "A"), of(held(7, "B", prepared=True), "B"), of(held(7, prepared=True), "A")], SEALED
    )
    assert (plan.step, plan.rolls) == (8, {1, 2})


def test_a_rank_that_is_to_hold_another_shard_receives_it() -> None:
    plan = make_plan([of(held(7, "B"), "A"), of(held(7, "A"), "B")], SEALED)
    assert plan.routes == (Route(0, (1,)), Route(1, (0,)))


def test_a_shard_without_a_holder_needs_a_checkpoint() -> None:
    plan = make_plan([of(held(7, "A"), "A"), of(None, "B")], SEALED)
    assert (plan.rung, plan.missing, plan.void) == (Rung.CHECKPOINT, ("B",), {0})


def test_no_one_holds_anything_at_the_first_start() -> None:
    assert make_plan([of(None), of(None)], Register()).rung is Rung.CHECKPOINT


def test_another_number_of_shards_needs_a_checkpoint() -> None:
    plan = make_plan([of(held(7, "1 of 4"), "1 of 2"), of(held(7, "2 of 4"), "2 of 2")], SEALED)
    assert plan.rung is Rung.CHECKPOINT


def copy(shard: str, step: int, *origins: int) -> Copy:
    return Copy(shard, step, frozenset(origins or (0,)))


def test_all_go_back_to_the_newest_step_of_which_each_shard_has_a_copy() -> None:
    lost = of(None, "A")
    other = of(held(12, "B"), "B", (copy("B", 5), copy("B", 10), copy("A", 5), copy("A", 10)))
    plan = make_plan([lost, other], SEALED)
    assert (plan.rung, plan.step, plan.routes) == (Rung.COPIES, 10, (Route(0, (1,)),))
    assert plan.void == {1}


def test_copies_of_a_history_that_was_given_up_do_not_count() -> None:
    given_up = of(None, "A", (copy("A", 20, 0), copy("B", 20, 0)))
    other = of(None, "B", (copy("A", 10, 0, 3), copy("B", 10, 0, 3)))
    plan = make_plan([given_up, other], Register(sealed=3, origin=3))
    assert (plan.rung, plan.step) == (Rung.COPIES, 10)


@pytest.mark.parametrize("field", ["step", "history"])
def test_a_plan_does_not_depend_on_who_makes_it(field: str) -> None:
    said = [of(held(8)), of(held(7, prepared=True)), of(None)]
    assert make_plan(said, SEALED) == make_plan([dataclasses.replace(one) for one in said], SEALED), field


def test_a_receiver_is_served_by_a_few_of_many_holders() -> None:
    plan = make_plan([of(held(8)) for _ in range(20)] + [of(None), of(None)], SEALED)
    first, second = (set(route.holders) for route in plan.routes)
    assert len(first) == len(second) == 8 and first != second and max(first | second) < 20
