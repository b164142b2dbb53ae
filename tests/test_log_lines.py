"""How the package's lines look where the program has not set up logging."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

TIME = r"\d{4} \d\d:\d\d:\d\d\.\d{3}"


def stderr_of(program: str, **environment: str) -> list[str]:
    """The lines that a program writes to stderr after it has imported the package."""
    code = "import logging, sys, ft_wrapper\nlog = logging.getLogger('ft_wrapper.restart.call')\n"
    done = subprocess.run(
        [sys.executable, "-c", code + textwrap.dedent(program)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stderr.splitlines()


def test_a_line_has_level_time_node_and_rank() -> None:
    said = stderr_of("log.warning('one'); log.error('two'); log.info('three')", GROUP_RANK="3", RANK="17")
    assert [re.sub(TIME, "TIME", line) for line in said] == ["WTIME [3/17] one", "ETIME [3/17] two"]


def test_a_node_without_a_number_is_called_by_its_name() -> None:
    (said,) = stderr_of("import socket; socket.gethostname = lambda: 'host7'; log.warning('one')", RANK="0")
    assert said.endswith(" [host7/0] one")


def test_the_rank_is_the_present_one() -> None:
    said = stderr_of("import os; os.environ['RANK'] = '1'; log.warning('one')", GROUP_RANK="0", RANK="2")
    assert said[0].endswith(" [0/1] one")


@pytest.mark.parametrize("name", ["", "ft_wrapper"])
def test_it_is_silent_where_the_program_has_a_handler(name: str) -> None:
    said = stderr_of(f"""
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mine: %(message)s"))
        logging.getLogger({name!r}).addHandler(handler)
        logging.getLogger("ft_wrapper").propagate = {not name}
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
