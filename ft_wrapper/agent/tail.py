"""A file that a process writes to, shown on the console line by line.

Torch's `TailLog` may end before its last look, and loses what was written in between. Where the console is a
pipe it shows nothing before there are 8 KB. It cuts a line in two that is written in pieces.
"""

from __future__ import annotations

import logging
import threading
from typing import TextIO

from .._files import owners_only

log = logging.getLogger(__name__)

_INTERVAL = 0.1  # seconds between two looks


class Tail:
    """Shows what is written to a file, in a thread of its own, until `end` and once more after it.

    Args:
        path: the file; made if it is not there yet.
        console: where its lines are shown.
        prefix: what is put before each of them.

    Raises:
        OSError: the file cannot be made or read.
    """

    def __init__(self, path: str, console: TextIO, prefix: str) -> None:
        open(path, "ab", opener=owners_only).close()
        self._path = path
        self._lines = open(path, errors="replace")  # noqa: SIM115
        self._console = console
        self._prefix = prefix
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft_wrapper-tail", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether there may be lines to show yet."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Nothing more will be written. Does not wait until the last lines are shown."""
        self._ended.set()

    def close(self) -> None:
        """Waits until the last lines are shown."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        with self._lines:
            try:
                self._show()
            except (OSError, ValueError) as error:  # no one reads the console any more, or it is closed
                log.warning("what is written to %s is not shown any more: %s", self._path, error)

    def _show(self) -> None:
        line, ended = "", False
        while not ended:
            ended = self._ended.wait(_INTERVAL)  # before the look, which then is the last one
            for piece in self._lines:
                line += piece
                if line.endswith("\n"):
                    self._console.write(self._prefix + line)
                    line = ""
            self._console.flush()
        if line:
            self._console.write(f"{self._prefix}{line}\n")
            self._console.flush()
