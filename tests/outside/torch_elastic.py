"""Runs torch's own tests of its launcher and agent, with torch and with ft_wrapper in torch's place.

    python tests/outside/torch_elastic.py SOURCE_DIR

SOURCE_DIR is a source tree of torch, of which only ``test/distributed`` is needed. See docs/testing.md for
what has to be installed. Nothing of torch's tests is changed: `in_place/sitecustomize.py` puts our classes
where torch's are, in each process. The table has a line for each test and a column for each way in which it
was run; each difference from torch has its reason below it, and one without a reason is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from ft_wrapper.store import TCPStoreServer
from ft_wrapper.testing import EtcdServer

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TORCH = "torch"
COLUMNS = {
    TORCH: "",
    "agent": "agent",
    "agent, ft": "agent,ft",
    "agent, ft-etcd": "agent,ft-etcd",
    "ftrun": "ftrun",
    "ftrun, ft": "ftrun,ft",
    "ftrun, ft-etcd": "ftrun,ft-etcd",
}
"""What is in torch's place: nothing; `LocalElasticAgent`, with torch's rendezvous or ours; all of ``ftrun``."""
LAUNCHER_TESTS = "launcher/test_run.py"
"""The only file of which the tests go through the command line's `main`."""
FILES = (
    LAUNCHER_TESTS,
    "launcher/launch_test.py",
    "launcher/api_test.py",
    "elastic/agent/server/test/local_elastic_agent_test.py",
)

WHY: tuple[tuple[str, str, str], ...] = ()
"""Test and column, both with wildcards, and the reason why it ends otherwise than with torch."""

MARKS = {"passed": "ok", "failed": "FAILS", "skipped": "skipped", "": "no end"}


def main() -> int:
    """Runs everything, and prints the table; returns 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(description="torch's own elastic tests with ft_wrapper in torch's place")
    parser.add_argument("source", type=Path, help="torch's source tree")
    parser.add_argument("--files", nargs="*", default=FILES, help="in test/distributed")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("-k", default="", help="only tests that pytest's -k names so")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, of each test")
    parser.add_argument("--logs", type=Path, default=None, help="folder for what the tests print")
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="torch_elastic_"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"what the tests print is in {logs}", file=sys.stderr)
    results: dict[tuple[str, str], dict[str, str]] = {}
    with contextlib.ExitStack() as cleanup:
        server = TCPStoreServer(0)
        cleanup.callback(server.close)
        etcd = cleanup.enter_context(EtcdServer())
        env = environment(f"localhost:{server.port}", etcd.endpoints)
        for file in args.files:
            for column in args.columns:
                if column.startswith("ftrun") and file != LAUNCHER_TESTS:
                    continue
                for test, result in run(args, file, column, env, logs).items():
                    results.setdefault((file, test), {})[column] = result
    return print_table(results, args.columns)


def environment(tcp: str, etcd: str) -> dict[str, str]:
    """What all tests are run with, beside the column."""
    path = [str(HERE / "in_place"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "FT_WRAPPER_OUTSIDE_TCP": tcp,
        "FT_WRAPPER_OUTSIDE_ETCD": etcd,
        "OMP_NUM_THREADS": "1",
    }


def run(args: argparse.Namespace, file: str, column: str, env: dict[str, str], logs: Path) -> dict[str, str]:
    """Runs a file's tests in one way.

    Returns:
        By the test's name: ``passed``, ``failed`` or ``skipped``.
    """
    name = f"{Path(file).stem}.{column.replace(', ', '.')}"
    report = logs / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", str(args.source / "test" / "distributed" / file)]
    command += ["--rootdir", str(logs), "-p", "no:cacheprovider", "-q", "--tb", "short"]
    command += ["--timeout", str(args.timeout), "--junitxml", str(report)]
    command += [
        "-k",
        " and ".join(filter(None, [args.k, *(f"not {test}" for test in twice(args, file, column))])),
    ]
    with (logs / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**env, "FT_WRAPPER_OUTSIDE": COLUMNS[column]},
        )
        try:
            process.wait(timeout=100 * args.timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also agents that a failed test has left behind
            process.wait()
    if not report.exists():
        print(f"{file}, {column}: no result, see {log.name}", file=sys.stderr)
        return {}
    return {case.get("name", ""): outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def twice(args: argparse.Namespace, file: str, column: str) -> list[str]:
    """The tests that are on torch's etcd what another one is on c10d, where both are on our own rendezvous."""
    if ", " not in column:
        return []
    text = (args.source / "test" / "distributed" / file).read_text()
    names = re.findall(r"def (test_\w+)\(", text)
    bodies = {name.removesuffix("_c10d") for name in names}
    found = [name for name in names if name.endswith("_etcd") and name.removesuffix("_etcd") in bodies]
    return [*found, "etcd_v2"]


def outcome(case: ElementTree.Element) -> str:
    """How a test ended, by its entry in the report."""
    found = {child.tag for child in case}
    if found & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in found else "passed"


def why(test: str, column: str) -> str:
    """The reason why a test does not end as with torch; empty if none is known."""
    for tests, columns, reason in WHY:
        if fnmatch.fnmatch(test, tests) and fnmatch.fnmatch(column, columns):
            return reason
    return ""


def print_table(results: dict[tuple[str, str], dict[str, str]], columns: list[str]) -> int:
    """Prints each test, the sums of each file, and the reasons."""
    unexplained = 0
    reasons: dict[str, int] = {}
    sums: dict[tuple[str, str], list[int]] = {}
    for (file, test), ends in results.items():
        cells = []
        for column in columns:
            end = ends.get(column)
            if end is None and column.startswith("ftrun") and file != LAUNCHER_TESTS:
                cells.append("")
                continue
            reason = why(test, column)
            if end != "passed" and ends.get(TORCH) != "passed" and column != TORCH:
                cells.append("(torch)")
                continue
            counted = sums.setdefault((file, column), [0, 0, 0])
            counted[0] += 1
            counted[1] += end == "passed"
            mark = MARKS[end or ""]
            if end != "passed":
                if reason:
                    counted[2] += 1
                    mark += f" [{reasons.setdefault(reason, len(reasons) + 1)}]"
                elif column != TORCH:
                    unexplained += 1
                    mark += " [?]"
            cells.append(mark)
        print(f"| {file} | {test} | " + " | ".join(cells) + " |")
    print()
    for (file, column), (applicable, passed, explained) in sums.items():
        print(f"{file}, {column}: {passed} of {applicable} passed, {explained} differences explained")
    print()
    for reason, number in reasons.items():
        print(f"[{number}] {reason}")
    if unexplained:
        print(f"{unexplained} differences without a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
