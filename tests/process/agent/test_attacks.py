"""Somebody without rights at a job's store: nothing of theirs is run, and the job goes on."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import stranger
from agent_job import FtRun
from support.nightly import at_night
from support.warm_ftrun import run_python
from test_network import PORT, Network
from test_network import network as network  # two hosts of a job, and one that is none of its own

HERE = Path(__file__).parent
TIMEOUT = 60.0
UNDISTURBED = "1"  # the iteration in which the job ends: rank 1 raises once
SILENT = {"by_command", "ask_the_agent", "connect_to_ranks", "race_for_gloo"}
"""Attacks that write nothing which a job reads that goes on."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")


ALL = ",".join(name for name in stranger.ATTACKS if name not in ("stop", "race_for_gloo"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One into which anybody may write: so only the job's own checks keep from it what a stranger has run."""
    tmp_path.chmod(0o777)
    return tmp_path


def attack(
    names: str, folder: Path, nodes: Sequence[FtRun], own: str, at: str = "", before: Sequence[str] = ()
) -> str:
    """Attacks a job that is half through, and waits for its end; returns what it has said."""
    go_on = folder / "go_on"
    os.mkfifo(go_on)
    nodes[0].await_file(folder / "half")
    found = re.search(r"ftrun status (\S+)", "\n".join(node.said for node in nodes))
    assert found is not None
    host, _, port = (at or found[1]).rpartition(":")
    words = [str(HERE / "stranger.py"), own, host, port, names, str(folder)]
    if before:
        command = [*before, sys.executable, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    else:
        done = run_python(words, TIMEOUT)
    with go_on.open("r+b", buffering=0):
        said = "\n".join(f"{node.end()}\n{node.said}" for node in nodes)
    assert "received 0" in done.stdout, done.stderr
    assert not (folder / "ran_code").exists()
    ended = re.findall(r"rank (\d) done in iteration (\d+)", said)
    assert sorted(ended) == [("0", UNDISTURBED), ("1", UNDISTURBED)], said
    assert " 0 steps lost" in said, said
    return said


@pytest.mark.parametrize("names", [ALL, *at_night("all others run always", ["race_for_gloo"])])
def test_another_user_of_the_host(names: str, folder: Path) -> None:
    script = str(HERE / "attacked_rank.py"), str(folder)
    with FtRun(folder / "job", "--nproc-per-node", "2", *script) as job:
        said = attack(names, folder, [job], "127.0.0.1")
    assert ("was not written with this job's secret" in said) != SILENT.issuperset(names.split(",")), said


@pytest.mark.nightly("another user of the host attacks always")
@pytest.mark.parametrize("names", ["stop", "own_store,connect_to_ranks"])
def test_another_host(names: str, folder: Path, network: Network) -> None:
    rendezvous = "--nnodes", "2", "--rdzv-endpoint", f"{network.address(0)}:{PORT}", "--rdzv-id", "job"
    (folder / "secret").write_text("a secret of this job alone")
    with contextlib.ExitStack() as running:
        nodes = [
            running.enter_context(
                FtRun(
                    folder / f"node{host}",
                    *rendezvous,
                    *("--local-addr", network.address(host), "--job-secret-file", str(folder / "secret")),
                    *(str(HERE / "attacked_rank.py"), str(folder)),
                    before=network.command(host),
                    environment={"GLOO_SOCKET_IFNAME": "eth0"},
                )
            )
            for host in range(2)
        ]
        at = rendezvous[3] if names == "stop" else ""
        said = attack(names, folder, nodes, network.address(2), at, network.command(2))
    assert ("was not written with this job's secret" in said) == (names not in SILENT), said
