"""``Wrapper(enabled=False)``: the function runs as without the wrapper, and its `CallWrapper` works."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import Job, Rank

from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.checkpoints import Checkpoints
from ft_wrapper.exception import RestartAbort
from ft_wrapper.state import Mode
from ft_wrapper.store import TCPStoreServer
from ft_wrapper.wrapper import Unwrapped


def uses_all_of_it(rank: Rank) -> list[Any]:
    @Wrapper(enabled=False)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        call_wrapper.process_group("gloo")
        for step in range(3):
            call_wrapper.step(step)
            call_wrapper.ping()
            call_wrapper.ping(step)
            call_wrapper.ping(step=step)
            with call_wrapper.atomic(), call_wrapper.disable_hang_protection():
                dist.barrier()
        store, state = call_wrapper.store, call_wrapper.state
        store.set(f"from {state.rank}", "here")
        heard = store.get(f"from {1 - (state.active_rank or 0)}")
        assert call_wrapper.notice is None
        told = [call_wrapper.iteration, call_wrapper.faults, call_wrapper.device.type, heard.decode()]
        dist.barrier()
        dist.destroy_process_group()
        return told

    return train()  # type: ignore[call-arg]


def test_all_of_the_call_wrapper_works(job: Job) -> None:
    with contextlib.closing(TCPStoreServer(0, "127.0.0.1")) as server:
        env = {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # as a launcher does
        job.start(2, uses_all_of_it, env=env)
        job.wait_for_end(leftovers=False)  # torch's own hook for exceptions stays
    assert [job[slot].value for slot in (0, 1)] == [[0, [], "cpu", "here"]] * 2


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    @Wrapper(enabled=False)
    def train(value: int, call_wrapper: CallWrapper = None) -> Any:  # type: ignore[assignment]
        call_wrapper.ping()
        call_wrapper.store.set("key", "1")
        group = call_wrapper.process_group()
        sizes = group.size(), torch.distributed.get_world_size()
        torch.distributed.destroy_process_group()
        state = call_wrapper.state
        assert (call_wrapper.rank, call_wrapper.world_size, call_wrapper.is_spare) == (0, 1, False)
        return value, call_wrapper.store.get("key"), sizes, state.rank, state.active_world_size, state.mode

    assert train(5) == (5, b"1", (1, 1), 0, 1, Mode.ACTIVE)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("helper", [LiveState, Checkpoints])
def test_live_state_and_checkpoints_refuse_a_disabled_wrapper(helper: Any, tmp_path: Path) -> None:
    @Wrapper(enabled=False)
    def train(call_wrapper: CallWrapper) -> None:
        call_wrapper.process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            helper(call_wrapper, str(tmp_path) if helper is Checkpoints else dict)
        finally:
            torch.distributed.destroy_process_group()

    with pytest.raises(RestartAbort, match="enabled=False: LiveState and Checkpoints need the wrapper"):
        train()  # type: ignore[call-arg]


def test_it_has_all_that_a_call_wrapper_has() -> None:
    """A method that is added to one is there in the other, too, and does not come from a call."""
    public = {name for name, _ in inspect.getmembers(CallWrapper) if not name.startswith("_")}
    of_the_state = {"device", "rank", "world_size", "is_spare"}  # or do nothing, as `ping`
    assert public - of_the_state - {"ping", "step"} <= vars(Unwrapped).keys()
