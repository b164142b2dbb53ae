"""The page that "A job at a glance" links to, of a real job with twelve faults.

    python docs/report_pages.py

rewrites ``docs/_static/report.html`` in some two minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ft_wrapper.report import command

STATIC = Path(__file__).parent / "_static"
ROOT = Path(__file__).parent.parent
FAULTS = (
    "exception:rank=1:step=40,sigkill:rank=2:step=90,sleep:rank=0:step=130,exception:rank=3:step=190,"
    "sigkill:rank=0:step=230,sigkill:rank=3:step=290,exception:rank=2:step=330,sleep:rank=2:step=370,"
    "sigkill:rank=1:step=420,exception:rank=0:step=450,sigkill:rank=2:step=500,exception:rank=1:step=540"
)


def real_job(folder: Path) -> Path:
    """Trains on four ranks with two spares, through all faults; returns the events file."""
    words = [sys.executable, "-m", "ft_wrapper.run", "--nproc-per-node", "6", "--rdzv-id", "train-lm"]
    words += [str(ROOT / "examples/train_lm.py"), "--active", "4", "--steps", "600", "--faults", FAULTS]
    words += ["--soft-timeout", "4", "--hard-timeout", "9", "--checkpoint-dir", str(folder / "checkpoints")]
    events = folder / "events"
    environment = {**os.environ, "FT_WRAPPER_EVENTS": str(events), "OMP_NUM_THREADS": "1"}
    with open(folder / "output", "wb") as output:
        code = subprocess.run(words, env=environment, stdout=output, stderr=output, timeout=580).returncode
    if code != 0:
        sys.exit(f"the job ended with {code}:\n{(folder / 'output').read_text()[-4000:]}")
    host = os.uname().nodename  # the pages are to say the same wherever they are made
    text = (
        events.read_text()
        .replace(f'"host": "{host}"', '"host": "node0"')
        .replace(f" on {host} pid", " on node0 pid")
    )
    events.write_text(text)
    return events


def main() -> None:
    """Makes it."""
    with tempfile.TemporaryDirectory() as name:
        words = [str(real_job(Path(name))), "--html", str(STATIC / "report.html")]
        if command.main(words) != 0:
            sys.exit(2)


if __name__ == "__main__":
    main()
