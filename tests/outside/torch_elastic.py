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
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

from ft_wrapper.testing import EtcdServer
from ft_wrapper.testing.etcd_server import find_etcd

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
"""What is in torch's place: nothing; `LocalElasticAgent`, with torch's rendezvous or ours; the launcher."""
LAUNCHER_TESTS = "launcher/test_run.py"
"""The only file of which the tests go through the command line's `main`."""
FILES = (
    LAUNCHER_TESTS,
    "launcher/launch_test.py",
    "launcher/api_test.py",
    "elastic/agent/server/test/local_elastic_agent_test.py",
)

INSIDES: tuple[tuple[str, str, str], ...] = (
    (
        "test_barrier_failed*",
        "agent*",
        "replaces a function of torch's that only torch's own exit barrier calls",
    ),
    ("test_shutdown_called*", "agent*", "replaces private parts of torch's agent"),
    ("test_launch_shutdown", "ftrun*", "replaces the agent in torch's launcher, which ftrun does without"),
    ("test_launch_elastic_agent_raise_exception", "ftrun*", "replaces the agent in torch's launcher"),
    ("test_min_max_nodes_parse", "ftrun*", "calls another function of torch's, which is not replaced"),
    ("test_is_not_torchelastic_launched", "ftrun*", "launches nothing"),
)
"""Test and column, both with wildcards, and why the test cannot be applied there."""
DIFFERENCES: tuple[tuple[str, str, str], ...] = (
    (
        "test_launch_elastic_worker_raise_exception",
        "ftrun*",
        "ftrun raises, but records no event of torch's: it writes its own, to the file of FT_WRAPPER_EVENTS",
    ),
    *(
        (
            test,
            "agent*",
            "torchrun sets TORCH_NCCL_ASYNC_ERROR_HANDLING=1, which ends ranks that a restart would keep",
        )
        for test in (
            "test_run_check_env_function*",
            "test_run_check_nccl_async_error_handling_env_default*",
        )
    ),
    *(
        (
            test,
            "agent, *",
            "the test has quotes in its --rdzv-conf, so that an option is called 'join_timeout, which torch "
            "ignores; our handlers refuse options that they do not know",
        )
        for test in ("test_launch_elastic", "test_launch_elastic_worker_raise_exception")
    ),
)
"""The same for tests that end otherwise than with torch, as they are meant to."""

MARKS = {"passed": "ok", "failed": "FAILS", "skipped": "skipped"}


def main() -> int:
    """Runs everything, and prints the table; returns 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(description="torch's own elastic tests with ft_wrapper in torch's place")
    parser.add_argument("source", type=Path, help="torch's source tree")
    parser.add_argument("--files", nargs="*", default=FILES, help="in test/distributed")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("-k", default="", help="only tests that pytest's -k names so")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, of each test")
    parser.add_argument(
        "--logs", type=Path, help="folder for what the tests print; its results are shown too"
    )
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="torch_elastic_"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"what the tests print is in {logs}", file=sys.stderr)
    with EtcdServer() as etcd:
        env = environment(etcd.endpoints)
        for file in args.files:
            for column in args.columns:
                if is_there(file, column):
                    run(args, file, column, env, logs)
    return print_table(read_results(logs))


def is_there(file: str, column: str) -> bool:
    """Whether a file's tests can be run in a way: only some go through the function that ftrun replaces."""
    return file == LAUNCHER_TESTS or not column.startswith("ftrun")


def report_of(file: str, column: str, logs: Path) -> Path:
    """Where a file's results in one way are."""
    return logs / f"{Path(file).stem}.{column.replace(', ', '.')}.xml"


def environment(etcd: str) -> dict[str, str]:
    """What all tests are run with, beside the column."""
    path = [str(HERE / "in_place"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "FT_WRAPPER_OUTSIDE_ETCD": etcd,
        "TORCHELASTIC_ETCD_BINARY_PATH": find_etcd(),
        "OMP_NUM_THREADS": "1",
    }


def run(args: argparse.Namespace, file: str, column: str, env: dict[str, str], logs: Path) -> None:
    """Runs a file's tests in one way."""
    report = report_of(file, column, logs)
    report.unlink(missing_ok=True)
    only = [f"({args.k})"] if args.k else []
    command = [sys.executable, "-m", "pytest", str(args.source / "test" / "distributed" / file)]
    command += ["--rootdir", str(logs), "-p", "no:cacheprovider", "-p", "plugin", "-q", "--tb", "short"]
    command += ["--timeout", str(args.timeout), "--junitxml", str(report)]
    # What cannot be applied is not even tried: what a failed test leaves behind may break the next one.
    inside = [tests.rstrip("*") for tests, columns, _ in INSIDES if fnmatch(column, columns)]
    without = [f"not {test}" for test in (*inside, *twice(args, file, column))]
    command += ["-k", " and ".join([*only, *without])]
    with report.with_suffix(".log").open("w") as log:
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
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not report.exists():
        print(f"{file}, {column}: no result, see {log.name}", file=sys.stderr)


def twice(args: argparse.Namespace, file: str, column: str) -> list[str]:
    """Tests that are on torch's etcd what others are on c10d: the same, where both meet in ours."""
    if ", " not in column:
        return []
    text = (args.source / "test" / "distributed" / file).read_text()
    names = re.findall(r"def (test_\w+)\(", text)
    bodies = {name.removesuffix("_c10d") for name in names if not name.endswith("_etcd")}
    found = [name for name in names if name.endswith("_etcd") and name.removesuffix("_etcd") in bodies]
    return [*found, "etcd_v2"]


def read_results(logs: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Reads all reports of a folder; file and test, and how that ended by the column."""
    results: dict[tuple[str, str], dict[str, str]] = {}
    for file, column in itertools.product(FILES, COLUMNS):
        report = report_of(file, column, logs)
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                results.setdefault((file, case.get("name", "")), {})[column] = outcome(case)
    return results


def outcome(case: ElementTree.Element) -> str:
    """How a test ended, by its entry in the report."""
    found = {child.tag for child in case}
    if found & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in found else "passed"


def reason(known: tuple[tuple[str, str, str], ...], test: str, column: str) -> str:
    """Why a test is special in a column; empty if it is not."""
    return next(
        (why for tests, columns, why in known if fnmatch(test, tests) and fnmatch(column, columns)), ""
    )


def print_table(results: dict[tuple[str, str], dict[str, str]]) -> int:
    """Prints each test, the sums of each file, and the reasons; returns 1 if one is missing."""
    columns = [column for column in COLUMNS if any(column in ends for ends in results.values())]
    reasons: dict[str, int] = {}
    sums: dict[tuple[str, str], list[int]] = {}
    missing = 0
    print("| file | test | " + " | ".join(columns) + " |")
    print("|" + " --- |" * (len(columns) + 2))
    for (file, test), ends in results.items():
        cells = []
        for column in columns:
            end = ends.get(column)
            why_not = reason(INSIDES, test, column)
            if end is None and not (why_not and is_there(file, column)):
                cells.append("")
                continue
            if why_not or end is None or ends.get(TORCH, "passed") != "passed":
                why_not = why_not or "torch does not pass it either: not this version, or not on this machine"
                cells.append(f"n/a [{reasons.setdefault(why_not, len(reasons) + 1)}]")
                continue
            count = sums.setdefault((file, column), [0, 0])
            count[0] += 1
            count[1] += end == "passed"
            why = "" if end == "passed" else reason(DIFFERENCES, test, column)
            note = f" [{reasons.setdefault(why, len(reasons) + 1)}]" if why else ""
            missing += end != "passed" and not why
            cells.append(MARKS[end] + note)
        print(f"| {Path(file).name} | {test} | " + " | ".join(cells) + " |")
    print("\n| file | column | applicable | passed |\n| --- | --- | --- | --- |")
    for (file, column), (applicable, passed) in sums.items():
        print(f"| {Path(file).name} | {column} | {applicable} | {passed} |")
    print()
    for why, number in reasons.items():
        print(f"[{number}] {why}")
    if missing:
        print(f"{missing} tests fail without a known reason")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
