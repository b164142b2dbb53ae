"""What ftrun's command line says about nodes, ranks and spares; and that torchrun's command lines work."""

from __future__ import annotations

import os
import re
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_job import FtRun, await_that
from test_nodes import CONF, Cluster, lose, pids_of
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.run import get_args_parser

from ft_wrapper import Compose, Wrapper
from ft_wrapper.agent.options import Options, make_parser, parse_args
from ft_wrapper.agent.outputs import Logs
from ft_wrapper.agent.process import Job
from ft_wrapper.agent.rounds import alone
from ft_wrapper.cli.meeting import meet
from ft_wrapper.rank_assignment import MaxActiveWorldSize, ShiftRanks
from ft_wrapper.rendezvous.settings import Identity, RendezvousSettings, read_parameters
from ft_wrapper.run import main
from ft_wrapper.store.secret import AGENT_ENV
from ft_wrapper.testing.etcd_server import free_port
from ft_wrapper.wrapper import as_launched

STATIC = ("--nnodes", "2", "--master-addr", "head", "--master-port", "29501")
MEET = ("--nnodes", "2", "--rdzv-endpoint", "head:29400")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster manager has numbered this node, and no one has set options by variables."""
    for name in list(os.environ):
        if name.startswith("PET_") or name in ("SLURM_STEP_ID", "JOB_COMPLETION_INDEX"):
            monkeypatch.delenv(name)


def parsed(*arguments: str) -> Options:
    return parse_args([*arguments, "--no-python", "true"])


def read(options: Options) -> tuple[RendezvousSettings, Identity, bool | None]:
    """Settings, identity, and whether this node hosts the store."""
    assert options.rendezvous is not None
    return *read_parameters(options.rendezvous), options.rendezvous.get_as_bool("is_host")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that says why these arguments do not do."""
    with pytest.raises(SystemExit) as end:
        parsed(*arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftrun: error: ")
    assert err.count("\n") == 1
    return err


# torchrun's command lines ------------------------------------------------------------------------------


def test_they_have_torchruns_defaults_but_for_what_is_documented() -> None:
    ours, theirs = (
        {action.dest: action.default for action in parser._actions}
        for parser in (make_parser(), get_args_parser())
    )
    assert theirs.keys() - ours.keys() == set()
    other = {name for name in theirs if str(ours[name]) != str(theirs[name])} - {"master_port"}
    assert other == {
        "rdzv_backend",
        *("master_addr", "node_rank"),  # taken when they are needed; the port in newer versions of torch, too
        "max_restarts",  # 0, unless the policy forbids it
        *({"shutdown_timeout"} & theirs.keys()),  # newer than torch 2.6
    }


@pytest.mark.parametrize(
    "line",
    [
        "--standalone --nnodes=1 --nproc-per-node=4",
        "--standalone --nproc_per_node=4 --rdzv-id=7 --rdzv-backend=c10d --master-port=29501",
        "--nproc-per-node=4 --master_port 29501",
        "--nnodes 1 --node-rank 0 --master-addr localhost --master-port 29500 --nproc-per-node 4",
        "--nnodes 1:1 --rdzv-backend static --nproc-per-node 4 --max-restarts 0",
        "--nproc-per-node 4 --start-method fork --event-log-handler null",
    ],
)
def test_lines_for_one_node(line: str) -> None:
    options = parsed(*line.split())
    assert options.rendezvous is None
    assert options.nproc_per_node == 4


@pytest.mark.parametrize(
    ("line", "port"), [("--master-port 29501", 29501), ("--standalone --master-port 29501", 0), ("", 0)]
)
def test_where_the_store_of_one_node_is(line: str, port: int) -> None:
    assert parsed(*line.split()).port == port


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_static_line(rank: str) -> None:
    options = parsed(*STATIC, "--node-rank", rank)
    assert options.rendezvous is not None
    assert (options.rendezvous.backend, options.rendezvous.endpoint) == ("ft", "head:29501")
    settings, identity, is_host = read(options)
    assert (settings.min_nodes, settings.max_nodes, identity.node_id) == (2, 2, rank)
    assert is_host is (rank == "0"), "node 0 hosts, whatever the name of the master leads to"


def test_the_static_line_without_all_of_it() -> None:
    assert meets_at("--master-addr", "head") == "head:29500"
    assert meets_at("--master-port", "29501") == "127.0.0.1:29501"
    assert meets_at("--master-addr", "[::1]") == "[::1]:29500"
    # Given, it comes first, as with torchrun.
    assert meets_at("--master-addr", "head", "--rdzv-endpoint", "other:1") == "other:1"
    _, identity, is_host = read(parsed("--nnodes", "2", "--master-addr", "head"))
    assert (identity.node_id, is_host) == (None, None)


def meets_at(*options: str) -> str:
    meeting = parsed("--nnodes", "2", *options).rendezvous
    assert meeting is not None
    return meeting.endpoint


def test_node_rank_is_an_id_only_where_the_endpoint_is_not_the_master() -> None:
    _, identity, is_host = read(parsed(*MEET, "--node-rank", "0"))
    assert (identity.node_id, is_host) == ("0", None)
    _, _, is_host = read(parsed(*MEET, "--node-rank", "0", "--rdzv-backend", "static"))
    assert is_host is True
    _, _, is_host = read(parsed(*STATIC, "--node-rank", "0", "--rdzv-conf", "is_host=false"))
    assert is_host is False, "said in words"
    _, identity, _ = read(parsed(*MEET, "--node-rank", "1", "--node-id", "1"))
    assert identity.node_id == "1"


def test_other_handlers_know_no_node_rank() -> None:
    """A platform sets it in any case; torchrun does not use it then, either."""
    meeting = parsed(*MEET, "--rdzv-backend", "c10d", "--node-rank", "1").rendezvous
    assert meeting is not None
    assert meeting.config == {}
    assert parsed(*MEET, "--rdzv-backend", "c10d", "--node-rank", "7").warnings == ()


def test_variables_of_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "3",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "head",
        "PET_MASTER_PORT": "29501",
    }.items():
        monkeypatch.setenv(name, value)
    options = parsed()
    assert options.rendezvous is not None
    assert options.rendezvous.endpoint == "head:29501"
    assert read(options)[1] == Identity("1", nproc=3)
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NODE_RANK", "0")
    assert parsed().rendezvous is None


def test_its_own_number_goes_before_the_cluster_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "5")
    assert read(parsed(*MEET))[1].node_id == "5"
    assert read(parsed(*MEET, "--node-rank", "1"))[1].node_id == "1"


# Contradictions ----------------------------------------------------------------------------------------

BAD = {
    "alone, with others": (["--standalone", "--nnodes", "2"], ["--standalone", "--nnodes 2"]),
    "alone, with spares": (["--standalone", "--spare-nodes", "1"], ["--standalone", "--spare-nodes 1"]),
    "node rank too large": (
        [*STATIC, "--node-rank", "2"],
        ["--node-rank 2", "the last one is 1", "--node-id"],
    ),
    "node rank on one node that looks for the others": (
        ["--node-rank", "1", "--master-port", "29501"],
        ["--node-rank 1", "with 1 node the last one is 0", "--nnodes"],
    ),
    "node rank negative": ([*STATIC, "--node-rank=-1"], ["--node-rank -1", "at least 0"]),
    "node rank word": ([*STATIC, "--node-rank", "first"], ["--node-rank first"]),
    "node rank and another id": (
        [*STATIC, "--node-rank", "1", "--node-id", "a"],
        ["--node-rank 1", "--node-id a", "contradict"],
    ),
    "etcd without an endpoint": (
        ["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-id", "7"],
        ["--nnodes 2", "--rdzv-endpoint HOST:PORT", "etcd's members"],
    ),
    "etcd without an id": (
        ["--rdzv-backend", "etcd", "--rdzv-endpoint", "a,b,c"],
        ["--rdzv-backend etcd", "--rdzv-id ID"],
    ),
    "master port word": (["--master-port", "http"], ["--master-port http", "65535"]),
    "master port too large": ([*STATIC[:4], "--master-port", "65536"], ["--master-port 65536"]),
    "none active": (["--active-world-size", "0"], ["--active-world-size 0", "at least one"]),
    "active word": (["--active-world-size", "all"], ["--active-world-size all"]),
    "more active than ranks": (
        ["--nproc-per-node", "4", "--active-world-size", "5"],
        ["--active-world-size 5", "more than the 4 ranks", "--nproc-per-node 4"],
    ),
    "more active than ranks of all nodes": (
        [*MEET, "--nproc-per-node", "4", "--active-world-size", "9"],
        ["--active-world-size 9", "more than the 8 ranks", "--nnodes 2"],
    ),
    "more active than devices": (
        ["--nnodes", "1:2", "--nproc-per-node", "9", "--active-world-size", "9", "--devices-per-node", "4"],
        [
            "--nproc-per-node 9 --active-world-size 9: there are 2 x 4 devices for 9 active ranks",
            "lower --active-world-size to 8; or start 4 ranks a node, with --spare-nodes; or give",
            "--devices-per-node 0",
        ],
    ),
    "more active than devices, with spare nodes": (
        [*MEET, "--nproc-per-node", "3", "--spare-nodes", "1", "--devices-per-node", "2"],
        ["--nproc-per-node 3 --spare-nodes 1", "2 x 2 devices for 6 active ranks"],
    ),
    "devices that others do not see": (
        [
            "--nproc-per-node",
            "3",
            "--active-world-size",
            "2",
            "--devices-per-node",
            "2",
            "--virtual-local-rank",
        ],
        ["--nproc-per-node 3 --active-world-size 2", "--virtual-local-rank", "contradict"],
    ),
    "devices word": (["--devices-per-node", "gpu"], ["--devices-per-node gpu", "at least 0"]),
    "spare nodes negative": (["--spare-nodes=-1"], ["--spare-nodes -1", "at least 0"]),
    "spare nodes and active ranks": (
        [*MEET, "--spare-nodes", "1", "--active-world-size", "2"],
        ["--spare-nodes 1", "--active-world-size 2", "contradict"],
    ),
    "spare nodes and a group": (
        [*MEET, "--spare-nodes", "1", "--restart-policy", "group"],
        ["--spare-nodes 1", "--restart-policy group", "contradict"],
    ),
    "spare nodes elsewhere": (
        [*MEET, "--spare-nodes", "1", "--rdzv-backend", "c10d"],
        ["--spare-nodes 1", "--rdzv-backend c10d", "--rdzv-backend ft"],
    ),
    "start method": (["--start-method", "thread"], ["--start-method", "'thread'"]),
    "no such logs specs": (["--logs-specs", "no-such"], ["--logs-specs no-such", "torchrun.logs_specs"]),
}


@pytest.mark.parametrize("case", BAD)
def test_contradictions(capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, words = BAD[case]
    line = refused(capsys, *arguments)
    for word in words:
        assert word in line


def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    line = refused(capsys, "--virtual-local-rank", "--nproc-per-node", "3")
    assert "CUDA_VISIBLE_DEVICES=3,5" in line
    assert parsed("--virtual-local-rank", "--nproc-per-node", "2").virtual_local_rank


# Spares ------------------------------------------------------------------------------------------------


def test_spare_nodes_take_part_and_their_ranks_do_not_count() -> None:
    options = parsed("--nnodes", "1:2", *MEET[2:], "--nproc-per-node", "4", "--spare-nodes", "3")
    settings, _, _ = read(options)
    assert (settings.min_nodes, settings.max_nodes) == (1, 5)
    assert options.active_world_size == 8
    # On one node there may be spares, too.
    options = parsed(*MEET[2:], "--spare-nodes", "1", "--node-rank", "1")
    assert (read(options)[0].max_nodes, options.active_world_size) == (2, 1)
    assert parsed("--spare-nodes", "0").rendezvous is None


def test_all_nodes_agree_on_spares() -> None:
    plain = agreed(*MEET)
    assert plain == {"restart_policy": "auto", "max_restarts": "0"}
    assert agreed(*MEET, "--active-world-size", "1") == {**plain, "active_world_size": "1"}
    assert agreed(*MEET, "--spare-nodes", "1") == {**plain, "active_world_size": "2", "spare_nodes": "1"}


def agreed(*arguments: str) -> dict[str, str]:
    nodes = meet(parsed(*arguments))
    try:
        return dict(nodes._settings.agreed)  # type: ignore[attr-defined]
    finally:
        nodes.close()


def environment(options: Options, local_rank: int) -> dict[str, str]:
    active, virtual = options.active_world_size, options.virtual_local_rank
    devices = f"/locks:{options.devices}" if options.devices else ""
    job = Job(options.nproc_per_node, "default", "job", 0, active, virtual, devices=devices)
    return job.environment(local_rank, 0, alone("here:1", options.nproc_per_node))


def test_ranks_find_how_many_are_active() -> None:
    active = parsed("--nproc-per-node", "2", "--active-world-size", "1")
    assert environment(active, 1)["FT_WRAPPER_ACTIVE_WORLD_SIZE"] == "1"
    assert "FT_WRAPPER_ACTIVE_WORLD_SIZE" not in environment(parsed(), 0)


SPARE = ("--nproc-per-node", "5", "--active-world-size", "4")


@pytest.mark.parametrize(
    ("line", "gpus", "devices"),
    [
        ("", 4, 4),
        ("--devices-per-node 0", 4, 0),
        ("--devices-per-node 4", 0, 4),
        ("", 0, 0),
        ("", 1, 0),  # tests let ranks share one
        ("", 5, 0),
        ("", 8, 0),
        ("--active-world-size 5", 4, 0),  # no spares: as under torchrun
        ("--nproc-per-node 4", 2, 0),
    ],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, line: str, gpus: int, devices: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    options = parsed(*SPARE, *line.split())
    assert (options.devices, options.warnings) == (devices, ())
    found = [environment(options, rank)["LOCAL_RANK"] for rank in range(5)]
    assert found == [str(rank % (devices or 5)) for rank in range(5)]
    assert environment(options, 4).get("FT_WRAPPER_DEVICES") == (f"/locks:{devices}" if devices else None)


def test_devices_of_several_nodes() -> None:
    (line,) = parsed(*MEET, *SPARE, "--devices-per-node", "4").warnings
    assert "--nproc-per-node 5 --active-world-size 4: only spares that stay on their node" in line
    assert "Tree" in line and "--spare-nodes" in line


@pytest.mark.parametrize(("visible", "found"), [(None, "1"), ("3, 5", "5")])
def test_virtual_local_rank(monkeypatch: pytest.MonkeyPatch, visible: str | None, found: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    virtual = environment(parsed("--nproc-per-node", "2", "--virtual-local-rank"), 1)
    assert (virtual["LOCAL_RANK"], virtual["CUDA_VISIBLE_DEVICES"], virtual["RANK"]) == ("0", found, "1")
    plain = environment(parsed("--nproc-per-node", "2"), 1)
    assert plain["LOCAL_RANK"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in plain


def test_the_command_line_wins_over_the_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def active(wrapper: Wrapper, is_first: bool = True) -> Any:
        settings = as_launched(wrapper.settings, is_first=is_first)
        limits = (getattr(part, "max_active_world_size", None) for part in settings.rank_assignment.parts)
        return settings.terms["active_world_size"], *filter(None, limits)

    def warned() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    assert active(Wrapper()) == (None,)
    assert active(Wrapper(active_world_size=2)) == (2, 2)
    monkeypatch.setenv("FT_WRAPPER_ACTIVE_WORLD_SIZE", "3")
    assert active(Wrapper()) == active(Wrapper(active_world_size=3)) == (3, 3)
    assert active(Wrapper(active_world_size=2), is_first=False) == (3, 3)
    assert not warned()
    assert active(Wrapper(active_world_size=2)) == (3, 3)
    assert warned() == ["active_world_size=2 does not count: ftrun says 3"]
    assert active(Wrapper(rank_assignment=Compose(MaxActiveWorldSize(1), ShiftRanks()))) == (None, 1)
    assert warned() == ["ftrun's active world size 3 does not count: the code has a rank_assignment"]
    for bad in ("0", "-1", "two", ""):
        monkeypatch.setenv("FT_WRAPPER_ACTIVE_WORLD_SIZE", bad)
        with pytest.raises(ValueError, match=re.escape(f"FT_WRAPPER_ACTIVE_WORLD_SIZE={bad!r}")):
            active(Wrapper())


def test_a_killed_process_comes_back_where_the_launcher_can_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_ENV, raising=False)
    settings = [{}, {"rejoin": False}, {"rejoin": True}, {"use_global_iteration": True}]
    settings += [{"rejoin": False, "use_global_iteration": True}]

    def rejoin() -> list[bool | None]:
        return [as_launched(Wrapper(**each).settings, is_first=True).rejoin for each in settings]

    assert rejoin() == [False, False, True, True, False]
    monkeypatch.setenv(AGENT_ENV, "an agent's socket")
    assert rejoin() == [True, False, True, True, False]


# Log files ---------------------------------------------------------------------------------------------


class OwnSpecs(DefaultLogsSpecs):
    """What a package might install."""


def test_logs_specs_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torchrun.logs_specs]\nown = {__name__}:OwnSpecs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert parsed("--logs-specs", "own").logs_specs is OwnSpecs
    assert parsed().logs_specs is DefaultLogsSpecs


def test_prefix_of_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prefix = "<${role_name} ${rank} ${local_rank}>"
    options = parsed("-t", "1", "--log-dir", str(tmp_path))
    with Logs(options.logs_specs(log_dir=str(tmp_path), tee=options.tee), "worker", prefix) as logs:
        logs.begin_round({0: environment(options, 0)}, 4)
        Path(logs.open(0, 0).stdout).write_text("said\n")
    assert capfd.readouterr().out == "<worker 4 0>said\n"


def test_prefix_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${role_name} ${local_rank}>")
    assert main(["-t", "1", "--log-dir", str(tmp_path), "--no-python", "echo", "said"]) == 0
    assert capsys.readouterr().out == "<default 0>said\n"


def test_what_options_stand_for_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FT_WRAPPER_EVENTS", "TORCHELASTIC_HEALTH_CHECK_PORT"):
        monkeypatch.delenv(variable, raising=False)
    file, logs = f"{tmp_path}/new/events-{socket.gethostname()}.jsonl", ("--log-dir", f"{tmp_path}/new")
    assert parsed().variables == parsed("--log-dir", os.devnull).variables == {}
    assert parsed(*logs).variables == {"FT_WRAPPER_EVENTS": file}
    monkeypatch.setenv("FT_WRAPPER_EVENTS", "own")
    assert parsed(*logs).variables == {}, "what the user has set counts"
    options = parsed("--events", f"{tmp_path}/new", "--metrics", "0")
    assert options.variables == {"FT_WRAPPER_EVENTS": file, "TORCHELASTIC_HEALTH_CHECK_PORT": "0"}
    with options.environment():
        assert Path(file).parent.is_dir()
        assert os.environ["FT_WRAPPER_EVENTS"] == file
    assert os.environ["FT_WRAPPER_EVENTS"] == "own"
    assert "TORCHELASTIC_HEALTH_CHECK_PORT" not in os.environ


def test_an_old_name_of_an_option_works_with_a_warning() -> None:
    assert parsed().forks and not parsed("--no-fork").forks
    old = parsed("--no-standby")
    assert not old.forks
    assert old.warnings == ("--no-standby is --no-fork now; the old name goes with the next release",)


# Real jobs ---------------------------------------------------------------------------------------------

COUNTED = """
    import os
    from ft_wrapper import CallWrapper, Wrapper

    slot = os.environ["RANK"]

    @Wrapper()
    def by_ftrun(call_wrapper: CallWrapper = None):
        print(f"by ftrun: {call_wrapper.rank} of {call_wrapper.world_size}\\n", end="")

    def tell(state):
        print(f"slot {slot}: {'spare' if state.is_spare else 'active'}\\n", end="")

    @Wrapper(active_world_size=2, initialize=tell)
    def by_code(call_wrapper: CallWrapper):
        assert not call_wrapper.is_spare
        print(f"by code: {call_wrapper.rank} of {call_wrapper.world_size}\\n", end="")

    by_ftrun()
    by_code()
"""


def test_active_ranks_of_a_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], write: Callable[[str], str]
) -> None:
    assert main(["--nproc-per-node", "2", "--active-world-size", "1", "--no-fork", write(COUNTED)]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "by code: 0 of 1",
        "by ftrun: 0 of 1",
        "slot 0: active",
        "slot 1: spare",
    ]
    assert err.count("active_world_size=2 does not count: ftrun says 1") == 1


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script and returns its path."""

    def write(source: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


def test_a_static_job_whose_second_node_is_first(tmp_path: Path) -> None:
    port = str(free_port())
    line = ("--nnodes", "2", "--master-addr", "localhost", "--master-port", port, "--nproc-per-node", "2")
    say = ("--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE, node $GROUP_RANK")
    with (
        FtRun(tmp_path / "1", "--node-rank", "1", *line, *say) as second,
        FtRun(tmp_path / "0", "--node-rank", "0", *line, *say) as first,
    ):
        assert [first.end(), second.end()] == [0, 0], first.said + second.said
    for number, node in enumerate((first, second)):
        for rank in (2 * number, 2 * number + 1):
            assert f"rank {rank} of 4, node {number}\n" in node.said
        assert ("hosting the rendezvous store" in node.said) is (node is first)


def test_the_port_of_the_master_is_in_use(tmp_path: Path) -> None:
    port = str(free_port())
    line = ("--nnodes", "2", "--master-addr", "localhost", "--master-port", port, "--node-rank", "0")
    with FtRun(tmp_path / "0", *line, "--no-python", "true") as first:
        await_that(lambda: "hosting the rendezvous store" in first.said, first)
        with FtRun(tmp_path / "other", *line, "--no-python", "true") as other:
            assert other.end() == 75
            (error,) = (line for line in other.said.splitlines() if line.startswith("ftrun: error: "))
    assert error.startswith("ftrun: error: cannot start true: ")
    assert f"localhost:{port}: this node must host the store, and cannot" in error


SPARED = """
    import json, os, sys, time
    from ft_wrapper import CallWrapper, Limits, Wrapper

    folder, found = sys.argv[1], dict(os.environ)  # the wrapper changes some of it

    @Wrapper(rejoin=True, heartbeat_timeout=60, limits=Limits(on_join="now", join_window=0.1))
    def train(call_wrapper: CallWrapper = None):
        state = call_wrapper.state
        path = f"{folder}/in.{state.active_world_size}.{state.iteration}.{state.active_rank}"
        with open(path + ".part", "w") as file:
            json.dump({**found, "pid": os.getpid()}, file)
        os.rename(path + ".part", path)
        while not os.path.exists(f"{folder}/finish"):
            time.sleep(0.02)

    train()
"""


@pytest.mark.nightly("a spare node steps in in test_nodes.py always")
def test_the_ranks_of_a_spare_node_step_in_where_they_are(tmp_path: Path) -> None:
    with Cluster(tmp_path, SPARED, nnodes="2", nproc=2) as cluster:
        conf = CONF.replace("last_call_timeout=0.2", "last_call_timeout=60")  # all are to be there
        options = ("--spare-nodes", "1", "--rdzv-conf", conf)
        stays, goes, spare = (cluster.start(node_id, *options) for node_id in ("0", "1", "2"))
        before = cluster.await_inside(4, stays, goes, spare)
        assert [(rank["RANK"], rank["WORLD_SIZE"]) for rank in before] == [(str(n), "6") for n in range(4)]
        assert {rank["FT_WRAPPER_ACTIVE_WORLD_SIZE"] for rank in before} == {"4"}
        await_that(lambda: "a job has formed" in stays.said, stays)
        lose(goes)
        after = cluster.await_inside(4, stays, spare)
        cluster.finish(stays, spare)
    assert [rank["RANK"] for rank in after] == ["0", "1", "4", "5"]
    assert [rank["pid"] for rank in after[:2]] == [rank["pid"] for rank in before[:2]]
    # Those that had waited: no rank was started for it.
    assert pids_of(spare) == {4: [after[2]["pid"]], 5: [after[3]["pid"]]}


def test_a_job_begins_with_fewer_ranks_than_may_be_active(tmp_path: Path) -> None:
    with Cluster(tmp_path, SPARED, nnodes="1:3") as cluster:
        first = cluster.start("0", "--active-world-size", "2")
        cluster.await_inside(1, first)
        await_that(lambda: "a job has formed" in first.said, first)
        second = cluster.start("1", "--active-world-size", "2")
        cluster.await_inside(2, first, second)
        third = cluster.start("2", "--active-world-size", "2")
        ranks = cluster.await_inside(2, first, second, third)
        assert [rank["RANK"] for rank in ranks] == ["0", "1"], "one more than may be active waits"
        cluster.finish(first, second, third)


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--active-world-size", "1"], "active_world_size"), (["--spare-nodes", "1"], "spare_nodes")],
)
def test_nodes_with_other_spares(tmp_path: Path, options: list[str], name: str) -> None:
    with Cluster(tmp_path, SPARED, nnodes="2") as cluster:
        first = cluster.start("0")
        await_that(lambda: "hosting the rendezvous store" in first.said, first)
        stranger = cluster.start("1", *options)
        assert stranger.end() == 2
        (line,) = (line for line in stranger.said.splitlines() if "error" in line)
        assert line.startswith("ftrun: error: cannot start ")
        assert str(cluster.script) in line, "what was asked for, rather than its Python"
        # The one that comes second is refused. If that is the host, the other one says why it ended.
        ours, theirs = f"{name} is 1 here, but not set there", f"{name} is not set here, but 1 there"
        assert ours in line or theirs in line
