"""A wrapped program that a rank starts: it is not the rank, whatever it has inherited."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rank_harness import TIMEOUT
from support.warm_ftrun import run_python

INNER = """
import json, os, sys
from ft_wrapper import CallWrapper, Wrapper

@Wrapper(rejoin=True)
def train(call_wrapper: CallWrapper):  # the same name as the outer one's
    return [call_wrapper.state.world_size, call_wrapper.iteration]

print("inner " + json.dumps(train()), flush=True)  # two strings are two writes: launchers say "python -u"
"""

OUTER = """
import json, os, subprocess, sys
from ft_wrapper import CallWrapper, Wrapper
import torch.distributed as dist

when, command = sys.argv[1], json.loads(sys.argv[2])
removed = json.loads(sys.argv[3])
runs = []

def evaluate():
    if os.environ["RANK"] == "0":
        environment = {name: value for name, value in os.environ.items() if name not in removed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        runs.append([done.returncode, done.stdout, done.stderr])

@Wrapper(rejoin=True, soft_timeout=100, hard_timeout=110)
def train(call_wrapper: CallWrapper):
    dist.init_process_group("gloo")
    if when == "in it":
        evaluate()
    dist.barrier()
    return [os.environ["RANK"], call_wrapper.iteration]

if when == "before":
    evaluate()
result = train()
if when == "after":
    evaluate()
with open(f"{os.environ['RANK']}.json", "w") as out:
    is_marked = os.environ["FT_WRAPPER_PROCESS"].split()[0] == str(os.getpid())
    json.dump([result, is_marked, runs], out)
"""

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
LAUNCHERS = {
    "ftrun": ["-m", "ft_wrapper.run", "--nproc-per-node", "2"],
    "torchrun": TORCHRUN,
}


def run(
    folder: Path, outer: str, when: str, command: list[str], removed: list[str] | None = None
) -> list[str]:
    """What the rank's subprocess did, whose outer job ended as without it."""
    (folder / "outer.py").write_text(OUTER)
    (folder / "inner.py").write_text(INNER)
    words = [when, json.dumps([sys.executable, *command]), json.dumps(removed or [])]
    done = run_python([*LAUNCHERS[outer], "outer.py", *words], TIMEOUT, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    ends = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [end[0] for end in ends] == [["0", 0], ["1", 0]], said
    assert [end[1] for end in ends] == [True, True], "what it starts after the call is not the rank either"
    assert "restart 1" not in said
    (inner,) = ends[0][2]
    return inner


ALWAYS = [("ftrun", "torchrun", "in it"), ("ftrun", "torchrun", "after"), ("torchrun", "ftrun", "in it")]
ALL = [(o, i, when) for o in LAUNCHERS for i in LAUNCHERS for when in ("before", "in it", "after")]


@pytest.mark.parametrize(
    ("outer", "inner", "when"),
    [
        *ALWAYS,
        *(
            pytest.param(*each, marks=pytest.mark.nightly("three of the twelve run always"))
            for each in ALL
            if each not in ALWAYS
        ),
    ],
)
def test_a_job_that_a_rank_launches_is_a_job_of_its_own(
    tmp_path: Path, outer: str, inner: str, when: str
) -> None:
    code, said, errors = run(tmp_path, outer, when, [*LAUNCHERS[inner], "inner.py"])
    assert code == 0, errors
    assert said.count("inner [2, 0]") == 2, said


@pytest.mark.parametrize("when", ["in it", "after"])
@pytest.mark.parametrize("outer", LAUNCHERS)
def test_a_process_that_has_inherited_a_ranks_environment_is_refused(
    tmp_path: Path, outer: str, when: str
) -> None:
    code, said, errors = run(tmp_path, outer, when, ["inner.py"])
    assert (code, said) == (1, "")
    assert "ValueError: this process has inherited the environment of rank 0, process " in errors


@pytest.mark.parametrize("outer", LAUNCHERS)
def test_without_rank_and_world_size_it_runs_alone(tmp_path: Path, outer: str) -> None:
    removed = ["RANK", "WORLD_SIZE"]
    code, said, errors = run(tmp_path, outer, "in it", ["inner.py"], removed)
    assert (code, said) == (0, "inner [1, 0]\n"), errors
