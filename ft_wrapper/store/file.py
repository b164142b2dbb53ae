"""Keys in a file that all ranks see."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import FileStore as TorchFileStore
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from .holding import HoldingStore

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(seconds=30)


class FileStore(HoldingStore):
    """Keys in a file on one host or on a file system with working locks.

    For tests and for single nodes without ports. torch's FileStore has no append: logs are rewritten under
    compare_set here, and waiting polls inside torch.

    Args:
        file_name: path of the file; must not exist when the job starts.
        world_size: ignored; accepted so that arguments for torch's FileStore fit.
        timeout: how long operations that wait do so.
    """

    def __init__(
        self, file_name: str, world_size: int | None = None, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        self.file_name = str(file_name)
        store = TorchFileStore(self.file_name)
        store.set_timeout(timeout)
        super().__init__(store)

    def __repr__(self) -> str:
        return f"FileStore({self.file_name})"

    def clone(self) -> FileStore:
        other = FileStore(self.file_name, timeout=self.timeout)
        other._place = self._place
        return other

    def _do(self, what: str, operation: Callable[[Store], T]) -> T:
        try:
            return operation(self._store)
        except RuntimeError as error:
            # torch's FileStore says so in words only.
            if "timeout" not in str(error).lower():
                raise
            raise DistStoreError(f"{self!r}: {what} timed out: {error}") from None

    def delete_key(self, key: str) -> bool:
        existed = self.check([key])  # torch's FileStore always says yes
        super().delete_key(key)
        return existed

    def append(self, key: str, value: str | bytes) -> None:
        text = value.decode() if isinstance(value, bytes) else value
        while True:
            before = self._read(key) or ""
            # The reply tells what the key holds now, and two appenders may write the same line: a tag of
            # one's own would be needed to know whose it is. Entries are sets, so a line twice does no harm.
            if self.compare_set(key, before, before + text).decode() == before + text:
                return

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)
