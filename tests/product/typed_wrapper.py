"""What type checkers, and so editors, see of the wrapper: its arguments, and the wrapped function's own.

No test: mypy checks it in each lint. It finds each mistake that is marked here, and names a mark too many.
"""

from __future__ import annotations

from datetime import timedelta

from ft_wrapper import CallWrapper, Compose, Limits, Wrapper
from ft_wrapper.abort import AbortTorchDistributed
from ft_wrapper.rank_assignment import ActivateAllRanks, ShiftRanks
from ft_wrapper.state import FrozenState


def note(state: FrozenState) -> FrozenState:
    return state


@Wrapper(
    soft_timeout=timedelta(seconds=3),
    hard_timeout=5,
    limits=Limits(on_join="now", max_same_faults=None),
    rank_assignment=Compose(ActivateAllRanks(), ShiftRanks()),
    finalize=lambda state: None,
    abort=Compose(note, AbortTorchDistributed()),
)
def train(steps: int) -> str:
    return ""


@Wrapper
def bare(call_wrapper: CallWrapper, steps: int) -> str:
    call_wrapper.ping(step=1)
    call_wrapper.ping("one")  # type: ignore[arg-type]
    return ""


@Wrapper(rejoin=True, use_global_iteration=True)
def second(steps: int, call_wrapper: CallWrapper | None = None) -> int:
    return 1


loss: str = train(5)
loss = bare(5)
count: int = second(5)
train("five")  # type: ignore[arg-type]
bare("five")  # type: ignore[arg-type]
Wrapper(soft_timout=3)  # type: ignore[call-overload]
Wrapper(soft_timeout="3")  # type: ignore[call-overload]
Wrapper(abort=ShiftRanks())  # type: ignore[arg-type]
Wrapper(on_join="now")  # type: ignore[call-overload]
Limits(soft_timeout=3)  # type: ignore[call-arg]
Limits(join_window="3")  # type: ignore[arg-type]
