"""Every public name can be imported from where its users import it."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import textwrap

import pytest

import ft_wrapper

NAMES = {
    "": (
        "Wrapper CallWrapper Limits Compose State FrozenState Mode Leak find_leaks RestartReport SlowRank "
        "store"
    ),
    "initialize": "Initialize RetryController",
    "abort": "Abort AbortTorchDistributed AbortTransformerEngine AbortProcesses",
    "nested_restarter": (
        "NestedRestarterHandlingCompleted NestedRestarterHandlingStarting NestedRestarterFinalized "
        "NestedRestarterAborted"
    ),
    "finalize": "Finalize ThreadedFinalize",
    "health_check": "HealthCheck CudaHealthCheck FaultCounter FaultCounterExceeded GpuHealthCheck",
    "completion": "Completion",
    "terminate": "Terminate",
    "rank_assignment": (
        "RankAssignment RankFilter RankAssignmentCtx RankDiscarded ActivateAllRanks MaxActiveWorldSize "
        "ActiveWorldSizeDivisibleBy ShiftRanks FillGaps ReplicaGroups FilterCountGroupedByKey Tree Layer "
        "LayerFlag"
    ),
    "store": (
        "StoreMixin TCPStore FileStore PrefixStore EtcdStore BarrierError BarrierTimeout BarrierOverflow"
    ),
    "exception": (
        "RestartError RestartAbort JobAbort HealthCheckError InternalError TimeoutError RankShouldRestart "
        "StoreError"
    ),
    "attribution": "Interruption InterruptionRecord",
    "integrations.accelerate": "ForgetAccelerate load_newest begin_step save_state",
    "testing": "FakeStore EtcdServer",
    "testing.inject_fault": "FaultKind FaultSpec InjectInitialize InjectFinalize inject_fault",
    "checkpoints": "Checkpoint Checkpoints",
    "report": "Report Restart Incident Goodput PHASES BUCKETS make_reports",
    "run": "main",
}
ON_EVERY_STORE = (
    "initial_barrier completion_barrier iteration_barrier termination_barrier barrier "
    "get_global_iteration increment_global_iteration wait_for_global_iteration_ready "
    "signal_global_iteration_ready coordinate_global_iteration_advance get_active_ranks_for_coordination "
    "handle_rank_restart catch_up_restarting_rank elect_coordinator get_current_coordinator "
    "is_coordinator_alive update_coordinator_heartbeat get_coordinator_heartbeat record_iteration_for_rank "
    "get_iteration_for_rank"
)
ON_STATE = "from_env freeze set_distributed_vars advance copy_from sync_with_global_iteration"
ON_CALL_WRAPPER = (
    "iteration ping step atomic disable_hang_protection state store faults device rank world_size is_spare "
    "process_group notice"
)


@pytest.mark.parametrize("module", NAMES)
def test_name_is_there(module: str) -> None:
    imported = importlib.import_module(f"ft_wrapper.{module}".rstrip("."))
    missing = [name for name in NAMES[module].split() if not hasattr(imported, name)]
    assert not missing


def test_names_are_loaded_at_their_first_use() -> None:
    program = """
        import sys, ft_wrapper
        assert "torch" not in sys.modules and "Wrapper" in dir(ft_wrapper), sys.modules
        assert not hasattr(ft_wrapper, "Wrappers") and not hasattr(ft_wrapper, "_private")
        sys.modules["torch"] = None
        try:
            ft_wrapper.wrapper
        except ImportError:  # and no AttributeError: it is there, and something that it needs is not
            del sys.modules["torch"]
        from ft_wrapper import Wrapper
        assert ft_wrapper.live.LiveState is ft_wrapper.LiveState and ft_wrapper.Wrapper is Wrapper
        before = set(globals())
        from ft_wrapper import *
        print(*sorted(set(globals()) - before - {"before"}))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *_, names = run.stdout.splitlines()
    assert sorted([*names.split(), "Wrapper"]) == sorted(ft_wrapper.__all__)


def test_members_of_classes_are_there() -> None:
    from ft_wrapper import CallWrapper, State
    from ft_wrapper.testing import FakeStore

    for on, names in ((FakeStore(), ON_EVERY_STORE), (State, ON_STATE), (CallWrapper, ON_CALL_WRAPPER)):
        missing = [name for name in names.split() if not hasattr(on, name)]
        assert not missing, on


def test_a_store_has_few_methods_of_its_own() -> None:
    """Torch's, the steps, barriers; the names for iterations by hand come from a class of their own."""
    from ft_wrapper.protocol.operations import Operations
    from ft_wrapper.store import StoreMixin

    own = {
        name
        for owner in (StoreMixin, Operations)
        for name, value in vars(owner).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, functools.partialmethod))
    }
    assert len(own) <= 25, own
