"""The command ``ftrun report``: makes tables on the terminal, or a page, from events files."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

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
        records, left_out = read_files(args.events)
        if left_out:
            count = f"{len(left_out)} {plural(len(left_out), 'record')} left out"
            print(f"ftrun report: {count}, the first at {left_out[0]}", file=sys.stderr)
        reports = make_reports(records)
        if args.html is not None:
            from .page import make_page  # needs Jinja2

            _write_page(args.html, make_page(reports))
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
        epilog=f"The phases, in order, from the first fault on: {phases}.",
        allow_abbrev=False,
    )
    parser.add_argument("events", nargs="+", help="the folder of ftrun --events, or its files from all hosts")
    parser.add_argument("--json", action="store_true", help="print one JSON object per job, one per line")
    parser.add_argument("--html", metavar="FILE", help="also write a page for a browser, with a timeline")
    return parser


def _write_page(path: str, page: str) -> None:
    """Writes the page, and replaces an old one.

    Raises:
        OSError: it cannot be written. The message names the option.
    """
    try:
        if os.path.isfile(path):
            with open(path, "rb") as old:
                if old.read(9) == b'{"event":':  # a shell has put the name of the first events file there
                    raise OSError(0, "has events of a job, and would be lost")
        Path(path).write_bytes(page.encode(errors="replace"))
    except OSError as error:
        raise OSError(f"--html {path}: {error.strerror}; name a file that can be written") from error
