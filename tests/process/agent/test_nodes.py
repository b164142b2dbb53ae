"""Several ftruns, each one node of a job, on this machine."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import textwrap
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_job import TIMEOUT, FtRun, all_gone, await_that, lose
from support.warm_ftrun import RECONNECTS
from torch.distributed import PrefixStore

from ft_wrapper.cli import status
from ft_wrapper.cli.main import main
from ft_wrapper.rendezvous.register import agents_prefix, version_key
from ft_wrapper.store import TCPStore, TCPStoreServer, connect

# Silence of five seconds: on a busy machine no one who lives is silent for so long.
CONF = "last_call_timeout=0.2,keep_alive_interval=0.5,keep_alive_max_attempt=10,read_timeout=20"
LONG_CALL = CONF.replace("last_call_timeout=0.2", "last_call_timeout=60")

WRAPPED = """
    import json, os, sys, time
    from ft_wrapper import CallWrapper, Limits, Wrapper

    folder = sys.argv[1]
    found = dict(os.environ)  # the wrapper changes some of it

    @Wrapper(rejoin=True, heartbeat_timeout=60, limits=Limits(on_join="now", join_window=0.1))
    def train(call_wrapper: CallWrapper = None):
        state = call_wrapper.state
        # Renamed, so that anyone who sees it sees all of it.
        path = f"{folder}/in.{state.world_size}.{state.iteration}.{os.environ['RANK']}"
        with open(path + ".part", "w") as file:
            json.dump({**found, "pid": os.getpid(), "rank": state.rank, "iteration": state.iteration}, file)
        os.rename(path + ".part", path)
        while not os.path.exists(f"{folder}/finish"):
            time.sleep(0.02)

    train()
"""


class Cluster:
    """The nodes of a job, and what their ranks have written."""

    reconnects = "1"
    """How long a client may need to find a store again that was away."""

    def __init__(self, folder: Path, source: str, *, nnodes: str, nproc: int = 1) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.script = folder / "script.py"
        self.script.write_text(textwrap.dedent(source))
        self._options = ["--nnodes", nnodes, "--nproc-per-node", str(nproc)]
        self.arguments: list[str] = []  # of the script, beside the folder
        self._endpoint = ""
        self._conf = CONF
        self._exits = contextlib.ExitStack()
        self._count = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    @property
    def address(self) -> str:
        """What ``ftrun status`` calls it."""
        return self._endpoint

    def host_store(self) -> None:
        """Has the test itself host the rendezvous store, so that any node may die."""
        server = TCPStoreServer(0)
        self._exits.callback(server.close)
        self._endpoint = f"localhost:{server.port}"
        self._conf += ",is_host=false"

    def start(
        self,
        node_id: str,
        *options: str,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> FtRun:
        """Starts a node, with this id or none; the first one hosts the store, unless the test does."""
        self._count += 1
        node = FtRun(
            self.folder / f"node{node_id}.{self._count}",
            *self._options,
            *("--rdzv-endpoint", self._endpoint or "localhost:0", "--rdzv-conf", self._conf),
            *(("--node-id", node_id) if node_id else ()),
            *options,
            str(self.script),
            str(self.shared),
            *self.arguments,
            before=before,
            environment={RECONNECTS: self.reconnects, **(environment or {})},
        )
        self._exits.enter_context(node)
        if not self._endpoint:
            await_that(lambda: "hosting the rendezvous store at" in node.said, node)
            found = re.search(r"hosting the rendezvous store at (\S+:\d+)", node.said)
            assert found is not None
            self._endpoint = found[1]
        return node

    def await_word_of(self, node_id: str) -> None:
        """Waits for a node's word, in the first round, on how its ranks ended."""
        host, _, port = self._endpoint.rpartition(":")
        with contextlib.closing(TCPStore(host, int(port))) as store:
            agents = PrefixStore(agents_prefix(0), store.torch_store)
            agents.wait([f"end/{node_id}"], timedelta(seconds=TIMEOUT))

    def await_first(self) -> None:
        """Waits until the first node has said which options are the job's: others are compared with these."""
        store = connect(self._endpoint, timedelta(seconds=TIMEOUT))
        assert store.wait_for(version_key(1), TIMEOUT) is not None
        store.close()

    def inside(self, world_size: int, iteration: int | None = None) -> list[dict[str, Any]]:
        """What the ranks found that are in an iteration of so many ranks, once all of them are, by slot."""
        by_iteration: dict[int, list[Path]] = {}
        for path in self.shared.glob(f"in.{world_size}.*"):
            if not path.name.endswith(".part"):
                by_iteration.setdefault(int(path.name.split(".")[2]), []).append(path)
        for number, paths in sorted(by_iteration.items()):
            if len(paths) == world_size and iteration in (None, number):
                paths.sort(key=lambda path: int(path.name.split(".")[3]))
                return [json.loads(path.read_text()) for path in paths]
        return []

    def await_inside(self, world_size: int, *nodes: FtRun) -> list[dict[str, Any]]:
        """Waits until there is such an iteration; forgets it, and all before it."""
        await_that(lambda: bool(self.inside(world_size)), *nodes)
        found = self.inside(world_size)
        for path in self.shared.glob("in.*"):
            path.rename(path.with_name("was." + path.name))
        return found

    def finish(self, *nodes: FtRun) -> None:
        """Lets the ranks return, and sees that all of these nodes end well."""
        (self.shared / "finish").touch()
        for node in nodes:
            assert node.end() == 0, node.said


def pids_of(node: FtRun) -> dict[int, list[int]]:
    """The processes that each rank has had, by rank."""
    pids: dict[int, list[int]] = {}
    for record in node.events("rank_started"):
        pids.setdefault(record["rank"], []).append(record["child"])
    return pids


def places(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> list[tuple[str, str, list[int] | None, str]]:
    """What ``ftrun status`` says of the nodes: id, place, slots, address."""
    assert main(["status", cluster.address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == status.RUNNING
    return [(node["id"], node["place"], node["slots"], node["address"]) for node in found["nodes"]]


def told_states(node: FtRun) -> dict[str, int]:
    """What a node tells Prometheus of all nodes: how many are in each state."""
    found = re.search(r"the health endpoint is at 127\.0\.0\.1:(\d+)", node.said)
    assert found is not None, node.said
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=TIMEOUT) as answer:
        told = re.findall(r'^ft_wrapper_nodes{.*state="(\w+)"} (\d+)', answer.read().decode(), re.MULTILINE)
    return {state: int(count) for state, count in told if int(count)}


def test_nodes_come_are_lost_come_back_and_step_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "127.0.0.1:0")
    with Cluster(tmp_path, WRAPPED, nnodes="1:2", nproc=2) as cluster:
        cluster.host_store()
        options = ("--rdzv-id", "job7", "--rdzv-conf", cluster._conf.replace("=0.2", "=1"))
        a = cluster.start("a", *options)
        began = cluster.await_inside(2, a)
        await_that(lambda: "a job has formed" in a.said, a)
        b = cluster.start("b", *options)  # it enlarges the job
        grown = cluster.await_inside(4, a, b)
        late = grown[2]
        assert (late["RANK"], late["WORLD_SIZE"], late["FT_WRAPPER_FORMATION_SIZE"]) == ("2", "4", "2")

        lose(b)
        # Not by their heartbeats, of which a minute may be missing: by the agent that has taken the node out.
        left = cluster.await_inside(2, a)
        assert "no heartbeat from node b (localhost)" in a.said
        b = cluster.start("b", *options)
        back = cluster.await_inside(4, a, b)

        c = cluster.start("c", *options)
        await_that(lambda: "there is no seat for it now" in c.said, c)
        assert [place[:3] for place in places(cluster, capsys)] == [
            ("a", "seat", [0, 1]),
            ("b", "seat", [2, 3]),
            ("c", "spare", None),
        ]
        await_that(lambda: told_states(a) == {"active": 2, "spare": 1}, a)
        lose(b)
        replaced = cluster.await_inside(4, a, c)
        assert [place[0] for place in places(cluster, capsys)] == ["a", "c"]
        await_that(lambda: told_states(a) == {"active": 2}, a)
        for found in (grown, left, back, replaced):
            assert [rank["pid"] for rank in found[:2]] == [rank["pid"] for rank in began]
        assert [rank["RANK"] for rank in replaced] == ["0", "1", "2", "3"]
        assert list(pids_of(c)) == [2, 3] and [len(pids) for pids in pids_of(a).values()] == [1, 1]

        # With the store of the ranks, which is on the node of group rank 0, all have to begin again.
        b = cluster.start("b", *options)
        await_that(lambda: "there is no seat for it now" in b.said, b)
        lose(a)
        anew = cluster.await_inside(4, b, c)
        d = cluster.start("d", *options)
        await_that(lambda: "there is no seat for it now" in d.said, d)
        assert pids_of(d) == {}

        # A node that is ended says so.
        family = c.family()
        c.process.send_signal(signal.SIGTERM)
        assert c.end() == 128 + signal.SIGTERM, c.said
        assert all_gone(family, TIMEOUT) == []
        cluster.await_inside(4, b, d)
        assert "no heartbeat from node c" not in b.said + d.said
        cluster.finish(b, d)
    assert anew[0]["FT_WRAPPER_STORE"] != began[0]["FT_WRAPPER_STORE"]
    for rank, found in enumerate(anew):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": anew[0]["MASTER_PORT"],
            "TORCHELASTIC_RUN_ID": "job7",
            "TORCHELASTIC_RESTART_COUNT": "0",  # a change of membership is no restart
            "FT_WRAPPER_FORMATION_SIZE": "4",
            "FT_WRAPPER_STORE": f"localhost:{anew[0]['MASTER_PORT']}",
        }
        assert {name: found.get(name) for name in expected} == expected
        assert found["TORCHELASTIC_ERROR_FILE"].endswith(f"/{rank % 2}/error.json")


def test_the_rank_of_an_agent_that_is_frozen_stays_out_until_it_answers(tmp_path: Path) -> None:
    """Before, it was evicted, joined again with a heart that stood still, was evicted again …"""
    script = WRAPPED.replace("heartbeat_timeout=60", "heartbeat_timeout=3, heartbeat_interval=0.2")
    with Cluster(tmp_path, script, nnodes="1:2") as cluster:
        cluster.host_store()
        nodes = [cluster.start(number, "--rdzv-conf", LONG_CALL) for number in ("0", "1")]
        ranks = cluster.await_inside(2, *nodes)
        await_that(lambda: "a job has formed" in nodes[1].said, *nodes)
        agent = nodes[1].process
        agent.send_signal(signal.SIGSTOP)
        alone = cluster.await_inside(1, nodes[0])
        said = f"({agent.pid} on {socket.gethostname()}) hangs: the rank stays out until it answers"
        await_that(lambda: said in nodes[1].said, nodes[0])
        agent.send_signal(signal.SIGCONT)
        again = cluster.await_inside(2, *nodes)
        cluster.finish(*nodes)
    assert alone[0]["pid"] == ranks[0]["pid"] == again[0]["pid"]
    numbers = [found[0]["iteration"] for found in (ranks, alone, again)]
    assert numbers == [0, 1, 2], "it came back once, and not before"


def test_a_notice_waits_for_the_rendezvous_and_ends_no_node(tmp_path: Path) -> None:
    noting = """
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: open(f"{folder}/noted.{os.environ['RANK']}", "w").close())

    @Wrapper("""
    with Cluster(tmp_path, WRAPPED.replace("\n    @Wrapper(", noting), nnodes="2") as cluster:
        early = cluster.start("0")
        early.process.send_signal(signal.SIGUSR1)
        other = cluster.start("1")
        cluster.await_inside(2, early, other)
        await_that(lambda: "SIGUSR1: handed to " in early.said, early)
        assert "SIGUSR1: handed to " not in other.said
        for node in (early, other):
            node.process.send_signal(signal.SIGUSR1)
        await_that(
            lambda: all((cluster.shared / f"noted.{rank}").exists() for rank in range(2)), early, other
        )
        cluster.finish(early, other)


def test_a_signal_ends_the_wait_for_other_nodes(tmp_path: Path) -> None:
    with Cluster(tmp_path, WRAPPED, nnodes="2") as cluster:
        alone = cluster.start("0")
        family = alone.family()
        alone.process.send_signal(signal.SIGTERM)
        assert alone.end() == 128 + signal.SIGTERM, alone.said
        assert all_gone(family, TIMEOUT) == []
        assert "SIGTERM: this node leaves before the rendezvous is complete" in alone.said


# Bad input ---------------------------------------------------------------------------------------------


def test_the_port_belongs_to_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # knows nothing of stores
        endpoint = f"localhost:{listener.getsockname()[1]}"
        options = ["--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "read_timeout=1"]
        assert main([*options, "--no-python", "true"]) == 75
    said = capsys.readouterr().err
    assert said.startswith("ftrun: error: ") and "though a process listens there" in said


FAILS = """
    import os, sys, time
    from ft_wrapper import Limits, Wrapper

    @Wrapper(rejoin=True, heartbeat_timeout=60, limits=Limits(max_same_faults=2))
    def train():
        if os.environ["RANK"] == "3":
            raise ValueError("its data is gone")
        while True:
            time.sleep(0.02)

    train()
"""


def test_a_rank_that_always_fails_ends_the_job_and_its_error_stands_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, FAILS, nnodes="2", nproc=2) as cluster:
        first, second = (cluster.start(node_id) for node_id in ("0", "1"))
        assert (first.end(), second.end()) == (1, 1), first.said + second.said
    culprit, other = (second, first) if "its data is gone" in second.said else (first, second)
    assert culprit.said.count("ValueError: its data is gone\nftrun") <= 1
    assert culprit.said.count("Traceback") == 2, culprit.said  # at first, and at the end
    assert "1 of 2 ranks of node" in culprit.said, culprit.said
    (row,) = (line for line in culprit.said.splitlines() if line.split()[:1] == ["3"])
    assert "exit code 1" in row and "ValueError: its data is gone" in row, "without @record"
    assert "Traceback" not in other.said and "failed" not in other.said.partition("(program): ValueError")[2]
    ended_by = "ftrun: exit code 1 (program): ValueError at script.py:8 in train on slot 3, 2 times in a row"
    assert ended_by in other.said, other.said
    assert [len(pids) for node in (first, second) for pids in pids_of(node).values()] == [1] * 4
