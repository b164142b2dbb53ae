"""Where the streams of the ranks go: the destinations are torch's own, one set for each incarnation."""

from __future__ import annotations

import dataclasses
import os
import socket
import string
import sys
from collections.abc import Mapping
from contextlib import ExitStack

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from .._files import owners_only
from .tail import Tail

PREFIX_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""torchrun's: what is put before each line shown, a template as ``--log-line-prefix-template`` has it."""


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """Files of one incarnation of a rank.

    Args:
        stdout: where its output goes; empty for our own.
        stderr: the same for its errors.
        error_file: where ``torch.distributed.elastic``'s ``record`` writes its exception.
    """

    stdout: str
    stderr: str
    error_file: str

    @property
    def logs(self) -> tuple[str, ...]:
        """What there is to read, stdout first."""
        return tuple(file for file in (self.stdout, self.stderr) if file not in ("", os.devnull))


class Logs:
    """The files of all ranks, and the threads that show on the console what goes to them.

    A context manager: leaving it shows what was written last.

    Args:
        specs: what the command line asked for.
        role: what the ranks are called in the lines that are shown.
        prefix: what is in front of these, with ``${role_name}``, ``${rank}``, ``${local_rank}`` and
            ``${hostname}`` put in; role and rank when None.
    """

    def __init__(self, specs: LogsSpecs, role: str, prefix: str | None = None) -> None:
        self._specs = specs
        self._role = role
        self._prefix = prefix
        self._destinations: LogsDest | None = None
        self._first_rank = 0
        self._tails: dict[tuple[int, int], list[Tail]] = {}
        self._ended: list[Tail] = []

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, incarnation in list(self._tails):
            self.close(rank, incarnation)
        for tail in self._ended:
            tail.close()

    def begin_round(self, environments: Mapping[int, dict[str, str]], first_rank: int = 0) -> None:
        """Makes the directories of a round, in which all ranks are started; empties them if they exist.

        Args:
            environments: by local rank; torch names directories by what it finds in them.
            first_rank: what local rank 0 is called in the lines that are shown.

        Raises:
            OSError: they cannot be made.
        """
        self._first_rank = first_rank
        self._destinations = self._specs.reify({rank: dict(env) for rank, env in environments.items()})

    def open(self, rank: int, incarnation: int) -> RankFiles:
        """Says where the streams of a process go, and shows from now on what is to be shown of them.

        Args:
            rank: its local rank.
            incarnation: its number; replacements have a directory of their own below their predecessor's.

        Raises:
            OSError: the directory cannot be made, or a file to be shown.
        """
        to = self._destinations
        assert to is not None, "no round has begun"

        def own(path: str) -> str:
            if incarnation == 0 or path in ("", os.devnull):
                return path
            folder = os.path.join(os.path.dirname(path), f"incarnation_{incarnation}")
            os.makedirs(folder, 0o700, exist_ok=True)
            return os.path.join(folder, os.path.basename(path))

        stdout, stderr = own(to.stdouts[rank]), own(to.stderrs[rank])
        tails = {}
        if rank in to.tee_stdouts:
            tails[stdout] = sys.stdout
        if rank in to.tee_stderrs:
            tails[stderr] = sys.stderr
        files = RankFiles(stdout, stderr, own(to.error_files[rank]))
        shown = self._tails[rank, incarnation] = []
        for path, console in tails.items():
            shown.append(Tail(path, console, self._prefix_of(rank)))
        return files

    def _prefix_of(self, rank: int) -> str:
        number = self._first_rank + rank
        if not self._prefix:
            return f"[{self._role}{number}]:"
        words = {
            "role_name": self._role,
            "rank": number,
            "local_rank": rank,
            "hostname": socket.gethostname(),
        }
        return string.Template(self._prefix).safe_substitute(words)

    def close(self, rank: int, incarnation: int) -> None:
        """The process has ended: what it wrote last is shown, in another thread, and its tails end."""
        self._ended = [tail for tail in self._ended if tail.is_alive]
        for tail in self._tails.pop((rank, incarnation), ()):
            tail.end()
            self._ended.append(tail)


def opened(path: str, files: ExitStack) -> int | None:
    """Opens a file for a stream; None if the stream goes where ours goes.

    Args:
        path: the file; empty for none.
        files: closes it.

    Raises:
        OSError: it cannot be opened.
    """
    return files.enter_context(open(path, "wb", opener=owners_only)).fileno() if path else None
