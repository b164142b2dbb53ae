"""What the driver says of GPUs, through NVML. Sends nothing to a GPU.

All take ``pynvml``, the module of the package nvidia-ml-py.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def opened(nvml: Any) -> Iterator[None]:
    """Opens NVML for a while; raises its error where there is no driver."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def recovery_action(nvml: Any, handle: Any) -> str | None:
    """What the driver wants done with a GPU; None if nothing, or if it does not say."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    if value.nvmlReturn != nvml.NVML_SUCCESS or value.value.uiVal == nvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return None
    prefix = "NVML_GPU_RECOVERY_ACTION_"
    names = [n for n in dir(nvml) if n.startswith(prefix) and getattr(nvml, n) == value.value.uiVal]
    return f"the driver asks for {names[0].removeprefix(prefix) if names else value.value.uiVal}"


def failed_row_remapping(nvml: Any, handle: Any) -> str | None:
    """A row of its memory that is broken, and for which there is no other."""
    _, _, _, has_failed = _remapped_rows(nvml, handle)
    return "a defective row of its memory could not be remapped" if has_failed else None


def pending_row_remapping(nvml: Any, handle: Any) -> str | None:
    """A row of its memory that is broken, and is replaced with the next reset."""
    _, _, is_pending, _ = _remapped_rows(nvml, handle)
    return "a defective row of its memory is remapped only by a reset" if is_pending else None


def _remapped_rows(nvml: Any, handle: Any) -> tuple[int, int, int, int]:
    try:
        corrected, uncorrected, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError as ex:
        if ex.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return 0, 0, 0, 0
        raise
    return corrected, uncorrected, is_pending, has_failed


def uncorrected_errors(nvml: Any, handle: Any) -> str | None:
    """Memory errors that ECC could not correct since the last reset, or since the driver was loaded."""
    try:
        count = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError as ex:
        if ex.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise
    return f"{count} uncorrected memory errors since its last reset" if count else None


def visible(nvml: Any, environ: Mapping[str, str]) -> list[tuple[str, Any]]:
    """The GPUs that ranks may use: what to call each, and its handle, or NVML's error in place of that.

    Args:
        nvml: opened.
        environ: ``CUDA_VISIBLE_DEVICES`` names them, by the driver's indices or how their UUIDs begin; all
            without it. Parts of a GPU (MIG) have None for a handle.
    """
    everyone = [(f"GPU {index}", _handle(nvml, index)) for index in range(nvml.nvmlDeviceGetCount())]
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return everyone
    found: list[tuple[str, Any]] = []
    for name in map(str.strip, named.split(",")):
        if name.isdecimal():
            found.append((f"GPU {name}", _handle(nvml, int(name))))
        elif name.startswith("GPU-"):
            found += [one for one in everyone if _uuid(nvml, one[1]).startswith(name)][:1]
        elif name.startswith("MIG-"):
            found.append((name, None))
        else:
            break  # CUDA uses none of those behind what it does not understand
    return found


def _handle(nvml: Any, index: int) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return error


def _uuid(nvml: Any, handle: Any) -> str:
    with suppress(nvml.NVMLError):
        return "" if isinstance(handle, nvml.NVMLError) else str(nvml.nvmlDeviceGetUUID(handle))
    return ""
