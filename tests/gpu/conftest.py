"""The table at the end: what was run on a GPU, and what was seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_NO_GPU = "There is no GPU here: nothing of this was run."
_ON_CPUS = "On CPUs, with gloo: this shows that the tests work, and nothing of a GPU."


@pytest.fixture
def seen(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Notes the figure for the table's row of this test; without one it is "yes"."""
    return lambda figure: record_property("seen", figure)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test its row: the first line of its docstring."""
    for item in items:
        if item.path.parent != HERE:
            continue
        parts = (inspect.getdoc(getattr(item, "obj", None)) or item.name).splitlines()[:1]
        if hasattr(item, "callspec"):
            parts.append(f"({item.callspec.id})")
        item.user_properties.append(("what", " ".join(parts)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table."""
    rows = {}
    for outcome in ("skipped", "passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            noted = dict(getattr(report, "user_properties", []))
            if "what" in noted:
                rows[report.nodeid] = (noted["what"], outcome, _figure(report, outcome, noted))
    if not rows:
        return
    from gpu_ranks import GPUS, IS_CUDA

    machine = _machine()
    write = terminalreporter.write_line
    terminalreporter.write_sep("-", "on a GPU")
    write("| what | seen | with |")
    write("| --- | --- | --- |")
    for what, outcome, figure in rows.values():
        write(f"| {what} | {figure} | {'' if outcome == 'skipped' else machine} |")
    if not IS_CUDA:
        write(_ON_CPUS)
    elif not GPUS:
        write(_NO_GPU)


def _figure(report: pytest.TestReport, outcome: str, noted: dict[str, object]) -> str:
    if outcome == "passed":
        return str(noted.get("seen", "yes"))
    if outcome == "skipped" and isinstance(report.longrepr, tuple):
        return f"not run: {report.longrepr[2].removeprefix('Skipped: ')}"
    return f"**{outcome}**"


def _machine() -> str:
    """Versions, and the GPU; asked when no test is left that CUDA could disturb."""
    import torch
    from gpu_ranks import GPUS, IS_CUDA

    parts = [f"torch {torch.__version__}"]
    if not IS_CUDA:
        parts.append("gloo on CPUs")
    elif GPUS:
        if torch.distributed.is_nccl_available():
            version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            parts.append(f"NCCL {'.'.join(map(str, version))}")
        try:
            parts.append(torch.cuda.get_device_name(0))
        except RuntimeError as error:  # the table is printed all the same
            parts.append(f"a GPU that does not tell its name: {str(error).splitlines()[0]}")
    return ", ".join(parts)
