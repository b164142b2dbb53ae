"""The table of versions of torch counts what pytest has written."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REPORT = """<testsuites><testsuite>
<testcase classname="tests.abort" name="a"/>
<testcase classname="tests.abort" name="b"><failure message="no"/></testcase>
<testcase classname="tests.abort" name="c"><error message="no"/></testcase>
<testcase classname="tests.abort" name="d"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def matrix() -> Any:
    spec = importlib.util.spec_from_file_location("torch_matrix", HERE / "torch_matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_matrix"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_what_failed_is_named(matrix: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    result = matrix.read(report, "2.15.0", "3.13.1")
    assert result.counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert result.failed == ["tests.abort::b", "tests.abort::c"]


def test_a_version_that_fails_ends_with_1(
    matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"""#!{sys.executable}
import sys
if sys.argv[1] == "-c":
    print("2.15.0+cpu 3.13.1")
else:
    report = next(word.partition("=")[2] for word in sys.argv if word.startswith("--junit-xml="))
    open(report, "w").write('''{REPORT}''')
"""
    )
    python.chmod(0o755)
    monkeypatch.setattr(matrix, "environment", lambda wanted: python)
    monkeypatch.setattr(sys, "argv", ["torch_matrix.py", "2.15.0"])
    assert matrix.main() == 1
    said = capsys.readouterr().out
    assert "| 2.15.0+cpu | 3.13.1 | 1 | 2 | 1 |" in said
    assert "failed on 2.15.0+cpu: tests.abort::b" in said
