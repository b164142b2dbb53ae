"""Which rank did not come, by where all of them stood: tables, the ranks of a group in order."""

from __future__ import annotations

import dataclasses

import pytest

from ft_wrapper.attribution import Interruption
from ft_wrapper.protocol.records import CollectivePosition, Fault, GroupSequence, Member
from ft_wrapper.restart.report import describe_faults, who_is_missing

SIZES = {"0": 4, "1": 4, "5": 5, "34": 2, "01": 2, "23": 2, "02": 2, "13": 2}
SLEEP = "at data.py:7 in read"
BACKWARD = "in _engine_run_backward, called at a.py:9 in train"
UNSEEN = "in wait, called at a.py:8 in train"


def fault(rank: int, what: str, exact: bool, **numbers: int) -> Fault:
    """What a rank said: ``all_reduce 0`` is an operation and its group; anything else is a place."""
    counts = tuple(
        GroupSequence(name[1:], SIZES[name[1:]], number, exact) for name, number in numbers.items()
    )
    operation, _, group = what.partition(" ")
    position = (
        CollectivePosition(operation, group, counts) if group in SIZES else CollectivePosition(counts=counts)
    )
    words = f"in {position}, called at a.py:5 in train" if position.operation else what
    kind, message = Interruption.SOFT_TIMEOUT, f"stood {words}"
    return Fault(Member(rank, 0), rank, kind, message, "host7", 100 + rank, position=position)


def all_others(what: str, **numbers: int) -> list[tuple[str, dict[str, int]]]:
    return [(what, numbers)] * 3


NOT_TO_5 = "did not reach all_reduce #5 of group 0"
WAIT = all_others("all_reduce 0", g0=5, g1=1)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("what", "numbers", "why"),
    [
        pytest.param("broadcast 1", {"g0": 4, "g1": 2}, NOT_TO_5, id="in another group"),
        pytest.param(SLEEP, {"g0": 4, "g1": 1}, NOT_TO_5, id="in its own code"),
        pytest.param(UNSEEN, {"g0": 4, "g1": 1}, NOT_TO_5, id="somewhere in a library"),
        pytest.param("recv 0", {"g0": 4, "g1": 1}, NOT_TO_5, id="waits for one peer"),
        pytest.param("barrier 0", {"g0": 4, "g1": 1}, NOT_TO_5, id="behind, in another operation"),
        pytest.param(
            "barrier 0",
            {"g0": 5, "g1": 1},
            "was in barrier instead of all_reduce #5 of group 0",
            id="another operation",
        ),
        pytest.param(
            "barrier 0",
            {"g0": 7, "g1": 1},
            "was 2 ahead of the other ranks, which were in all_reduce #5 of group 0",
            id="further",
        ),
        pytest.param("all_reduce 0", {"g0": 5, "g1": 1}, None, id="with the others"),
        pytest.param(UNSEEN, {"g0": 5, "g1": 1}, None, id="has begun it and waits for its end"),
        pytest.param(SLEEP, {"g0": 5, "g1": 1}, None, id="has begun it and does something else"),
    ],
)
def test_one_of_four_is_elsewhere(what: str, numbers: dict[str, int], why: str | None, exact: bool) -> None:
    for odd in range(4):
        stand = [*WAIT[:odd], (what, numbers), *WAIT[odd:]]
        faults = [fault(rank, each, exact, **said) for rank, (each, said) in enumerate(stand)]
        assert who_is_missing(faults) == ({} if why is None else {Member(odd, 0): why})


@pytest.mark.parametrize(
    ("what", "number", "why"),
    [
        ("all_reduce 0", 4, NOT_TO_5),
        ("all_reduce 0", 6, "was 1 ahead of the other ranks, which were in all_reduce #5 of group 0"),
        (SLEEP, 6, "was 1 ahead of the other ranks, which were in all_reduce #5 of group 0"),
    ],
)
def test_a_number_alone_tells_where_it_counts_collectives_only(what: str, number: int, why: str) -> None:
    for exact, named in ((True, {Member(3, 0): why}), (False, {})):
        faults = [fault(rank, "all_reduce 0", exact, g0=5) for rank in range(3)]
        assert who_is_missing([*faults, fault(3, what, exact, g0=number)]) == named


def test_in_a_backward_pass_the_operation_is_not_known() -> None:
    faults = [fault(rank, BACKWARD, False, g0=5) for rank in range(3)]
    why = "did not reach collective #5 of group 0"
    assert who_is_missing([*faults, fault(3, SLEEP, False, g0=4)]) == {Member(3, 0): why}
    for what, number in ((SLEEP, 5), (SLEEP, 6), (BACKWARD, 5)):
        assert who_is_missing([*faults, fault(3, what, False, g0=number)]) == {}


def test_one_that_waits_for_the_missing_one_is_not_named() -> None:
    faults = [fault(rank, "all_reduce 5", True, g5=5) for rank in range(3)]
    missing = fault(4, SLEEP, True, g5=4, g34=1)
    for second in ("all_reduce 34", "recv 34"):
        named = who_is_missing([*faults, fault(3, second, True, g5=4, g34=2), missing])
        assert named == {Member(4, 0): "did not reach all_reduce #5 of group 5"}


def test_one_that_stands_with_most_of_another_group_is_not_named() -> None:
    faults = [fault(rank, "all_reduce 0", True, g0=5) for rank in range(3)]
    faults.append(fault(3, "all_reduce 1", True, g0=4, g1=2))
    faults += [fault(rank, "all_reduce 1", True, g1=2) for rank in (4, 5)]
    why = "was in barrier instead of all_reduce #2 of group 1"
    assert who_is_missing([*faults, fault(6, "barrier 1", True, g1=2)]) == {Member(6, 0): why}


def mesh(*stand: tuple[str, int, int]) -> list[Fault]:
    """Four ranks in two rows and two columns: what each does, its number in its row and in its column."""
    rows, columns = ("01", "01", "23", "23"), ("02", "13", "02", "13")
    return [
        fault(rank, what, True, **{f"g{rows[rank]}": row, f"g{columns[rank]}": column})
        for rank, (what, row, column) in enumerate(stand)
    ]


def test_without_a_majority_one_in_its_own_code_is_named_for_whom_another_waits() -> None:
    first, second, third = ("all_reduce 02", 1, 2), ("all_reduce 13", 1, 2), ("all_reduce 23", 2, 1)
    named = who_is_missing(mesh(first, second, third, (SLEEP, 1, 1)))
    assert list(named) == [Member(3, 0)]
    assert who_is_missing(mesh(first, second, third, (UNSEEN, 1, 1))) == {}


def test_nothing_is_told_of_two_that_wait_for_each_other() -> None:
    faults = [fault(0, "all_reduce 01", True, g01=2, g23=1), fault(1, "barrier 01", True, g01=2, g23=1)]
    assert who_is_missing(faults) == {}


def test_the_others_may_wait_for_one_that_says_nothing() -> None:
    faults = [fault(rank, "all_reduce 0", True, g0=5) for rank in range(2)]
    assert who_is_missing([*faults, fault(3, SLEEP, True, g0=4)]) == {}
    # It is odd in group 0, but waits in its own for a rank that is not heard of.
    faults = [fault(rank, "all_reduce 0", True, g0=5) for rank in range(3)]
    assert who_is_missing([*faults, fault(3, "all_reduce 23", True, g0=4, g23=1)]) == {}


def test_ranks_that_say_no_numbers_are_not_named() -> None:
    assert who_is_missing([fault(rank, SLEEP, True) for rank in range(4)]) == {}
    assert who_is_missing([]) == {}


def test_what_the_line_says() -> None:
    faults = [fault(rank, "all_reduce 0", False, g0=4711, g1=11) for rank in range(3)]
    culprit = fault(3, "broadcast 1", False, g0=4710, g1=12)
    still = [
        Fault(one.member, one.rank, one.interruption, "made no progress for soft_timeout=3 s")
        for one in (*faults, culprit)
    ]
    assert describe_faults([*still, *faults, culprit]) == (
        "rank 3 (slot 3) did not reach all_reduce #4711 of group 0, made no progress for soft_timeout=3 s "
        "and stood in broadcast #12 of group 1, called at a.py:5 in train; rank 0 (slot 0), rank 1 (slot 1), "
        "rank 2 (slot 2) made no progress for soft_timeout=3 s and stood in all_reduce #4711 of group 0, "
        "called at a.py:5 in train"
    )


def test_the_missing_one_comes_first_wherever_the_others_stand() -> None:
    others = [fault(rank, "all_reduce 0", True, g0=5, g1=1) for rank in range(3)]
    places = [
        dataclasses.replace(one, message=f"{one.message} at {number}") for number, one in enumerate(others)
    ]
    text = describe_faults([*places, fault(3, "all_reduce 1", True, g0=4, g1=2)])
    assert text.startswith(
        "rank 3 (slot 3 on host7 pid 103) did not reach all_reduce #5 of group 0, stood in "
    )


def test_many_places_fit_in_the_line() -> None:
    text = describe_faults([fault(rank, f"at data.py:{rank} in read", True, g0=1) for rank in range(100)])
    assert text.count("data.py") == 4 and text.endswith("; 96 more elsewhere")


def test_where_one_stood_is_read_as_it_was_written() -> None:
    one = fault(3, "broadcast 1", True, g0=4710, g1=12)
    assert Fault.from_json(one.to_json(), "key") == one
    plain = Fault(Member(3, 0), 3, Interruption.SOFT_TIMEOUT, "stood still")
    assert 'position": [' not in plain.to_json() and Fault.from_json(plain.to_json(), "key") == plain
