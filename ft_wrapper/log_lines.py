"""The format of log lines if the program has not set up logging: a line of text, or a JSON object."""

import datetime
import json
import logging
import os
import socket
import sys
import time
from typing import Any

from ._text import without_secrets

NAME = __name__.partition(".")[0]
#: The format of a process's log lines: ``text`` or ``json``. ``ftrun --log-format`` sets it for its ranks.
FORMAT_ENV = "FT_WRAPPER_LOG_FORMAT"
TEXT = "text"
JSON = "json"
FORMATS = (TEXT, JSON)

_node: int | None = None
_slot: int | None = None
_format: str | None = None


def note_node(number: int) -> None:
    """Sets the node rank in the log lines of this process."""
    global _node
    _node = number


def begin_rank(slot: int) -> None:
    """Makes this rank show its log lines unless the program does; called at each wrapped call.

    Args:
        slot: its rank at the job's start, for the log lines.
    """
    global _slot
    _slot = slot
    install()


def choose_format(form: str) -> None:
    """Sets the format of this process's log lines, ``text`` or ``json``, over the environment's."""
    global _format
    _format = form


def chosen_format() -> str:
    """The format of this process's log lines: the one set, else the environment's, else ``text``."""
    said = _format or os.environ.get(FORMAT_ENV, TEXT)
    return said if said in FORMATS else TEXT


def make_formatter(program: str | None = None) -> logging.Formatter:
    """Makes the formatter for the log lines of this process.

    Args:
        program: put in front of the message of a line of text; None for a rank.
    """
    return JsonFormatter(program) if chosen_format() == JSON else LineFormatter(program)


class LineFormatter(logging.Formatter):
    """Formats as torch and glog do, and adds the place: ``W1123 03:04:05.678 [0/2] restart 1: …``.

    The letter is the level; the digits are month, day and time. The place is the node and the rank.

    Args:
        program: put in front of the message; None for a rank, which has its number in the place.
    """

    def __init__(self, program: str | None = None) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        """Formats all of it, without secrets."""
        return without_secrets(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """Formats the line itself; a traceback follows below it."""
        when = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        place = _node_name() if self._program else f"{_node_name()}/{os.environ.get('RANK', '-')}"
        message = f"{self._program}: {record.message}" if self._program else record.message
        return f"{record.levelname[0]}{when}.{int(record.msecs):03d} [{place}] {message}"


class JsonFormatter(LineFormatter):
    """Formats a line as a JSON object: time, level, logger, node, rank, slot, message, exception.

    The time is UTC. Empty fields are left out: the rank of a spare, the slot before the wrapped call, the
    exception (a traceback) if there is none.

    Args:
        program: None for a rank; the lines of other processes have no rank.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Formats all of it, without secrets."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        rank = os.environ.get("RANK", "") if self._program is None else ""
        fields = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "node": _node_name(),
            "rank": int(rank) if rank.isdecimal() else None,
            "slot": _slot if self._program is None else None,
            "message": without_secrets(record.getMessage()),
            "exception": without_secrets(self.formatException(record.exc_info)) if record.exc_info else None,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(given, ensure_ascii=False)


class StandardHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to a standard stream as it is now, not as it was at import.

    Args:
        name: ``stdout`` or ``stderr``.
        level: the lowest level that it writes.
    """

    def __init__(self, name: str, level: int) -> None:
        logging.Handler.__init__(self, level)  # not StreamHandler's, which keeps a stream
        self._standard = name

    @property
    def stream(self) -> Any:
        """The stream."""
        return getattr(sys, self._standard)


class DefaultHandler(StandardHandler):
    """Writes to stderr what Python would without logging set up, and adds time and place.

    It is silent as soon as the program has its own handlers, for all loggers or for this package's.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Formats a line in the format that is set now."""
        return make_formatter().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, unless another handler does."""
        if not logging.getLogger().handlers and len(logging.getLogger(NAME).handlers) == 1:
            super().emit(record)


def install() -> None:
    """Puts a `DefaultHandler` on this package's logger, if there is none."""
    logger = logging.getLogger(NAME)
    if any(isinstance(handler, DefaultHandler) for handler in logger.handlers):
        return
    logger.addHandler(DefaultHandler("stderr", logging.WARNING))
    if os.environ.get(FORMAT_ENV, TEXT) not in FORMATS:
        words = "%s=%s: use text or json; log lines are text"
        logger.warning(words, FORMAT_ENV, os.environ[FORMAT_ENV])


def _node_name() -> str:
    if _node is not None:
        return str(_node)
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or socket.gethostname()
