"""Wrapped scripts under torchrun: on the store that it shares, and on one of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_harness import TIMEOUT
from support.warm_ftrun import run_python

from ft_wrapper.testing.etcd_server import free_port

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from ft_wrapper import CallWrapper, Wrapper

# torchrun chose MASTER_PORT; the port behind it, where the store would be, may be anybody's.
own = {"store_kwargs": {"port": int(sys.argv[2])}} if sys.argv[2] != "0" else {}

@Wrapper(rejoin=True, **own)
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


@pytest.mark.parametrize(
    "share", [True, pytest.param(False, marks=pytest.mark.nightly("one that shares its store runs always"))]
)
def test_under_torchrun(tmp_path: Path, share: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {} if share else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += [str(script), str(tmp_path), "0" if share else str(free_port(consecutive=2))]
    done = run_python(command, TIMEOUT, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        # Where torchrun shares its store, the second call goes on in it: its numbers follow the first ones.
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results == [[1, str(rank), 4.0], [2 if share else 1, str(rank), 4.0]]
    assert "restart 1: rank 1 (slot 1 on" in done.stderr
