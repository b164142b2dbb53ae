"""Process groups over `nccl_standin.c`, which has what a communicator of NCCL has on the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ft_wrapper.testing import BlockingGroup, OnAbort

COMPILER = shutil.which("cc")
SOURCE = Path(__file__).with_name("nccl_standin.c")


def build(folder: Path, *, uses_ppoll: bool = False) -> ctypes.CDLL:
    """Compiles the stand-in, and loads it.

    Args:
        folder: where the library goes.
        uses_ppoll: whether its threads wait in ``ppoll``, as on aarch64.
    """
    library = folder / f"standin{uses_ppoll:d}.so"
    flags = ["-O1", "-shared", "-fPIC", "-pthread", *(["-DUSE_PPOLL"] if uses_ppoll else [])]
    assert COMPILER is not None
    subprocess.run([COMPILER, *flags, SOURCE, "-o", library], check=True, timeout=60)
    return load(library)


def load(library: Path | str) -> ctypes.CDLL:
    """Loads what `build` has compiled."""
    loaded = ctypes.CDLL(os.fspath(library))
    loaded.comm_init.restype = ctypes.c_void_p
    for name in ("abort", "destroy", "sat_out", "accepted", "messages", "free"):
        getattr(loaded, f"comm_{name}").argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_int] * name.endswith(("rt", "oy")),
        ]
    return loaded


class Communicator:
    """A communicator. Its calls release the GIL, as torch's do.

    Args:
        nccl: the library.
        beside_others: whether another rank of this host is connected to its service thread.
        device_ms: how long the device goes on once it is to end.
    """

    def __init__(self, nccl: ctypes.CDLL, *, beside_others: bool = False, device_ms: int = 0) -> None:
        self._nccl, self._device_ms = nccl, device_ms
        self._comm = nccl.comm_init(0, int(beside_others))

    def abort(self) -> None:
        """As ``ncclCommAbort``."""
        self._nccl.comm_abort(self._comm, self._device_ms)

    def destroy(self) -> None:
        """As ``ncclCommDestroy``."""
        self._nccl.comm_destroy(self._comm, self._device_ms)

    def count(self, what: str) -> int:
        """How many half seconds were ``"sat_out"``, connections ``"accepted"``, ``"messages"`` seen."""
        return int(getattr(self._nccl, f"comm_{what}")(self._comm))


class StandInGroup(BlockingGroup):
    """A group with a communicator, whose collectives block until it is aborted.

    Args:
        rank: in the group.
        size: of the group.
        nccl: the library.
        is_made_late: a collective makes the communicator, as NCCL's first one does, and waits for a peer that
            does not come; there is nothing to abort so far. A destroy waits for a peer, too, as since NCCL
            2.31, and an abort waits for that.
        how: as for `Communicator`.

    Attributes:
        left_with: the errno by which that wait ended, and minus the one by which its root's did.
    """

    def __init__(self, rank: int, size: int, nccl: ctypes.CDLL, is_made_late: bool, **how: Any) -> None:
        super().__init__(rank, size, "standin", OnAbort.RETURNS, 0)
        self._nccl = nccl
        self._torchs = threading.Lock()  # of the table of communicators
        self.left_with: tuple[int, int] | None = None
        self.communicator = None if is_made_late else Communicator(nccl, **how)

    def _block(self, *_arguments: Any, **_more: Any) -> Any:
        if self.communicator is None:
            self.is_blocked.set()
            root_left_with = ctypes.c_int()
            left_with = self._nccl.init_that_waits(ctypes.byref(root_left_with))
            self.left_with = (left_with, root_left_with.value)
            raise RuntimeError("ncclSystemError")
        return super()._block()

    def abort(self) -> None:
        """Aborts the communicator, the first time, if there is one."""
        with self._torchs:
            if self.communicator is not None and not self.is_aborted.is_set():
                self.communicator.abort()
        super().abort()

    def shutdown(self) -> None:
        """Destroys it, as ``destroy_process_group`` asks for."""
        with self._torchs:
            if self.communicator is None:
                self._block()
            else:
                self.communicator.destroy()

    def count(self, what: str) -> int:
        """As its communicator's."""
        assert self.communicator is not None
        return self.communicator.count(what)


def register(nccl: ctypes.CDLL, *, is_made_late: bool = False, **how: Any) -> str:
    """Registers a backend of such groups; returns its name.

    Args:
        nccl: the library.
        is_made_late: as for `StandInGroup`.
        how: as for `Communicator`.
    """
    name = f"standin{len(dist.Backend._plugins)}"

    def make(store: object, rank: int, size: int, timeout: object) -> StandInGroup:
        return StandInGroup(rank, size, nccl, is_made_late, **how)

    dist.Backend.register_backend(name, make, devices=["cpu"])
    return name
