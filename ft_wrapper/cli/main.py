"""The command ``ftrun``: hands its arguments to what they name.

What a job needs, torch above all, is imported when one is started: the other commands do without.
"""

import atexit
import contextlib
import difflib
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from .._text import without_secrets
from ..agent.signals import handle_notices
from ..exception import StoreError

#: What ``ftrun`` does beside starting a script, and where. One of such a name is started as ``./status``.
COMMANDS = {
    "status": "ft_wrapper.cli.commands:main_status",
    "report": "ft_wrapper.report.command:main",
    "drain": "ft_wrapper.cli.commands:main_drain",
    "restart": "ft_wrapper.cli.commands:main_restart",
    "stop": "ft_wrapper.cli.commands:main_stop",
}


def level_of_ftrun() -> str:
    """What ``LOGLEVEL`` says, else ``INFO``. torch reads it, too, as its elastic package is imported.

    Raises:
        SystemExit: it is no level, as torch would say with a traceback (2; one line on stderr).
    """
    said = os.environ.get("LOGLEVEL", "INFO")
    if said not in logging.getLevelNamesMapping():
        known = ", ".join(logging.getLevelNamesMapping())
        print(f"ftrun: error: LOGLEVEL={said}: there is no such level; use {known}", file=sys.stderr)
        sys.exit(2)
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Does what ``ftrun`` does, in this process.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Returns:
        The exit code, see `run.run`; that of a command; with ``--check`` 1 if something was found, else 0.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    name = words[0] if words else ""
    if words == ["--version"]:  # as the parser of all options has it, which needs torch
        from importlib.metadata import version  # it takes its time, too

        print(f"ftrun {__version__}, torch {version('torch')}")
        return 0
    if name in COMMANDS:
        return _carry_out(name, words[1:])
    meant = difflib.get_close_matches(name, COMMANDS, 1)
    if meant and not name.startswith("-") and not os.path.exists(name):
        print(f"ftrun: error: {name}: no such command or file; did you mean {meant[0]!r}?", file=sys.stderr)
        return 2
    level = level_of_ftrun()  # before torch's elastic package fails
    from .run import start_job

    return start_job(words, level)


def _carry_out(name: str, argv: Sequence[str]) -> int:
    """Carries out a command; a reader that has read enough, such as ``head``, ends it quietly."""
    try:
        code: int = pkgutil.resolve_name(COMMANDS[name])(argv)
        sys.stdout.flush()
    except (StoreError, RuntimeError, ImportError, ValueError) as error:  # torch's own are RuntimeErrors
        print(f"ftrun {name}: error: {without_secrets(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more, at its end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def command() -> NoReturn:
    """What the command ``ftrun`` is: `main`, and the end of the process with its exit code.

    It leaves out Python's own last steps, which write to most of torch's memory: a third of a second. And a
    thread that returns from torch's code meanwhile would abort the process before Python 3.14.
    """
    handle_notices(lambda *_: None)  # also before the agent takes them over, and after
    if COMMANDS.keys() & {*sys.argv[1:2]}:  # c10d prints two lines for each wait that times out
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = main()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
