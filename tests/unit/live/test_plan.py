"""Who rolls forward, sends and receives: as by a plainer way. The explorer tries whether that is right."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_wrapper.live import live_state
from ft_wrapper.live.copies import offsets
from ft_wrapper.live.plan import Copy, Held, Holding, Plan, Register, Route, Rung, _plan_of_copies, make_plan

SEALED = Register(sealed=3, origin=0)


def held(
    step: int, shard: str = "A", *, history: int = 3, ready: tuple[int, ...] = (), prepared: bool = False
) -> Held:
    return Held(shard, step, prepared, origin=0, history=history, ready=frozenset(ready))


def of(one: Held | None, needs: str = "A", copies: tuple[Copy, ...] = ()) -> Holding:
    return Holding(needs, one, copies)


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


@pytest.mark.parametrize(
    ("failed", "rung"), [(0, Rung.PEERS), (1, Rung.COPIES), (2, Rung.CHECKPOINT), (3, Rung.CHECKPOINT)]
)
def test_a_rung_that_failed_by_itself_is_left_out(failed: int, rung: Rung) -> None:
    said = [of(held(8), copies=(copy("A", 6),)), of(None)]
    said[1] = dataclasses.replace(said[1], gave_up=failed)
    plan = make_plan(said, SEALED)
    assert (plan.rung, plan.missing) == (rung, ())
    assert plan.void == ({0} if failed else frozenset())


def test_a_receiver_is_served_by_a_few_of_many_holders() -> None:
    plan = make_plan([of(held(8)) for _ in range(20)] + [of(None), of(None)], SEALED)
    first, second = (set(route.holders) for route in plan.routes)
    assert len(first) == len(second) == 8 and first != second and max(first | second) < 20


# ---- the same as the plain way, which takes the square of the ranks


def plain_plan(holdings: Sequence[Holding], register: Register) -> Plan:
    held = {rank: one.held for rank, one in enumerate(holdings) if one.held is not None}
    newest = max([register.sealed, *(one.history for one in held.values())])
    counts = {rank: one for rank, one in held.items() if newest >= 0 and newest in (one.history, *one.ready)}
    void = frozenset(held.keys() - counts.keys())
    needed = tuple(dict.fromkeys(one.needs for one in holdings))

    def able(shard: object, step: int) -> tuple[int, ...]:
        return tuple(rank for rank, one in counts.items() if one.shard == shard and step in one.reach)

    def some(holders: tuple[int, ...], receiver: int) -> tuple[int, ...]:
        first = 8 * receiver % len(holders)
        return (holders * 2)[first : first + 8] if len(holders) > 8 else holders

    reach = {step for one in counts.values() for step in one.reach}
    steps = [step for step in reach if all(able(shard, step) for shard in needed)]
    if not steps:
        missing = tuple(shard for shard in needed if all(one.shard != shard for one in counts.values()))
        sealed_origins = (one.origin for one in held.values() if one.history >= one.origin)
        plan = _plan_of_copies(holdings, needed, max([register.origin, *sealed_origins]))
        return dataclasses.replace(plan, void=frozenset(held), missing=missing or needed)
    step = max([step for step in steps if all(step in one.reach for one in counts.values())] or steps)
    stay = {rank for rank, one in counts.items() if one.shard == holdings[rank].needs and step in one.reach}
    first = next(iter(counts.values()))
    return Plan(
        Rung.PEERS,
        step,
        first.origin,
        newest,
        frozenset[int]().union(*(one.ready for one in counts.values())),
        rolls=frozenset(rank for rank, one in counts.items() if step in one.reach and step != one.step),
        routes=tuple(
            Route(rank, some(able(one.needs, step), rank))
            for rank, one in enumerate(holdings)
            if rank not in stay
        ),
        void=void | {rank for rank, one in counts.items() if step not in one.reach},
    )


def plain_offsets(nodes: Sequence[str], buddies: int) -> list[int]:
    size = len(nodes)

    def neighbours(offset: int) -> int:
        return sum(nodes[rank] == nodes[(rank + offset) % size] for rank in range(size))

    return sorted(range(1, size), key=neighbours)[:buddies]


@settings(max_examples=100)
@given(choose=st.randoms(use_true_random=False), size=st.integers(1, 40), shards=st.integers(1, 4))
def test_a_plan_is_that_of_the_plain_way(choose: random.Random, size: int, shards: int) -> None:
    names, lost, apart = "ABCD"[:shards], choose.choice((0.1, 0.5, 0.9)), choose.choice((0.0, 0.3))

    def holding(rank: int) -> Holding:
        needs = names[rank % shards] if choose.random() >= apart else choose.choice(names)
        step, history = choose.choice((7, 8)), 3 - (choose.random() < apart / 3)
        shard = needs if choose.random() >= apart else choose.choice("ABCDE")
        its = held(
            step, shard, history=history, ready=(3,) * choose.randrange(2), prepared=choose.random() < 0.5
        )
        copies = [copy(name, step, 0, 3) for name in names for step in (4, 6) if choose.random() < 0.3]
        return of(None if choose.random() < lost else its, needs, tuple(copies))

    said = [holding(rank) for rank in range(size)]
    register = choose.choice((SEALED, SEALED, Register()))
    assert make_plan(said, register) == plain_plan(said, register)


@settings(max_examples=100)
@given(choose=st.randoms(use_true_random=False), size=st.integers(1, 60), buddies=st.integers(1, 4))
def test_the_buddies_are_those_of_the_plain_way(choose: random.Random, size: int, buddies: int) -> None:
    a_node = choose.randint(1, 16)
    nodes = [str(rank // a_node) for rank in range(size)]
    for _ in range(choose.choice((0, 0, 1, size))):  # as ranks move when one is replaced
        one, other = choose.randrange(size), choose.randrange(size)
        nodes[one], nodes[other] = nodes[other], nodes[one]
    assert offsets(nodes, buddies) == plain_offsets(nodes, buddies)


def test_a_plan_and_the_buddies_take_no_square_of_the_ranks() -> None:
    asked = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal asked
            asked += 1
            return str.__eq__(self, other)  # type: ignore[no-any-return]

    size = 1024
    make_plan([of(held(7, Name(rank)), Name(rank)) for rank in range(size)], SEALED)
    make_plan([of(held(7, Name("A")) if rank % 2 else None, Name("A")) for rank in range(size)], SEALED)
    assert offsets([Name(rank // 8) for rank in range(size)], 1) == [8]
    assert asked < 16 * size


@pytest.mark.parametrize(
    ("lost", "level", "words"),
    [
        (0, logging.INFO, "starts at step 50, "),
        (3, logging.WARNING, "goes on at step 50 from checkpoint; 3 steps lost, "),
        (None, logging.WARNING, "goes on at step 50 from checkpoint; the steps behind it are lost: no rank"),
    ],
)
def test_a_fall_back_is_no_first_start(
    lost: int | None, level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ft_wrapper.live"):
        live_state._report(Plan(Rung.CHECKPOINT, step=50, lost=lost), 0.1)
    (record,) = caplog.records
    assert record.levelno == level and f"live state: {words}" in record.getMessage()
