"""Stock torchrun on our rendezvous, ``--rdzv-backend=ft``; and ftrun on torch's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nightly import at_night
from support.warm_ftrun import start_python

from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.testing import EtcdServer

TIMEOUT = 120.0
# A plain script; one worker of the first round fails.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

out = Path(sys.argv[1])
first = not (out / "failed").exists()  # that is written when both have come this far
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
name = f"{dist.get_rank()}of{dist.get_world_size()}"
record = {"name": name, "total": total.item(), "port": os.environ["MASTER_PORT"]}
path = out / f"{name}-{os.getpid()}.part"
path.write_text(json.dumps(record))
path.rename(path.with_suffix(".json"))
if first and dist.get_rank() == 1:
    (out / "failed").touch()
    sys.exit(3)
if first:
    time.sleep(1000)  # until it is ended
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that was free just now, and is kept from others who ask for a free one."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))  # not listening: an agent may, and who asks for any port gets another one
        yield holder.getsockname()[1]


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that a test has started; none goes on after it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for agent in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        ("ft_wrapper.run", "c10d"),
        *at_night(
            "nodes meet on our rendezvous always", [("torch.distributed.run", b) for b in ("ft", "ft-etcd")]
        ),
    ],
)
def test_failed_worker_is_a_restart_in_a_fresh_store(
    tmp_path: Path,
    port: int,
    etcd: EtcdServer,
    agents: list[subprocess.Popen[str]],
    program: str,
    backend: str,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    endpoint = etcd.endpoints.split(",")[0] if backend == "ft-etcd" else f"localhost:{port}"
    words = f"-m {program} --nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-id job"
    words += f" --rdzv-backend {backend} --rdzv-endpoint {endpoint}"
    words += " --rdzv-conf last_call_timeout=1,join_timeout=60"
    command = [*words.split(), tmp_path / "script.py", tmp_path]
    for _ in range(2):
        agents.append(start_python(command, stderr=subprocess.STDOUT, start_new_session=True))
    said = "\n".join(agent.communicate(timeout=TIMEOUT)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(record["name"] for record in found) == ["0of2", "0of2", "1of2", "1of2"]
    assert all(record["total"] == 2.0 for record in found)
    assert len({record["port"] for record in found}) == 2
    assert "Exception while registering" not in said
    with contextlib.closing(etcd.get_client()) as client:
        assert client.read(Range.prefix(b"ft_wrapper/job/")) == ()
