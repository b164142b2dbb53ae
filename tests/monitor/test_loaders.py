"""Which worker of a data loader a thread waits for, told from its frames."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ft_wrapper.monitor.loaders import awaited, what_ails

TORCH = "torch.utils.data.dataloader"
TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"


def iterator(**changes: Any) -> Any:
    """One with three workers, which waits for batch 7, of worker 1; worker 2's has come before its turn."""
    workers = [SimpleNamespace(pid=pid) for pid in (100, 101, 102)]
    state = {"_rcvd_idx": 7, "_task_info": {7: (1,), 8: (2, "data"), 9: (0,)}, "_workers": workers}
    return SimpleNamespace(**{**state, "_in_order": True, **changes})


def look(loader: Any, module: str = TORCH, method: str = "_try_get_data") -> Any:
    """What is found where a method of that name, in a module of that name, calls others."""
    code = f"def {method}(self):\n    return (lambda: look())()\n"
    names: dict[str, Any] = {"__name__": module, "look": lambda: awaited(sys._getframe())}
    exec(code, names)
    return names[method](loader)


@pytest.mark.parametrize("method", ["_try_get_data", "_get_data"])
@pytest.mark.parametrize("module", [TORCH, TORCHDATA])
def test_the_worker_of_the_next_batch_is_awaited(module: str, method: str) -> None:
    loader = iterator()
    assert look(loader, module, method) == ((id(loader), 7), (101,))


def test_where_the_order_does_not_count_any_worker_with_a_batch_to_come_is() -> None:
    assert look(iterator(_in_order=False)).workers == (100, 101)


def test_at_the_beginning_of_an_epoch_all_are() -> None:
    assert look(iterator(_task_info={})).workers == (100, 101, 102)


def test_the_next_batch_is_another_wait() -> None:
    loader = iterator()
    before = look(loader)
    loader._rcvd_idx = 9
    assert look(loader) != before


@pytest.mark.parametrize("module", ["torch.utils.data", "users"])
def test_other_code_waits_for_no_worker(module: str) -> None:
    assert look(iterator(), module) is None
    assert look(iterator(), TORCH, "_reset") is None


def test_a_loader_of_another_version_is_left_alone() -> None:
    assert look(SimpleNamespace()) is None
    assert look(iterator(_task_info=None)) is None


def test_a_process_that_will_not_answer_is_known() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert what_ails(child.pid) is None
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert what_ails(child.pid) == "is stopped by a signal"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert what_ails(child.pid) == "is dead"  # a zombie
    finally:
        child.kill()
        child.wait()
    assert what_ails(child.pid) == "is dead"
