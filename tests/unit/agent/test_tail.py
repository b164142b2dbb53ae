"""What a rank writes to a file is shown: in time, in whole lines, to the last one."""

from __future__ import annotations

import io
import logging
import queue
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_wrapper.agent import outputs
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
    assert not tail.is_alive()


def test_what_was_written_just_before_the_end_is_shown(tmp_path: Path) -> None:
    for n in range(100):
        path, console = tmp_path / str(n), Console()
        tail = Tail(str(path), console, "> ")
        path.write_text("last\n")
        tail.end()
        tail.close()
        assert console.rest() == "> last\n", n


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@given(
    text=st.binary(max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_any_bytes_in_any_pieces_are_shown_on_any_console(
    encoding: str, text: bytes, cuts: list[int]
) -> None:
    """A line that the console cannot encode was the rank's last one; a character in two pieces was two."""
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(outputs, "_TAIL_INTERVAL", 0.001):
        path = Path(folder, "log")
        tail = Tail(str(path), console, "> ")
        written = "split \u2713\n".encode() + text + b"\nLAST\n"
        ends = sorted({min(cut, len(written)) for cut in cuts} | {8, len(written)})
        with path.open("ab", buffering=0) as file:
            for begin, end in zip([0, *ends], ends, strict=False):
                file.write(written[begin:end])
                time.sleep(0.003)  # so that the tail may look at a part; whether it does must not matter
        tail.close()
    expected = b"".join(b"> " + line + b"\n" for line in written.splitlines())
    assert raw.getvalue() == expected


class Gone(Console):
    def flush(self) -> None:
        raise BrokenPipeError("no one reads")


def test_a_console_that_is_gone_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    with caplog.at_level(logging.WARNING, "ft_wrapper"):
        tail = Tail(str(path), Gone(), "")
        tail.close()
    assert [f"{path} is no longer shown" in record.getMessage() for record in caplog.records] == [True]


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Tail(str(tmp_path / "none" / "log"), Console(), "")
