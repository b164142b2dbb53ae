"""Runs the tests of processes on several versions of torch, each in a virtual environment of its own.

    python tests/outside/torch_matrix.py 2.6.0 2.15.0
    python tests/outside/torch_matrix.py 2.15.0=/path/to/another/python3.13

The environments are kept (``.venv-torch-2.6.0`` and so on), since torch from PyPI brings gigabytes of CUDA
packages. It runs on the CPU all the same. A table of all runs comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("tests/process/abort", "tests/process/live", "tests/process/wrapper", "tests/process/agent")
SELECTED = "not nightly and not alone"
INSTALL_LIMIT, TEST_LIMIT = 3600.0, 3600.0


@dataclasses.dataclass
class Result:
    """What the tests showed on one version.

    Args:
        torch: its version, as it says itself.
        python: the version of Python.
        counts: of tests, by what became of them.
        failed: names of the tests that failed.
    """

    torch: str
    python: str
    counts: dict[str, int]
    failed: list[str]


def environment(wanted: str) -> Path:
    """Makes the virtual environment, unless it is there; returns its Python.

    Args:
        wanted: ``VERSION``, or ``VERSION=PYTHON``.
    """
    version, _, python = wanted.partition("=")
    folder = ROOT / f".venv-torch-{version}{'-' + Path(python).name if python else ''}"
    own = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([python or sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_LIMIT)
        install = [own, "-m", "pip", "install", "-qq"]
        for what in ([f"torch=={version}"], [f"torch=={version}", "-e", f"{ROOT}[dev]"]):
            subprocess.run([*install, *what], check=True, timeout=INSTALL_LIMIT)
        (folder / "installed").touch()
    return own


def run(python: Path, workers: int, suites: list[str]) -> Result:
    """Runs the tests.

    Args:
        python: of the virtual environment.
        workers: so many processes.
        suites: folders or files of tests.
    """
    versions = "import sys, torch; print(torch.__version__, sys.version.split()[0])"
    said = subprocess.run([python, "-c", versions], check=True, capture_output=True, text=True, timeout=300)
    torch, version = said.stdout.split()
    report = python.parent.parent / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-m", SELECTED, f"--numprocesses={workers}", "--dist=worksteal"]
    subprocess.run([*command, f"--junit-xml={report}", *suites], cwd=ROOT, timeout=TEST_LIMIT)
    return read(report, torch, version)


def read(report: Path, torch: str, python: str) -> Result:
    """Reads what pytest has written.

    Raises:
        FileNotFoundError: it has not come so far.
    """
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return Result(torch, python, counts, failed)


def main() -> int:
    """Runs all, prints the table; returns 1 if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("versions", nargs="+", metavar="VERSION[=PYTHON]", help="of torch, and the Python to take")
    add("--workers", type=int, default=6, metavar="N", help="test processes (6)")
    add("--suites", nargs="+", default=list(SUITES), metavar="PATH", help=f"default: {' '.join(SUITES)}")
    arguments = parser.parse_args()
    results = [run(environment(wanted), arguments.workers, arguments.suites) for wanted in arguments.versions]
    print("\n| torch | Python | passed | failed | skipped |\n| --- | --- | --- | --- | --- |")
    for each in results:
        print(f"| {each.torch} | {each.python} | {' | '.join(map(str, each.counts.values()))} |")
    for each in results:
        for name in each.failed:
            print(f"failed on {each.torch}: {name}")
    return any(each.failed for each in results)


if __name__ == "__main__":
    sys.exit(main())
