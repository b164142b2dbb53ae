"""A wrapped program that a rank starts: it is not the rank, whatever it has inherited."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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

runs = {}

def evaluate(when):
    if os.environ["RANK"] == "0":
        for what, (command, removed) in json.loads(sys.argv[1]).get(when, {}).items():
            environment = {name: value for name, value in os.environ.items() if name not in removed}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
            runs[f"{what} {when}"] = [done.returncode, done.stdout, done.stderr]

@Wrapper(rejoin=True, soft_timeout=100, hard_timeout=110)
def train(call_wrapper: CallWrapper):
    dist.init_process_group("gloo")
    evaluate("in it")
    dist.barrier()
    return [os.environ["RANK"], call_wrapper.iteration]

result = train()
evaluate("after it")
with open(f"{os.environ['RANK']}.json", "w") as out:
    is_marked = os.environ["FT_WRAPPER_PROCESS"].split()[0] == str(os.getpid())
    json.dump([result, is_marked, runs], out)
"""

INNER_COMMAND = [sys.executable, "inner.py"]
TWO = ["--nproc-per-node", "2"]


def test_what_a_rank_starts_is_not_the_rank(tmp_path: Path) -> None:
    """A job that it launches is a job of its own; a program with a rank's environment is refused."""
    launched = [[sys.executable, "-m", "torch.distributed.run", *TWO, "--standalone", "inner.py"], []]
    commands: dict[str, dict[str, Any]] = {
        "in it": {"launched": launched, "alone": [INNER_COMMAND, ["RANK", "WORLD_SIZE"]]},
        "after it": {"refused": [INNER_COMMAND, []]},
    }
    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text(INNER)
    words = ["-m", "ft_wrapper.run", *TWO, "outer.py", json.dumps(commands)]
    done = run_python(words, 2 * TIMEOUT, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    ends = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [end[0] for end in ends] == [["0", 0], ["1", 0]], said
    assert [end[1] for end in ends] == [True, True], "what it starts after the call is not the rank either"
    assert "restart 1" not in said
    runs = ends[0][2]
    for what, (code, out, errors) in runs.items():
        if what.startswith("launched"):
            assert code == 0 and out.count("inner [2, 0]") == 2, out + errors
        if what.startswith("alone"):
            assert (code, out) == (0, "inner [1, 0]\n"), errors
        if what.startswith("refused"):
            assert (code, out) == (1, "")
            assert "ValueError: this process has inherited the environment of rank 0, process " in errors
    assert len(runs) == sum(map(len, commands.values()))
