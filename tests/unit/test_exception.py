"""What is said of an exception in one line."""

from __future__ import annotations

import json
import traceback

import pytest

from ft_wrapper import exception
from ft_wrapper.exception import RestartError, in_one_line


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a fault"),
        RuntimeError(),
        KeyError("key"),
        OSError(28, "No space left on device", "file"),
        RuntimeError("one line\nand another"),
        json.JSONDecodeError("not JSON", "x", 0),
        Unspeakable(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_as_a_tracebacks_last_line(error: BaseException) -> None:
    expected = "".join(traceback.format_exception_only(error)).strip()
    assert in_one_line(error) == expected.partition("\n")[0]


def test_a_timeout_is_caught_as_pythons_own_and_as_the_wrappers() -> None:
    for kind in (TimeoutError, RestartError):
        with pytest.raises(kind, match=r"^rank 3 is missing$"):
            raise exception.TimeoutError("rank 3 is missing")


def test_nvrx_calls_a_timeout_so() -> None:
    assert exception.TimeoutError is exception.RestartTimeout


def test_the_message_may_begin_with_an_empty_line() -> None:
    assert in_one_line(RuntimeError("\n\nafter empty ones ")) == "RuntimeError: after empty ones"


def test_a_syntax_error_says_what_is_wrong() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = = 1", "train.py", "exec")
    assert in_one_line(caught.value) == "SyntaxError: invalid syntax (train.py, line 1)"


def test_it_has_no_password_in_it() -> None:
    error = RuntimeError("no answer from https://me:pa55word@host:1/runs")
    assert in_one_line(error) == "RuntimeError: no answer from https://…@host:1/runs"
