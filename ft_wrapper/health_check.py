"""Plug-ins that decide whether a rank may go on."""

import abc
import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from .compose import PlugIn
from .exception import HealthCheckError, RestartError, in_one_line
from .settings import as_limit, as_timeout
from .state import FrozenState
from .store.bounded import call_in_thread
from .torch_groups.device import cuda_device

_logger = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=30)


class HealthCheck(PlugIn):
    """Base of the ``health_check`` plug-ins of `Wrapper`: decides whether this rank can go on.

    It runs before each iteration, and after a fault, following ``finalize``. It checks only this rank: others
    may be lost, or still in the function. If it raises after a fault, or on a spare, this rank ends with
    `HealthCheckError` and the other ranks go on. If it raises on an active rank before the function, that is
    a fault, and it runs again after that. It gets the rank's state in the iteration that has ended.
    """


class _OfGpu(HealthCheck):
    """Checks the GPU of this process, in a thread and with a timeout.

    Args:
        timeout: how long the check may take: a ``timedelta`` or seconds.
    """

    def __init__(self, timeout: timedelta | float = _TIMEOUT) -> None:
        self.timeout = as_timeout("timeout", timeout)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Checks the GPU, if the process uses one.

        Raises:
            ft_wrapper.exception.RestartTimeout: it took longer than ``timeout``.
        """
        device = cuda_device()
        if device is not None:
            what = f"{type(self).__name__} of GPU {device} on rank {state.rank}"
            check = functools.partial(self._check, device, f"rank {state.rank}")
            call_in_thread(check, what, self.timeout.total_seconds())
        return state

    @abc.abstractmethod
    def _check(self, device: int, who: str) -> None:
        """Raises an error if the GPU is not healthy."""


class CudaHealthCheck(_OfGpu):
    """Checks that the GPU finishes its work, and that the CUDA context still works.

    Does nothing in a process that has not used a GPU. Checks the GPU that ``LOCAL_RANK`` names, else the
    current one. It raises torch's own error where the CUDA context is broken.

    Args:
        timeout: how long the GPU may take to finish: a ``timedelta`` or seconds.

    Raises:
        TypeError: ``timeout`` is not a duration.
        ValueError: ``timeout`` is not positive.
    """

    def _check(self, device: int, who: str) -> None:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as ex:
            # This may come from an aborted kernel. A broken context raises again below.
            _logger.warning("%s: GPU %s: %s", who, device, ex)
        torch.cuda.synchronize(device)


class GpuHealthCheck(_OfGpu):
    """Asks the driver, through NVML, whether the GPU must be reset or replaced.

    Unlike `CudaHealthCheck` it sends nothing to the GPU. It skips what the GPU or its driver does not
    support, and does nothing in a process that has not used a GPU. Checks the GPU that ``LOCAL_RANK`` names,
    else the current one. If the driver wants it reset or replaced, it raises `HealthCheckError`.

    Args:
        timeout: how long the driver may take: a ``timedelta`` or seconds.

    Raises:
        ImportError: the package ``nvidia-ml-py`` is missing.
        TypeError: ``timeout`` is not a duration.
        ValueError: ``timeout`` is not positive.
    """

    def __init__(self, timeout: timedelta | float = _TIMEOUT) -> None:
        super().__init__(timeout)
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as ex:
            raise ImportError("GpuHealthCheck needs nvidia-ml-py: pip install 'ft-wrapper[gpu]'") from ex

    def _check(self, device: int, who: str) -> None:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._nvml.nvmlInit()
        try:
            problems = list(_problems(self._nvml, self._nvml.nvmlDeviceGetHandleByUUID(uuid)))
        finally:
            self._nvml.nvmlShutdown()
        if problems:
            raise HealthCheckError(f"{who}: {uuid} is not healthy: {'; '.join(problems)}")


def _problems(nvml: Any, handle: Any) -> Iterator[str]:
    """Problems that the driver reports for a GPU, as far as the driver and the package support them."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is not None:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
        if value.nvmlReturn == nvml.NVML_SUCCESS and value.value.uiVal != nvml.NVML_GPU_RECOVERY_ACTION_NONE:
            prefix = "NVML_GPU_RECOVERY_ACTION_"
            names = [n for n in dir(nvml) if n.startswith(prefix) and getattr(nvml, n) == value.value.uiVal]
            yield f"the driver asks for {names[0].removeprefix(prefix) if names else value.value.uiVal}"
    with contextlib.suppress(nvml.NVMLError_NotSupported):
        if nvml.nvmlDeviceGetRemappedRows(handle)[3]:
            yield "a defective row of its memory could not be remapped"


class FaultCounterExceeded(RestartError):
    """This rank's function has failed too often; see `FaultCounter`."""


class FaultCounter(HealthCheck):
    """Ends a rank whose function fails repeatedly while its peers' functions do not.

    It counts the iterations in which the function raised an ``Exception`` on this rank, in this process.

    Args:
        max_rank_faults: how many faults are tolerated; None: no limit.

    Raises:
        TypeError: ``max_rank_faults`` is not an int.
        ValueError: ``max_rank_faults`` is negative.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = as_limit("max_rank_faults", max_rank_faults, at_least=0)
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Counts the fault, if the function failed on this rank.

        Raises:
            FaultCounterExceeded: there were more than ``max_rank_faults``.
        """
        if state.fn_exception is None:
            return state
        self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"rank {state.rank} had {self.faults_count} faults, more than "
                f"max_rank_faults={self.max_rank_faults}; the last one: {in_one_line(state.fn_exception)}"
            )
        return state
