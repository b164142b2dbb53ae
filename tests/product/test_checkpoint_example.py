"""FSDP2 with torch.distributed.checkpoint ends with the same weights, whatever happens on the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_examples import EXAMPLES, FTRUN, run, script_with_faults, without_faults  # noqa: F401

from ft_wrapper import events
from ft_wrapper.checkpoints import folders
from ft_wrapper.testing.inject_fault import ENV, parse_faults

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.nightly("training with checkpoints goes through faults in test_examples.py always"),
]

# "In a save": this rank has written its part, and has not told the others.
TRAINS = """
from torch.distributed.checkpoint import FileSystemWriter
from ft_wrapper.checkpoints.folders import step_of

write = FileSystemWriter.write_data

def faulty_write(self, plan, planner):
    written = write(self, plan, planner)
    written.wait()
    injector.check("atomic", rank=example.dist.get_rank(), step=step_of(self.path))
    return written

FileSystemWriter.write_data = faulty_write
arguments = argparse.Namespace(folder={folder!r}, steps=14, every=4, asynchronous={asynchronous})
digest = example.train(arguments)
if digest is not None:
    print(f"final weights sha256 {{digest}}")
"""
FINAL = re.compile(r"^final weights sha256 [0-9a-f]{64}$", re.MULTILINE)
OPTIONS = ("--nproc-per-node", 4, "--active-world-size", 3)
# In a save by the step's number, counted from 1.
FAULTS = "exception:rank=1:step=6,sigkill:rank=2:step=8:where=atomic,sigkill:rank=0:step=10"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example ends with, as it says that it is run; and again, when nothing is left to do."""
    path, folder = EXAMPLES / "fsdp2_dcp.py", tmp_path_factory.mktemp("clean") / "checkpoints"
    assert (
        f"ftrun {' '.join(map(str, OPTIONS))} examples/fsdp2_dcp.py checkpoints --async" in path.read_text()
    )
    arguments = (folder, "--steps", 14, "--every", 4)
    first, again = (run(*FTRUN, *OPTIONS, path, *arguments, *more) for more in ((), ("--async",)))
    assert (first.returncode, again.returncode) == (0, 0), first.stdout + again.stdout
    (final,) = FINAL.findall(first.stdout)
    assert FINAL.findall(again.stdout) == [final]
    return final


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_fsdp2_ends_with_the_same_weights_whatever_happens(
    tmp_path: Path, clean: str, asynchronous: bool
) -> None:
    folder, path = tmp_path / "checkpoints", str(tmp_path / "events")
    trains = TRAINS.format(folder=str(folder), asynchronous=asynchronous)
    script = script_with_faults(tmp_path, "fsdp2_dcp", trains)
    done = run(*FTRUN, *OPTIONS, script, **{ENV: FAULTS, events.ENV: path})
    assert done.returncode == 0, done.stdout
    assert FINAL.findall(done.stdout) == [clean]
    sealed = folders.look(folder).sealed
    assert sealed[0].step == 14 and len(sealed) == 3, done.stdout
    records = events.load(path)
    assert len([r for r in records if r["event"] == "inject"]) == len(parse_faults(FAULTS))
    # An asynchronous save may still be on when the next rank is killed.
    iterations = {record["iteration"] for record in records if record["event"] == "enter"}
    assert iterations >= set(range(3 if asynchronous else 4))
