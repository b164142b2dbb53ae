"""The folder of the ranks' log files: that of ``--log-dir``, or a temporary one."""

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std

from ..agent.options import Options

log = logging.getLogger(__name__)


@contextmanager
def open_folder(options: Options) -> Iterator[str]:
    """Makes the folder where it is not there; only its owner gets in then, whatever the umask.

    Args:
        options: the job. Without ``log_dir`` it is a temporary folder, removed if nothing was written there.

    Returns:
        A context: its path.

    Raises:
        OSError: it cannot be made.
    """
    if options.log_dir is not None:
        if options.log_dir != os.devnull:
            _make_private(Path(options.log_dir))
        yield options.log_dir
        return
    path = tempfile.mkdtemp(prefix="ftrun_")
    try:
        if options.redirects != Std.NONE or options.tee != Std.NONE:
            log.info("log files are in %s", path)
        yield path
    finally:
        if not any(files for _, _, files in os.walk(path)):
            shutil.rmtree(path, ignore_errors=True)


def _make_private(folder: Path) -> None:
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(0o700, exist_ok=True)  # another node may be quicker
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        words = "--log-dir %s: any user may replace the job's logs there; chmod o-w it, or name another"
        log.warning(words, folder)
