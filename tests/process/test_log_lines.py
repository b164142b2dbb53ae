"""How the package's lines look where the program has not set up logging."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import textwrap

import pytest
from support.warm_ftrun import run_python

from ft_wrapper._text import without_secrets
from ft_wrapper.log_lines import LineFormatter
from ft_wrapper.testing.etcd_server import free_port

IMPORTS = """
import logging, sys
logging.getLogger("ft_wrapper").handlers.clear()  # of a process that this one was forked from
for name in [name for name in sys.modules if name.partition(".")[0] == "ft_wrapper"]:
    del sys.modules[name]
import ft_wrapper
from ft_wrapper import log_lines
log = logging.getLogger("ft_wrapper.restart.call")
"""
TIME = r"\d{4} \d\d:\d\d:\d\d\.\d{3}"


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may run in a rank."""
    for name in [name for name in os.environ if name.endswith("RANK") or name.startswith("FT_WRAPPER_LOG")]:
        monkeypatch.delenv(name)


def stderr_of(program: str, launcher: str = "ftrun", **environment: str) -> list[str]:
    """The lines that a rank writes to stderr after it has imported the package."""
    environment |= {"FT_WRAPPER_AGENT": "there"} if launcher == "ftrun" else {}
    done = run_python(["-c", IMPORTS + textwrap.dedent(program)], 100, environment)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_a_line_has_level_time_node_and_the_present_rank() -> None:
    said = stderr_of(
        """
        log.warning('one'); log.error('two'); log.info('three')
        import os; os.environ['RANK'] = '1'; log.warning('four')
        """,
        GROUP_RANK="3",
        RANK="17",
    )
    assert [re.sub(TIME, "TIME", line) for line in said] == [
        "WTIME [3/17] one",
        "ETIME [3/17] two",
        "WTIME [3/1] four",
    ]
    (said_alone,) = stderr_of(
        "import socket; socket.gethostname = lambda: 'host7'; log.warning('one')", RANK="0"
    )
    assert said_alone.endswith(" [host7/0] one"), "a node without a number is called by its name"


def test_it_is_silent_where_the_program_has_a_handler() -> None:
    said = stderr_of("""
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mine: %(message)s"))
        logging.getLogger().addHandler(handler)
        log.warning("one")
    """)
    assert said == ["mine: one"]


def test_it_writes_to_the_stderr_of_the_moment() -> None:
    said = stderr_of("""
        import io
        sys.stderr, real = io.StringIO(), sys.stderr
        log.warning("one")
        print("caught", sys.stderr.getvalue().endswith("one\\n"), file=real)
    """)
    assert said == ["caught True"]


def test_without_ftrun_a_program_gets_a_handler_with_its_first_wrapped_call() -> None:
    """Python itself shows a warning before that, and all lines have their place from then on."""
    said = stderr_of(
        """
        assert logging.getLogger("ft_wrapper").handlers == logging.getLogger().handlers == []
        log.warning("before")
        @ft_wrapper.Wrapper()
        def train(call_wrapper=None):
            if call_wrapper.iteration == 0:
                raise ValueError("boom")
        train()
        """,
        launcher="torchrun",
        GROUP_RANK="3",
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port() - 1),
    )
    assert said[0] == "before"
    (line,) = (line for line in said if "restart 1: " in line)
    assert re.fullmatch(rf"W{TIME} \[3/0\] restart 1: .* raised ValueError: boom.*", line)


# ---- as JSON


def test_a_line_is_an_object() -> None:
    (said,) = stderr_of(
        """
        log_lines.begin_rank(5)
        log.warning('%s\\n%s', 'one', 'ü')
        """,
        FT_WRAPPER_LOG_FORMAT="json",
        GROUP_RANK="3",
        RANK="17",
        PYTHONIOENCODING="utf-8",
    )
    line = json.loads(said)
    when = datetime.datetime.fromisoformat(line.pop("time").replace("Z", "+00:00"))
    assert abs(datetime.datetime.now(datetime.UTC) - when) < datetime.timedelta(minutes=10)
    assert line == {
        "level": "WARNING",
        "logger": "ft_wrapper.restart.call",
        "node": "3",
        "rank": 17,
        "slot": 5,
        "message": "one\nü",
    }


def test_what_is_not_known_is_left_out_and_a_traceback_is_in_the_line() -> None:
    (said,) = stderr_of(
        """
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception('one')
        """,
        FT_WRAPPER_LOG_FORMAT="json",
        RANK="None",  # a spare's
    )
    line = json.loads(said)
    assert line.keys() == {"time", "level", "logger", "node", "message", "exception"}
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("\nZeroDivisionError: division by zero")


def test_a_format_that_there_is_not_is_said_and_the_lines_are_text() -> None:
    said = stderr_of("log.warning('one')", FT_WRAPPER_LOG_FORMAT="xml", GROUP_RANK="0", RANK="1")
    assert [re.sub(TIME, "TIME", line) for line in said] == [
        "WTIME [0/1] FT_WRAPPER_LOG_FORMAT=xml: use text or json; log lines are text",
        "WTIME [0/1] one",
    ]


# ---- secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("etcd at http://me:pw@h:2379 is lost", "etcd at http://…@h:2379 is lost"),
        ("https://token@h:1,h2:1", "https://…@h:1,h2:1"),
        ("http://me:p@ss:w@h:1/job@3", "http://…@h:1/job@3"),
        ("http://me:one@h:1,http://me:two@h2:1", "http://…@h:1,http://…@h2:1"),
        ("--rdzv-endpoint me:pw@h: no", "--rdzv-endpoint …@h: no"),
        ("--rdzv-endpoint=me:pw@h:1,me:pw@h2:1", "--rdzv-endpoint=…@h2:1"),
        ("'me:pw@[::1]:2379'", "'…@[::1]:2379'"),
        ("password=pw,ttl=60 PASSWORD=pw?token=abc&ttl=60", "password=…,ttl=60 PASSWORD=…&ttl=60"),
        ("etcd://h:2379,h2:2379/job@3?ca=/a/b.pem&ttl=60", "etcd://h:2379,h2:2379/job@3?ca=/a/b.pem&ttl=60"),
        ("rank 1 raised E: a @ b, x@y.org", "rank 1 raised E: a @ b, x@y.org"),
    ],
)
def test_what_is_shown_of_a_text(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_no_line_has_a_secret() -> None:
    said = stderr_of(
        """
        try:
            raise ValueError("http://me:pa55word@h:1")
        except ValueError:
            log.exception('lost %s', 'http://me:pa55word@h:1')
        """,
        FT_WRAPPER_LOG_FORMAT="json",
    )
    assert "pa55word" not in "".join(said) and "".join(said).count("http://…@h:1") >= 2


def test_a_record_keeps_what_other_handlers_show() -> None:
    record = logging.makeLogRecord({"msg": "lost %s", "args": ("http://me:pw@h",)})
    assert LineFormatter().format(record).endswith("lost http://…@h")
    assert record.getMessage() == "lost http://me:pw@h"
