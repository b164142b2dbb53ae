"""The pages are right: keys, figures, messages, defaults, options, commands."""

from __future__ import annotations

import contextlib
import difflib
import doctest
import http.server
import importlib
import inspect
import io
import itertools
import json
import os
import pydoc
import queue
import re
import runpy
import shlex
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.run import get_args_parser

from ft_wrapper import Limits, RestartReport, Wrapper
from ft_wrapper.agent.options import make_parser
from ft_wrapper.protocol import keys

DOCS = Path(__file__).parents[2] / "docs"
PREFIX = f"ft_wrapper/{keys.THIS_VERSION}/"
LOOKUPS = ("_key", "_of_iteration", "iteration_of", "member_of", "call_of", "shared_heart", "is_shared_heart")
REFRESH = "run python docs/options.py"


def kinds() -> set[str]:
    """What the keys' names begin with, up to the first number or name of somebody."""
    names = [keys.VERSION, *(text for text in vars(keys).values() if str(text).startswith(PREFIX))]
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if name not in LOOKUPS:
            names.append(function(*"123456789"[: len(inspect.signature(function).parameters)]))
    return {re.split(r"/\d", name.removeprefix(PREFIX).removeprefix("ft_wrapper/"))[0] for name in names}


def test_page_names_every_kind_of_key_and_no_other() -> None:
    page = (DOCS / "agreement.md").read_text()
    cells = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert {kind.split("/")[0] for kind in kinds()} <= set(re.findall(r"`([a-z_]+)", cells))
    diagrams = re.findall(r"^```mermaid\n(.*?)^```$", page, re.M | re.S)
    named = set(re.findall(r"\b([a-z_]+(?:/[a-z_]+)*)/\d", "\n".join(diagrams)))
    assert len(named) > 10 and named <= kinds()


# Messages, timeouts, figures, the README's diff ------------------------------------------------------------

ROOT = DOCS.parent


def sources() -> str:
    """All code of the package, with what is spread over several string literals put together."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "ft_wrapper").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_page_on_messages_quotes_lines_that_are_logged() -> None:
    code = sources()
    page = (DOCS / "messages.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page.partition("## Lines of a rank")[2], re.MULTILINE)
    assert len(quoted) > 25
    assert [line for line in quoted if line not in code] == []


def test_page_on_timeouts_has_the_defaults() -> None:
    page = (DOCS / "timeouts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (?:`\"auto\"`, at first )?(\d+) s \|", page, re.MULTILINE)
    assert len(rows) == 8
    limits = Wrapper().settings.all_limits
    for name, seconds in rows:
        assert limits.seconds(name) == float(seconds), name


def test_reference_names_what_there_is() -> None:
    named = re.findall(r"^\.\. auto\w+:: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(named) > 25
    assert [name for name in named if not is_there(name)] == []


def is_there(name: str) -> bool:
    if not name.startswith("ft_wrapper.integrations."):
        return pydoc.locate(name) is not None
    # Its framework need not be installed.
    *path, member = name.split(".")
    source = DOCS.parent.joinpath(*path).with_suffix(".py").read_text()
    return re.search(rf"^(class|def) {member}\b", source, re.MULTILINE) is not None


def test_readme_shows_the_difference_between_the_two_scripts() -> None:
    """Of the lines that stay some are left out."""
    before, after = ((ROOT / "examples" / f"ddp_{name}.py").read_text() for name in ("before", "after"))
    body = [text[text.index("import os") :].splitlines() for text in (before, after)]
    changes = [line for line in [*difflib.unified_diff(*body)][2:] if line[0] in "+-"]
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = shown.splitlines()
    assert [line for line in lines if line[0] in "+-"] == changes
    assert {line[1:] for line in lines if line[0] == " "} <= set(body[0]) & set(body[1])


def test_readme_shows_lines_of_the_live_example() -> None:
    """All that it shows, in this order."""
    (shown,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    example = (ROOT / "examples" / "live_ddp.py").read_text()
    lines = [line for line in example.splitlines() if line in shown.splitlines()]
    assert [line for line in lines if line] == [line for line in shown.splitlines() if line]
    assert len(example.splitlines()) <= 41


# The table of options ------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that makes the table of options."""
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCH_ELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "options", raising=False)
    return importlib.import_module("options")


def test_table_has_every_option_as_the_parsers_have_it(table: Any) -> None:
    theirs, page = get_args_parser()._option_string_actions, table.on_page()
    for option, (default, of_ours, differs) in table.rows().items():
        if option not in page:
            assert make_parser()._option_string_actions[option] in make_parser().unknown(), (
                f"{option}: {REFRESH}"
            )
            continue
        assert page[option][1:] == (of_ours, differs), f"{option}: {REFRESH}"
        assert option not in theirs or page[option][0] == default, f"{option}: {REFRESH}"
    assert page.keys() - table.rows().keys() == set(), REFRESH


def test_table_of_settings_is_what_its_program_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "settings", raising=False)
    settings = importlib.import_module("settings")
    assert settings.on_page() == settings.table(), "run python docs/settings.py"
    for owner in (Wrapper, Limits):
        for name in inspect.signature(owner).parameters:
            assert f"| `{name}` |" in settings.on_page()
            assert f"\n        {name}: " in (owner.__doc__ or "")


# The recipes for on_restart --------------------------------------------------------------------------------


def recipe(name: str, given: dict[str, Any]) -> Any:
    """The function that the page shows, with the modules that it uses."""
    page = (DOCS / "monitoring.md").read_text().partition(f"### {name}\n")[2]
    found = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/monitoring.md has no recipe for {name}"
    exec(compile(found[1], name, "exec"), given)
    return given["on_restart"]


REPORT = RestartReport(
    iteration=3, cause="rank 1 died", lost_slots=(1,), active_world_size=3, world_size=3, seconds=0.5
)
RECIPES = {
    "Weights & Biases": {"wandb": ["init()", "init().log()", "init().alert()"]},
    "MLflow": {"mlflow": ["MlflowClient()", "MlflowClient().log_metric()", "MlflowClient().set_tag()"]},
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_tell_rank_0_s_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were run against the real ones: wandb 0.31.0 offline, mlflow-skinny 3.17.2."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    monkeypatch.setenv("MLFLOW_RUN_ID", "run7")
    [(module, calls)] = RECIPES[name].items()
    service = Mock()
    tell = recipe(name, {"os": os, module: service})
    monkeypatch.setenv("RANK", "None")
    tell(REPORT)
    assert not service.mock_calls
    monkeypatch.setenv("RANK", "0")
    tell(REPORT)
    assert [f"{call[0]}()" for call in service.mock_calls] == calls
    assert str(REPORT) in str(service.mock_calls[-1])


def test_recipe_for_slack_posts_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    posted: queue.Queue[Any] = queue.Queue()

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        server.timeout = 60.0
        monkeypatch.setenv("SLACK_WEBHOOK", f"http://127.0.0.1:{server.server_port}/")
        given = {"json": json, "os": os, "threading": threading, "urllib": urllib}
        recipe("Slack", given)(REPORT)
        server.handle_request()
    assert posted.get(timeout=60.0) == {"text": str(REPORT)}


# The page on testing: its files are written, its commands are run, and print what it says ------------------

TESTING = (DOCS / "testing.md").read_text()
SECTIONS = [section for section in re.split(r"^## ", TESTING, flags=re.MULTILINE) if "```console" in section]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Which seed fails and how many steps it takes changes with the protocol; that it fails so does not.
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
LONG = ("A rank assignment", "Faults in real processes", "A store that fails")
NIGHTLY = pytest.mark.nightly("other sections run always")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "section",
    [
        pytest.param(
            section, marks=NIGHTLY if section.startswith(LONG) else [], id=section.partition("\n")[0]
        )
        for section in SECTIONS
    ],
)
def test_page_on_testing_prints_what_it_says(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCK.findall(section):
        if kind == "python":
            write(tmp_path, text)
            continue
        command, _, wanted = text.removeprefix("$ ").partition("\n")
        printed = run(command, tmp_path, monkeypatch)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        same = doctest.OutputChecker().check_output(NUMBER.sub("0", wanted), NUMBER.sub("0", printed), flags)
        assert same, f"{command} prints\n{printed}\nand docs/testing.md says\n{wanted}"
    for path in tmp_path.glob("test_*.py"):
        if f"pytest -q {path.name}" not in section:
            run(f"python {path.name}", tmp_path, monkeypatch)


def write(folder: Path, text: str) -> None:
    """Writes the file that a block shows, named in its first line; a continued one replaces definitions."""
    header, _, code = text.partition("\n")
    name, _, continued = header.removeprefix("# ").partition(", ")
    path = folder / name
    if continued:
        before = path.read_text()
        definition = re.match(r"(?:class|def) \w+", code)
        assert definition is not None
        old = re.search(rf"^{definition[0]}\b.*?(?=^\S|\Z)", before, re.MULTILINE | re.DOTALL)
        assert old is not None, f"{name} has no {definition[0]}"
        code = before.replace(old[0], f"{code}\n\n")
    path.write_text(code)


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints to its standard output. Python runs in this process, which has torch already."""
    words = shlex.split(command)
    if words[0] != "python":
        return run_elsewhere(words, folder)
    with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "dont_write_bytecode", True)
        before = set(sys.modules)
        try:
            if words[1] == "-m":
                importlib.import_module(f"{words[2]}.__main__").main(words[3:])
            else:
                defined = runpy.run_path(words[1], run_name="__main__")
                for name in defined:
                    if name.startswith("test_"):
                        defined[name]()
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
    return printed.getvalue()


def run_elsewhere(words: list[str], folder: Path) -> str:
    """The same for a program, with variables before it."""
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    program, *arguments = words[len(variables) :]
    module = {"ftrun": "ft_wrapper.run", "pytest": "pytest"}[program]
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}, **variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
        check=True,
    ).stdout
