"""What a rank writes to a file is shown: in time, in whole lines, to the last one."""

from __future__ import annotations

import io
import logging
import queue
from pathlib import Path

import pytest

from ft_wrapper.agent.outputs import Tail

TIMEOUT = 60.0


class Console(io.StringIO):
    """Says what it is given once it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: queue.SimpleQueue[str] = queue.SimpleQueue()

    def flush(self) -> None:
        if text := self.getvalue():
            self.seek(0)
            self.truncate()
            self.shown.put(text)

    def next(self) -> str:
        return self.shown.get(timeout=TIMEOUT)

    def rest(self) -> str:
        text = ""
        while not self.shown.empty():
            text += self.shown.get()
        return text


def test_lines_are_shown_while_the_process_runs_and_whole(tmp_path: Path) -> None:
    path, console = tmp_path / "log", Console()
    tail = Tail(str(path), console, "[worker0]:")
    try:
        with path.open("w") as file:
            file.write("one\ntw")
            file.flush()
            assert console.next() == "[worker0]:one\n"
            file.write("o\nthree\n")
            file.flush()
            assert console.next() == "[worker0]:two\n[worker0]:three\n"
            file.write("no end")
    finally:
        tail.close()
    assert console.rest() == "[worker0]:no end\n"
    assert not tail.is_alive


def test_what_was_written_just_before_the_end_is_shown(tmp_path: Path) -> None:
    for n in range(500):
        path, console = tmp_path / str(n), Console()
        tail = Tail(str(path), console, "> ")
        path.write_text("last\n")
        tail.end()
        tail.close()
        assert console.rest() == "> last\n", n


def test_what_is_no_text_is_shown_too(tmp_path: Path) -> None:
    path, console = tmp_path / "log", Console()
    tail = Tail(str(path), console, "")
    path.write_bytes(b"\xff\xfe\n")
    tail.close()
    assert console.rest() == "\ufffd\ufffd\n"


class Gone(Console):
    def flush(self) -> None:
        raise BrokenPipeError("no one reads")


def test_a_console_that_is_gone_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    with caplog.at_level(logging.WARNING, "ft_wrapper"):
        tail = Tail(str(path), Gone(), "")
        tail.close()
    assert [f"{path} is not shown any more" in record.getMessage() for record in caplog.records] == [True]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    Tail(str(path), Console(), "").close()
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Tail(str(tmp_path / "none" / "log"), Console(), "")
