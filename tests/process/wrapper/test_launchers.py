"""Wrapped scripts under torchrun, on the store that it shares."""

from __future__ import annotations

import json
from pathlib import Path

from rank_harness import TIMEOUT
from support.warm_ftrun import run_python

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from ft_wrapper import CallWrapper, Wrapper

@Wrapper(rejoin=True)
def train(call_wrapper: CallWrapper):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if call_wrapper.state.iteration == 0 and os.environ["RANK"] == "1":
        raise ValueError("once")
    dist.all_reduce(total)
    return [call_wrapper.iteration, os.environ["RANK"], total.item()]

results = [train(), train()]
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as out:
    json.dump(results, out)
"""


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    done = run_python([*command, script, tmp_path], TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        # The second call goes on in torchrun's store: its numbers follow the first ones.
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results == [[1, str(rank), 4.0], [2, str(rank), 4.0]]
    assert "restart 1: rank 1 (slot 1 on" in done.stderr
