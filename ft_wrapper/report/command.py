"""The command ``ftrun report``: of events files, tables on the terminal or a page."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from .._text import plural
from . import PHASES, make_reports
from .reading import read_files


def main(argv: Sequence[str] | None = None) -> int:
    """``ftrun report``: prints the report of some events files, and draws it.

    Args:
        argv: the arguments; ``sys.argv`` without the program's name when None.

    Returns:
        0, or 2 if a file cannot be read or written.
    """
    args = _parser().parse_args(argv)
    try:
        with _page(args.html) if args.html is not None else contextlib.nullcontext() as page:
            records, left_out = read_files(args.events)
            if left_out:
                count = f"{len(left_out)} {plural(len(left_out), 'record')} left out"
                print(f"ftrun report: {count}, the first at {left_out[0]}", file=sys.stderr)
            reports = make_reports(records)
            if page is not None:
                from .page import make_page  # needs Jinja2

                page.write(make_page(reports).encode(errors="replace"))
    except (OSError, ValueError, ImportError) as error:
        print(f"ftrun report: error: {error}", file=sys.stderr)
        return 2
    for report in reports:
        if args.json:
            print(report.to_json())
        else:
            print(*([f"job {report.job}:"] if len(reports) > 1 else []), report.to_text(), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    phases = "; ".join(f"{name}: {what}" for name, what in PHASES.items())
    parser = argparse.ArgumentParser(
        prog="ftrun report",
        description="Shows what a job's time went to, and what each restart's time went to.",
        epilog=f"The phases, one after the other, from the first fault on: {phases}.",
        allow_abbrev=False,
    )
    parser.add_argument("events", nargs="+", help="the files that FT_WRAPPER_EVENTS named, of all hosts")
    parser.add_argument("--json", action="store_true", help="print one JSON object per job, one per line")
    parser.add_argument("--html", metavar="FILE", help="also write a page for a browser, with a timeline")
    return parser


@contextlib.contextmanager
def _page(path: str) -> Iterator[BinaryIO]:
    """Opens the page's file; it takes the place of an old one once it is whole.

    Raises:
        OSError: it cannot be written. The message names the option.
    """
    where = os.path.realpath(path)
    is_file = os.path.isfile(where) or not os.path.exists(where)  # else a device or a pipe; a folder raises
    unfinished = f"{where}.{os.getpid()}.unfinished" if is_file else where
    try:
        mode = _mode(where) if is_file else None
        with open(unfinished, "xb" if is_file else "wb") as file, contextlib.ExitStack() as on_error:
            if is_file:
                on_error.callback(os.unlink, unfinished)
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if is_file:
                os.replace(unfinished, where)
            on_error.pop_all()
    except OSError as error:
        # One from elsewhere in the block names its own file.
        if error.errno is None or error.filename not in (None, where, unfinished):
            raise
        raise OSError(f"--html {path}: {error.strerror}; name a file that can be written") from error


def _mode(path: str) -> int | None:
    """The permissions of an old file; None if there is none.

    Raises:
        OSError: it may not be replaced.
    """
    try:
        with open(path, "r+b") as old:
            if old.read(9) == b'{"event":':  # a shell has put the name of the first events file there
                words = (
                    "has events of a job, and would be lost; the option's FILE comes before the events files"
                )
                raise OSError(0, words, path)
            return os.fstat(old.fileno()).st_mode & 0o7777
    except FileNotFoundError:
        return None
