"""What ftrun's command line says about nodes, ranks and spares; and that torchrun's command lines work."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from agent_job import FtRun
from torch.distributed.run import get_args_parser

from ft_wrapper import Compose, Wrapper
from ft_wrapper.agent.options import Options, make_parser, parse_args
from ft_wrapper.agent.outputs import Logs
from ft_wrapper.agent.rounds import alone
from ft_wrapper.cli.run import meet
from ft_wrapper.rank_assignment import MaxActiveWorldSize, ShiftRanks
from ft_wrapper.rendezvous.settings import Identity, RendezvousSettings, read_parameters
from ft_wrapper.store.secret import AGENT_ENV
from ft_wrapper.testing.etcd_server import free_port
from ft_wrapper.wrapper import as_launched

STATIC = ("--nnodes", "2", "--master-addr", "head", "--master-port", "29501")
MEET = ("--nnodes", "2", "--rdzv-endpoint", "head:29400")


def parsed(*arguments: str) -> Options:
    return parse_args([*arguments, "--no-python", "true"])


def read(options: Options) -> tuple[RendezvousSettings, Identity, bool | None]:
    """Settings, identity, and whether this node hosts the store."""
    assert options.rendezvous is not None
    return *read_parameters(options.rendezvous), options.rendezvous.get_as_bool("is_host")


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


def test_lines_for_one_node_and_where_its_store_is() -> None:
    for line, port in {
        "--standalone --nnodes=1 --nproc-per-node=4": 0,
        "--standalone --nproc_per_node=4 --rdzv-id=7 --rdzv-backend=c10d --master-port=29501": 0,
        "--nproc-per-node=4 --master_port 29501": 29501,
        "--nnodes 1 --node-rank 0 --master-addr localhost --master-port 29500 --nproc-per-node 4": 29500,
        "--nnodes 1:1 --rdzv-backend static --nproc-per-node 4 --max-restarts 0": 0,
        "--nproc-per-node 4 --start-method fork --event-log-handler null": 0,
    }.items():
        options = parsed(*line.split())
        assert (options.rendezvous, options.job.nproc, options.port) == (None, 4, port), line


def test_the_static_line() -> None:
    for rank in ("0", "1"):
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


def test_its_own_number_goes_before_the_cluster_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "5")
    by_manager, own = read(parsed(*MEET))[1], read(parsed(*MEET, "--node-rank", "1"))[1]
    assert (by_manager.node_id, by_manager.is_index) == ("5", True), "another step may have it, too"
    assert (own.node_id, own.is_index) == ("1", False)


# Spares ------------------------------------------------------------------------------------------------


def test_spare_nodes_take_part_and_their_ranks_do_not_count() -> None:
    options = parsed("--nnodes", "1:2", *MEET[2:], "--nproc-per-node", "4", "--spare-nodes", "3")
    settings, _, _ = read(options)
    assert (settings.min_nodes, settings.max_nodes) == (1, 5)
    assert options.job.active_world_size == 8
    # On one node there may be spares, too.
    options = parsed(*MEET[2:], "--spare-nodes", "1", "--node-rank", "1")
    assert (read(options)[0].max_nodes, options.job.active_world_size) == (2, 1)
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
    job = dataclasses.replace(options.job, locks="/locks")
    return job.environment(local_rank, 0, alone("here:1", options.job.nproc))


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
    assert (options.job.devices, options.warnings) == (devices, ())
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


def test_prefix_of_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prefix = "<${role_name} ${rank} ${local_rank}>"
    options = parsed("-t", "1", "--log-dir", str(tmp_path))
    for attempt in (0, 1):
        found = {**environment(options, 0), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        with Logs(options.logs_specs(log_dir=str(tmp_path), tee=options.tee), "worker", prefix) as logs:
            logs.begin_round({0: found}, 4)
            path = Path(logs.open(0, 0).stdout)
            path.write_text("said\n")
        assert capfd.readouterr().out == "<worker 4 0>said\n"
        assert path.parent.parent.name == f"attempt_{attempt}"


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


def test_ranks_are_forked_unless_the_command_line_says_otherwise() -> None:
    assert parsed().forks and not parsed("--no-fork").forks


# Real jobs ---------------------------------------------------------------------------------------------


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
