"""Starts a job of two ranks under ftrun for each option of torchrun, in each way to say it.

    python tests/process/agent/start_every_option.py [--torchrun run.py ...] [--python PYTHON]

A file of ``--torchrun`` is that of another version of torch: its options are started, too. Each job reduces a
number over its ranks by gloo. Prints a table: how each form ended, and what ftrun said of the option.
Exits with 1 if a job did not do its work.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from option_forms import END, Form, forms, options
from torch.distributed.run import get_args_parser

from ft_wrapper.testing.etcd_server import free_port

TIMEOUT = 300.0  # seconds for a job
ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """#!{python}
import os
import pathlib

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    done = pathlib.Path(os.environ["DONE"])
    (done / f"{{dist.get_rank()}} of {{int(total)}}").touch()
    dist.destroy_process_group()
"""
SPECS = "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the job of a form ended.

    Args:
        form: how the option was given.
        works: whether both ranks did their work, and ftrun ended with 0.
        said: what ftrun said of the option.
        output: all that was written.
    """

    form: Form
    works: bool
    said: tuple[str, ...]
    output: str


class Jobs:
    """Starts jobs in a folder of their own.

    Args:
        folder: for all files.
        python: the Python that runs ftrun.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self._folder = folder
        self._python = python
        self._script = folder / "two_ranks.py"
        self._script.write_text(SCRIPT.format(python=python))
        self._script.chmod(0o755)
        (folder / "own_specs.py").write_text(SPECS)
        info = folder / "own_specs-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own_specs\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nown = own_specs:DefaultLogsSpecs\n")

    def run(self, form: Form) -> Outcome:
        """Runs a job to its end."""
        with tempfile.TemporaryDirectory(dir=self._folder) as done:
            ranks = () if form.dest == "nproc_per_node" else ("--nproc-per-node", "2")
            script = self._script.stem if form.dest == "module" else str(self._script)
            code, output = self._ftrun(*ranks, *form.arguments, script, DONE=done, **dict(form.environment))
            works = code == 0 and sorted(os.listdir(done)) == ["0 of 2", "1 of 2"]
        said = tuple(line for line in output.splitlines() if "ftrun: " in line and form.option in line)
        return Outcome(form, works, said, output)

    def ends(self, option: argparse.Action) -> Outcome:
        """Gives an option that prints something and ends ftrun."""
        name = max(option.option_strings, key=len)
        value = () if option.nargs == 0 else ("bash",)
        form = Form(name, option.dest, "long", (name, *value))
        code, output = self._ftrun(*form.arguments, str(self._script))
        has_shtab = "pip install shtab" not in output
        return Outcome(form, code == (0 if has_shtab else 2) and "ftrun" in output, (), output)

    def _ftrun(self, *arguments: str, **variables: str) -> tuple[int, str]:
        path = os.pathsep.join((str(ROOT), str(self._folder)))
        own = {"PYTHONPATH": path, "TMPDIR": str(self._folder), **variables}
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            try:
                code = subprocess.run(
                    [self._python, "-m", "ft_wrapper.run", *arguments],
                    env={**os.environ, **own},
                    cwd=self._folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            output.seek(0)
            return code, output.read()


def parser_of(path: str) -> argparse.ArgumentParser:
    """Gets the parser of another version of torchrun.

    Args:
        path: its ``torch/distributed/run.py``.
    """
    spec = importlib.util.spec_from_file_location("another_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser: argparse.ArgumentParser = module.get_args_parser()
    return parser


def main() -> int:
    """Starts all of them, one after the other."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--torchrun", nargs="*", default=[], help="run.py of other versions of torch")
    arguments.add_argument("--python", default=sys.executable, help="the Python that runs ftrun")
    given = arguments.parse_args()
    parsers = [get_args_parser(), *map(parser_of, given.torchrun)]
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(Path(folder), given.python)
        for form in forms(*parsers, log_dir=Path(folder) / "logs", master_port=free_port()):
            outcomes.append(jobs.run(form))
            print(".", end="" if outcomes[-1].works else f"{outcomes[-1]}\n", file=sys.stderr, flush=True)
        outcomes += [jobs.ends(action) for action in options(*parsers) if action.dest in END]
    print(table(outcomes))
    started = sum(outcome.works for outcome in outcomes)
    seconds = time.monotonic() - began
    count = len({outcome.form.option for outcome in outcomes})
    print(f"\n{count} options, {len(outcomes)} forms: {started} do their work ({seconds:.0f} s)")
    for outcome in outcomes:
        if not outcome.works:
            print(f"\n{outcome.form}\n{outcome.output}")
    return 0 if started == len(outcomes) else 1


def table(outcomes: list[Outcome]) -> str:
    """All outcomes, an option a row.

    Args:
        outcomes: in any order.
    """
    rows = ["| option | long | abbreviated | PET_ | ftrun says |", "| --- | --- | --- | --- | --- |"]
    for option in dict.fromkeys(outcome.form.option for outcome in outcomes):
        its = {outcome.form.how: outcome for outcome in outcomes if outcome.form.option == option}
        cells = [f"`{option}`"]
        for how in ("long", "abbreviated", "variable"):
            if how not in its:
                cells.append("-")
                continue
            given = its[how].form.arguments[:1] if how == "abbreviated" else ()
            cells.append(" ".join(("works" if its[how].works else "FAILS", *(f"`{text}`" for text in given))))
        cells.append(" ".join(dict.fromkeys(line for outcome in its.values() for line in outcome.said)))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
