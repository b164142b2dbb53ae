"""The file of ``--result-file``."""

import contextlib
import logging
import os

log = logging.getLogger(__name__)


def write(path: str, text: str) -> None:
    """Writes how the job has ended: the file is there as a whole, or not at all.

    Args:
        path: of the file.
        text: the result.
    """
    part = f"{path}.{os.urandom(8).hex()}"  # a name that no other user knows, who could put a link there
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(part, path)
    except OSError as error:
        log.error("--result-file %s cannot be written: %s", path, error)
        with contextlib.suppress(OSError):
            os.unlink(part)
