"""Stock torchrun on our rendezvous: ``--rdzv-backend=ft``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.warm_ftrun import start_python

from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.testing import EtcdServer

ROOT = Path(__file__).parents[3]
TIMEOUT = 120.0

# A plain script. "fail once": one worker of the first round fails.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

out, mode = Path(sys.argv[1]), sys.argv[2]
first = not (out / "failed").exists()  # that is written when both have come this far
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank, size = dist.get_rank(), dist.get_world_size()
name = f"{rank}of{size}-{os.getpid()}.json"
record = {"total": total.item(), "port": os.environ["MASTER_PORT"]}
(out / f".{name}").write_text(json.dumps(record))
(out / f".{name}").rename(out / name)
if mode == "fail once" and first and rank == 1:
    (out / "failed").touch()
    sys.exit(3)
if mode == "fail once" and first:
    time.sleep(1000)  # until it is ended
dist.barrier()
dist.destroy_process_group()
"""


def entry_points() -> str:
    """Those of pyproject.toml, so that the test does not depend on when the package was installed."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."torchrun\.handlers"\]\n((?:\S.*\n)+)', text)
    assert found is not None
    return "[torchrun.handlers]\n" + found[1].replace('"', "")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a torchrun; kills what is left in the end."""
    info = tmp_path / "site" / "ft_wrapper_for_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ft_wrapper_for_test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points())
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    started: list[subprocess.Popen[str]] = []

    def start(
        port: int,
        nnodes: str,
        mode: str,
        *options: str,
        conf: str = "",
        program: str = "torch.distributed.run",
        backend: str = "ft",
        script: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        command = ["-m", program, "--nnodes", nnodes, "--nproc-per-node", "1"]
        command += ["--rdzv-backend", backend, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
        command += ["--rdzv-conf", f"last_call_timeout=1,join_timeout=60{conf}", *options]
        command += script or [str(tmp_path / "script.py"), str(tmp_path / "out"), mode]
        process = start_python(
            command,
            environment={"LOGLEVEL": "INFO"},
            stderr=subprocess.STDOUT,
            start_new_session=True,
            path=[str(ROOT), str(info.parent)],
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def port() -> Iterator[int]:
    """A port that was free just now, and is kept from others who ask for a free one."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))  # not listening: an agent may, and who asks for any port gets another one
        yield holder.getsockname()[1]


def outputs(*agents: subprocess.Popen[str]) -> list[str]:
    """Waits for the ends of agents; what each has said, also where one does not end."""
    said, late = [], []
    for agent in agents:
        try:
            said.append(agent.communicate(timeout=TIMEOUT)[0])
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
            said.append(agent.communicate()[0])
            late.append(said[-1])
    assert not late, "an agent has not ended:\n" + "\n---\n".join(said)
    return said


def records(tmp_path: Path) -> list[dict[str, str]]:
    return [
        {"name": path.name.split("-")[0], **json.loads(path.read_text())}
        for path in sorted((tmp_path / "out").glob("[0-9]*.json"))
    ]


@pytest.mark.nightly("the others of torchrun's agent run always")
def test_failed_worker_is_a_restart_in_a_fresh_store(
    tmp_path: Path, launch: Callable[..., subprocess.Popen[str]], port: int
) -> None:
    agents = [launch(port, "2", "fail once", "--max-restarts", "1") for _ in range(2)]
    said = outputs(*agents)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    found = records(tmp_path)
    assert sorted(record["name"] for record in found) == ["0of2", "0of2", "1of2", "1of2"]
    assert all(record["total"] == 2.0 for record in found)
    assert len({record["port"] for record in found}) == 2
    assert "Exception while registering" not in said[0]


@pytest.mark.nightly("torchrun meets in etcd in tests/process/agent/test_elastic.py")
def test_the_same_on_etcd(
    tmp_path: Path, launch: Callable[..., subprocess.Popen[str]], etcd: EtcdServer
) -> None:
    port = int(etcd.endpoints.split(",")[0].rpartition(":")[2])
    options = ("--max-restarts", "1")
    agents = [launch(port, "2", "fail once", *options, backend="ft-etcd") for _ in range(2)]
    said = outputs(*agents)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert sorted(record["name"] for record in records(tmp_path)) == ["0of2", "0of2", "1of2", "1of2"]
    with contextlib.closing(etcd.get_client()) as client:
        assert client.read(Range.prefix(b"ft_wrapper/job/")) == ()


def test_bad_option_is_named(launch: Callable[..., subprocess.Popen[str]], port: int) -> None:
    agent = launch(port, "1", "plain", conf=",joint_timeout=3")
    said, _ = agent.communicate(timeout=TIMEOUT)
    assert agent.returncode == 1
    assert "did you mean join_timeout?" in said


# The wrapped example -----------------------------------------------------------------------------------


def training(folder: Path) -> list[str]:
    options = ["--steps", "12", "--checkpoint-every", "4", "--checkpoint-dir", str(folder)]
    return [str(ROOT / "examples" / "train_lm.py"), *options]


def final_weights(agents: Sequence[subprocess.Popen[str]]) -> str:
    said = "\n".join(outputs(*agents))
    assert [agent.returncode for agent in agents] == [0] * len(agents), said
    (found,) = re.findall(r"final weights (sha256 .*)", said)
    return str(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of two ranks on one node."""
    command = ["-m", "ft_wrapper.run", "--nproc-per-node", "2"]
    command += training(tmp_path_factory.mktemp("alone"))
    with start_python(command, stderr=subprocess.STDOUT) as process:
        return final_weights([process])


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        pytest.param(
            *("torch.distributed.run", "ft"),
            marks=pytest.mark.nightly("two of torchrun's agents restart a worker above always"),
        ),
        ("ft_wrapper.run", "c10d"),
    ],
    ids=["torchrun on our rendezvous", "ftrun on torch's"],
)
def test_two_agents_train_the_example_to_its_end(
    tmp_path: Path,
    launch: Callable[..., subprocess.Popen[str]],
    port: int,
    alone: str,
    program: str,
    backend: str,
) -> None:
    # One fault on the way: an exception, which costs a restart of the function and no process.
    script = [*training(tmp_path / "checkpoints"), "--faults", "exception:rank=1:step=6"]
    agents = [launch(port, "2", "", program=program, backend=backend, script=script) for _ in range(2)]
    assert final_weights(agents) == alone
    assert len(list((tmp_path / "checkpoints" / "faults").iterdir())) == 1
