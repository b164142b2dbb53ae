"""Health checks: faults that are counted, a GPU that hangs or is broken, a driver that wants it reset.

The GPU is played by what replaces a few functions of torch and NVML.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_wrapper.exception import HealthCheckError, TimeoutError
from ft_wrapper.health_check import CudaHealthCheck, FaultCounter, FaultCounterExceeded, GpuHealthCheck
from ft_wrapper.state import FrozenState

STATE = FrozenState(rank=2, world_size=4)
FAULT = FrozenState(rank=2, world_size=4, fn_exception=ValueError("loss is nan"))
LIMIT = 30.0


def test_only_this_ranks_faults_count() -> None:
    check = FaultCounter(2)
    for state in (FAULT, STATE, STATE, FAULT, STATE):
        assert check(state) is state
    with pytest.raises(FaultCounterExceeded, match=r"rank 2 had 3 faults.*max_rank_faults=2.*loss is nan"):
        check(FAULT)


def test_without_a_limit_faults_are_only_counted_and_the_first_may_be_too_many() -> None:
    check = FaultCounter()
    for _ in range(100):
        assert check(FAULT) is FAULT
    assert check.faults_count == 100
    check = FaultCounter(max_rank_faults=0)
    assert check(STATE) is STATE
    with pytest.raises(FaultCounterExceeded):
        check(FAULT)


class Gpu:
    """What torch would do on a GPU."""

    def __init__(self) -> None:
        # What each synchronization raises, in turn.
        self.errors: list[Exception] = []
        self.devices: list[int] = []
        self.hangs: threading.Event | None = None
        self.thread: threading.Thread | None = None

    def synchronize(self, device: int) -> None:
        self.devices.append(device)
        if self.hangs is not None:
            self.thread = threading.current_thread()
            self.hangs.wait(LIMIT)
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=f"uuid-{device}")
    )
    yield gpu
    if gpu.thread is not None:
        gpu.thread.join(LIMIT)


def test_without_a_gpu_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml := Nvml())
    nvml.action = 1
    assert CudaHealthCheck()(STATE) is GpuHealthCheck()(STATE) is STATE  # which does not ask the driver


def test_a_healthy_gpu_passes(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CudaHealthCheck()(STATE) is STATE
    assert set(gpu.devices) == {1}
    monkeypatch.setenv("LOCAL_RANK", "3")
    CudaHealthCheck()(STATE)
    assert gpu.devices[-1] == 3


def test_an_error_of_an_aborted_kernel_is_borne_once(gpu: Gpu) -> None:
    gpu.errors = [RuntimeError("aborted")]
    assert CudaHealthCheck()(STATE) is STATE
    gpu.errors = [RuntimeError("illegal address")] * 2
    with pytest.raises(RuntimeError, match="illegal address"):
        CudaHealthCheck()(STATE)


def test_a_gpu_that_hangs_is_reported(gpu: Gpu) -> None:
    gpu.hangs = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"CudaHealthCheck of GPU 1 on rank 2.*timeout=0:00:00\.05"):
            CudaHealthCheck(timeout=0.05)(STATE)
    finally:
        gpu.hangs.set()


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class NotSupported(NvmlError):
    pass


class Nvml(types.ModuleType):
    """What nvidia-ml-py would answer; names and shapes as in version 13."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.NVML_SUCCESS = 0
        self.NVML_ERROR_NOT_SUPPORTED = 3
        self.NVML_ERROR_GPU_IS_LOST = 15
        self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
        self.NVML_GPU_RECOVERY_ACTION_NONE = 0
        self.NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
        self.NVMLError = NvmlError
        self.NVMLError_NotSupported = NotSupported
        self.action = 0
        self.knows_actions = True
        self.rows: tuple[int, int, int, int] | NvmlError = (0, 1, 0, 0)
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"handle of {uuid}"

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        assert handle == "handle of GPU-uuid-1"
        assert fields == [self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        code = self.NVML_SUCCESS if self.knows_actions else self.NVML_ERROR_NOT_SUPPORTED
        return [types.SimpleNamespace(nvmlReturn=code, value=types.SimpleNamespace(uiVal=self.action))]

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        if isinstance(self.rows, NvmlError):
            raise self.rows
        return self.rows


@pytest.fixture
def nvml(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    yield nvml
    assert nvml.open == 0


def test_the_driver_wants_a_reset(nvml: Nvml) -> None:
    assert GpuHealthCheck()(STATE) is STATE
    nvml.action = 1
    with pytest.raises(HealthCheckError, match=r"rank 2: GPU-uuid-1 .*asks for GPU_RESET"):
        GpuHealthCheck()(STATE)


def test_what_the_driver_does_not_know_is_not_checked(nvml: Nvml) -> None:
    nvml.knows_actions, nvml.action = False, 77
    nvml.rows = NotSupported(nvml.NVML_ERROR_NOT_SUPPORTED)
    assert GpuHealthCheck()(STATE) is STATE


def test_an_older_package_knows_no_actions_but_rows_that_could_not_be_remapped(nvml: Nvml) -> None:
    nvml.action = 1
    del nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    assert GpuHealthCheck()(STATE) is STATE
    nvml.rows = (0, 1, 0, 1)
    with pytest.raises(HealthCheckError, match="could not be remapped"):
        GpuHealthCheck()(STATE)


def test_a_lost_gpu_is_not_healthy(nvml: Nvml) -> None:
    nvml.rows = NvmlError(nvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(NvmlError):
        GpuHealthCheck()(STATE)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match=r"nvidia-ml-py: pip install 'ft-wrapper\[gpu\]'"):
        GpuHealthCheck()


def test_bad_arguments() -> None:
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: FaultCounter(-1), ValueError, "max_rank_faults=-1"),
        (lambda: FaultCounter("1"), TypeError, "max_rank_faults='1'"),
        (lambda: CudaHealthCheck(None), TypeError, "timeout=None"),
        (lambda: CudaHealthCheck(timedelta(0)), ValueError, "must be more than 0 seconds"),
        (lambda: GpuHealthCheck(0), ValueError, "must be more than 0 seconds"),
    ]
    for make, error, message in wrong:
        with pytest.raises(error, match=message):
            make()
