"""Work that is shared among processes."""

from __future__ import annotations

import collections
import multiprocessing
import multiprocessing.connection
import os
import threading
import traceback
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def share(work: Callable[[int], T], parts: int, processes: int) -> Generator[T, None, None]:
    """Carries out parts of a work in several processes, and yields the results as they come.

    Closing the iterator ends the processes.

    Args:
        work: carries out a part, from 0. It runs in a fork of this process, so it need not be importable; its
            result must be.
        parts: how many parts there are.
        processes: among how many processes they are shared; 1 does everything in this one.

    Raises:
        RuntimeError: a part raised; with its traceback.
    """
    if processes <= 1 or parts <= 1:
        for part in range(parts):
            yield work(part)
        return
    context = multiprocessing.get_context("fork")
    pending = collections.deque(range(parts))
    workers: dict[Any, Any] = {}
    try:
        for _ in range(min(processes, parts)):
            ours, theirs = context.Pipe()
            inherited = [*workers, ours]  # only this process's death must end these lines
            process = context.Process(target=_serve, args=(work, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
            ours.send(pending.popleft())
        while workers:
            ready: list[Any] = multiprocessing.connection.wait(list(workers))
            for line in ready:
                result, error = line.recv()
                if error is not None:
                    raise RuntimeError(f"a part failed in another process:\n{error}")
                if pending:
                    line.send(pending.popleft())
                else:
                    _end(line, workers.pop(line))
                yield result
    finally:
        for line, process in workers.items():
            process.terminate()
            _end(line, process)


def _end(line: Any, process: Any) -> None:
    line.close()
    process.join()


def _serve(work: Callable[[int], Any], line: Any, inherited: list[Any]) -> None:
    for other in inherited:
        other.close()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            part = line.recv()
        except EOFError:
            return
        answer: tuple[Any, str | None]
        try:
            answer = (work(part), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        line.send(answer)


def _end_with_parent() -> None:
    """A part may last long, and a process that was killed cannot end those who carry them out."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
