"""FSDP2 with torch.distributed.checkpoint ends with the same weights, whatever happens on the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_examples import EXAMPLES, FTRUN, run, without_faults  # noqa: F401

from ft_wrapper import events
from ft_wrapper.checkpoints import folders
from ft_wrapper.testing.inject_fault import ENV, parse_faults

pytestmark = pytest.mark.timeout(600)

# "In a save": this rank has written its part, and has not told the others.
WITH_FAULTS = f"""
import argparse, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import fsdp2_dcp as example
from torch.distributed.checkpoint import FileSystemWriter
from ft_wrapper.checkpoints.folders import step_of
from ft_wrapper.testing.inject_fault import Injector

injector, batch, write = Injector.from_env({{fired!r}}), example.batch, FileSystemWriter.write_data

def faulty_batch(step):
    injector.check("step", rank=example.dist.get_rank(), step=step)
    return batch(step)

def faulty_write(self, plan, planner):
    written = write(self, plan, planner)
    written.wait()
    injector.check("atomic", rank=example.dist.get_rank(), step=step_of(self.path))
    return written

example.batch, FileSystemWriter.write_data = faulty_batch, faulty_write
arguments = argparse.Namespace(folder={{folder!r}}, steps=14, every=4, asynchronous={{asynchronous}})
digest = example.train(arguments)
if digest is not None:
    print(f"final weights sha256 {{{{digest}}}}")
"""
FINAL = re.compile(r"^final weights sha256 [0-9a-f]{64}$", re.MULTILINE)


def train(path: Path, faults: str, *, asynchronous: bool) -> tuple[str, list[dict[str, object]]]:
    """Trains on 3 ranks with a spare; returns what it ends with, and what happened."""
    path.mkdir()
    script, folder = path / "train.py", path / "checkpoints"
    script.write_text(
        WITH_FAULTS.format(fired=str(path / "fired"), folder=str(folder), asynchronous=asynchronous)
    )
    done = run(
        *FTRUN,
        *("--nproc-per-node", 4, "--active-world-size", 3, "--max-rank-restarts", 0, script),
        **{ENV: faults, events.ENV: str(path / "events")},
    )
    assert done.returncode == 0, done.stdout
    found = folders.look(folder)
    assert found.sealed[0].step == 14, done.stdout
    assert len(found.sealed) == 3
    (final,) = FINAL.findall(done.stdout)
    return final, events.load(str(path / "events"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run without faults ends with."""
    return train(tmp_path_factory.mktemp("clean") / "run", "", asynchronous=False)[0]


@pytest.mark.nightly("training with checkpoints goes through faults in test_examples.py always")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_fsdp2_ends_with_the_same_weights_whatever_happens(
    tmp_path: Path, clean: str, asynchronous: bool
) -> None:
    for number, faults in enumerate(
        (
            "exception:rank=1:step=6,sigkill:rank=0:step=10",
            "sigkill:rank=2:step=8:where=atomic",  # of the step's number, counted from 1
        )
    ):
        faulty, records = train(tmp_path / f"faulty{number}", faults, asynchronous=asynchronous)
        assert len([r for r in records if r["event"] == "inject"]) == len(parse_faults(faults))
        iterations = {r["iteration"] for r in records if r["event"] == "enter"}
        assert iterations == set(range(1 + len(parse_faults(faults))))
        assert faulty == clean


@pytest.mark.nightly("its job goes through faults above")
def test_the_example_runs_as_it_says(tmp_path: Path) -> None:
    text = (EXAMPLES / "fsdp2_dcp.py").read_text()
    options = ("--nproc-per-node", 4, "--active-world-size", 3)
    assert f"ftrun {' '.join(map(str, options))} examples/fsdp2_dcp.py checkpoints --async" in text
    arguments = (tmp_path / "checkpoints", "--steps", 6, "--every", 2)
    first = run(*FTRUN, *options, EXAMPLES / "fsdp2_dcp.py", *arguments)
    again = run(*FTRUN, *options, EXAMPLES / "fsdp2_dcp.py", *arguments, "--async")  # nothing is left to do
    assert (first.returncode, again.returncode) == (0, 0), first.stdout + again.stdout
    assert FINAL.findall(first.stdout) == FINAL.findall(again.stdout) != []
