"""The preflight: each finding and its remedy, the commands that print them, and the log of a job."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import socket
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest

from ft_wrapper import check
from ft_wrapper.check import Finding, findings
from ft_wrapper.cli import check as cli_check
from ft_wrapper.cli import run
from ft_wrapper.cli.check import NO_CUDA
from ft_wrapper.run import main

NOW = 1_800_000_000.0
ETHERNET = ("lo", "eth0")


def test_a_finding_is_one_line() -> None:
    assert str(Finding("what", "why", "remedy")) == "what: why; remedy"


IFNAME, WATCHDOG = "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# What is found, and what to set.
FOUND: list[tuple[Finding | None, str, str]] = [
    (findings.nccl_version((2, 25, 1)), "NCCL 2.25.1", "2.26.2 or newer"),
    (findings.nccl_version((2, 28, 3)), "NCCL 2.28.3", "2.28.9 or newer"),
    (findings.nccl_version((2, 28, 8)), "NCCL 2.28.8", "2.28.9 or newer"),
    (findings.nvls({}), "NCCL_NVLS_ENABLE is not set", "set NCCL_NVLS_ENABLE=0"),
    (findings.nvls({"NCCL_NVLS_ENABLE": "1"}), "NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE=0"),
    (
        findings.rethrown_errors({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}),
        "TORCH_NCCL_RETHROW_CUDA_ERRORS=1",
        "unset it, or set TORCH_NCCL_RETHROW_CUDA_ERRORS=0",
    ),
    (
        findings.async_errors({WATCHDOG: "1"}),
        f"{WATCHDOG}=1: on an NCCL error or timeout torch's watchdog ends the process",
        f"set {WATCHDOG}=0",
    ),
    (
        findings.async_errors({"NCCL_ASYNC_ERROR_HANDLING": "2"}),
        "NCCL_ASYNC_ERROR_HANDLING=2: on an NCCL error or timeout torch's watchdog aborts",
        "set NCCL_ASYNC_ERROR_HANDLING=0",
    ),
    (
        findings.heartbeat({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "90"}, 90.0),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=90",
        "set it above 90, or TORCH_NCCL_ENABLE_MONITORING=0",
    ),
    (
        findings.heartbeat({}, 500.0),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is not set (480 by default)",
        "set it above 500",
    ),
    (
        findings.group_timeout(timedelta(minutes=10), 600.0),
        "process groups time out after 600 s",
        "pass init_process_group a timeout above 600 s",
    ),
    (
        findings.flight_recorder({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
        "TORCH_NCCL_TRACE_BUFFER_SIZE=0",
        "set TORCH_FR_BUFFER_SIZE=2000",
    ),
    (findings.open_files(1024, 512), "limit of 1024 open files", "ulimit -n 2176"),
    (findings.shared_memory(64 << 20), "64 MiB free in /dev/shm", "--shm-size"),
    (findings.shared_memory(None), "no /dev/shm", "--shm-size"),
    (findings.clock(0.0, True, 1), "the clock says 1970-01-01", "run chrony"),
    (findings.clock(NOW, False, 2), "the clock is not synchronized", "run chrony"),
    (
        findings.gloo_interface({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, ETHERNET),
        "GLOO_SOCKET_IFNAME=eth0,ib0: there is no interface ib0 here",
        "name one of eth0, lo",
    ),
    (findings.nccl_interface({IFNAME: "ib"}, ETHERNET), f"{IFNAME}=ib", "name one of eth0, lo"),
    (findings.nccl_interface({IFNAME: "=eth"}, ETHERNET), f"{IFNAME}==eth", "name one of"),
    (findings.nccl_interface({IFNAME: "^eth,lo"}, ETHERNET), f"{IFNAME}=^eth,lo", "name one of"),
    (
        findings.own_name("host7", ["127.0.1.1", "::1"], {}, 2),
        "this host's name host7 leads to the loopback only",
        "set GLOO_SOCKET_IFNAME",
    ),
    (
        findings.own_name("host7", [], {}, 2),
        "this host's name host7 cannot be looked up",
        "set GLOO_SOCKET_IFNAME, or give host7 its address",
    ),
    (
        findings.reverse_lookup("node0", 5.012),
        "the reverse look-up of node0 took 5 s",
        "put the addresses of all nodes into /etc/hosts, or run a cache of names",
    ),
]


@pytest.mark.parametrize(("found", "what", "remedy"), FOUND)
def test_what_is_found_and_what_to_set(found: Finding | None, what: str, remedy: str) -> None:
    assert found is not None
    assert str(found).startswith(what)
    assert remedy in found.remedy
    assert all(dataclasses.astuple(found))
    assert "\n" not in str(found)


def test_what_is_right() -> None:
    right = [
        *(findings.nccl_version((2, *version)) for version in ((26, 2), (28, 2), (28, 9), (29, 3))),
        findings.nvls({"NCCL_NVLS_ENABLE": "0"}),
        findings.rethrown_errors({}),
        *(findings.rethrown_errors({"TORCH_NCCL_RETHROW_CUDA_ERRORS": no}) for no in ("0", "False", "no")),
        *(findings.async_errors(found) for found in ({}, {WATCHDOG: "0"})),
        findings.async_errors({"NCCL_ASYNC_ERROR_HANDLING": "2", WATCHDOG: "0"}),
        findings.heartbeat({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "91"}, 90.0),
        findings.heartbeat({}, 479.0),
        findings.heartbeat({"TORCH_NCCL_ENABLE_MONITORING": "0"}, 500.0),
        findings.group_timeout(timedelta(minutes=10), 599.0),
        findings.flight_recorder({}),
        findings.flight_recorder({"TORCH_FR_BUFFER_SIZE": "9", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
        *(findings.open_files(1024, 8), findings.open_files(2176, 512), findings.shared_memory(1 << 30)),
        *(findings.clock(NOW, True, 2), findings.clock(NOW, False, 1)),
        *(findings.gloo_interface({"GLOO_SOCKET_IFNAME": "eth0"}, ETHERNET), findings.gloo_interface({}, ())),
        *(
            findings.nccl_interface({IFNAME: text}, ETHERNET)
            for text in ("", "eth", "=eth0", "^eth", "^=eth", "ib,eth")
        ),
        findings.own_name("host7", ["127.0.1.1"], {}, 1),
        findings.own_name("host7", ["127.0.1.1", "10.0.0.7"], {}, 2),
        findings.own_name("host7", ["fe80::1%eth0"], {}, 2),
        findings.own_name("host7", ["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth0"}, 2),
        findings.reverse_lookup("node0", 0.049),
    ]
    assert right == [None] * len(right)


# The machine -----------------------------------------------------------------------------------------------

# What is wrong with the machine, and what is found then.
WRONG: list[tuple[object, str, Callable[..., object], str]] = [
    (resource, "getrlimit", lambda _: (64, 64), "limit of 64 open files"),
    (shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=1 << 20), "1 MiB free in /dev/shm"),
    (check, "_is_clock_synchronized", lambda: False, "the clock is not"),
    (check, "_addresses", lambda _: [], "cannot be looked up"),
    (socket, "if_nameindex", lambda: [(1, "ib0")], "interface eth7"),
]


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a rank of two nodes, on a machine with which nothing is wrong."""
    monkeypatch.setattr(check, "_is_clock_synchronized", lambda: True)
    monkeypatch.setattr(check, "_addresses", lambda _: ["10.0.0.7"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=1 << 40))
    return {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "16"}


def test_nothing_is_wrong_with_a_good_machine(good: dict[str, str]) -> None:
    assert check.preflight(good) == []


@pytest.mark.parametrize(("module", "name", "pretended", "words"), WRONG)
def test_the_machine_is_looked_at(
    *,
    module: object,
    name: str,
    pretended: Callable[..., object],
    words: str,
    good: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, pretended)
    if module is socket:
        good["GLOO_SOCKET_IFNAME"] = "eth7"
    (found,) = check.preflight(good)
    assert words in str(found)


def test_nccl_counts_where_there_is_a_gpu(good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        **good,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
        "TORCH_FR_BUFFER_SIZE": "0",
        "NCCL_SOCKET_IFNAME": "=none",
    }
    assert check.preflight(bad, 700.0) == []
    monkeypatch.setattr(check, "has_cuda", lambda: True)
    monkeypatch.setattr(check, "_installed_nccl", lambda: (2, 28, 5))
    lines = [str(finding) for finding in check.preflight(bad, 700.0)]
    words = (
        *(
            "NCCL 2.28.5",
            "NCCL_NVLS_ENABLE",
            "TORCH_NCCL_RETHROW",
            "TORCH_NCCL_ASYNC",
            "TORCH_NCCL_HEARTBEAT",
        ),
        *("process groups", "TORCH_FR_BUFFER_SIZE", "NCCL_SOCKET_IFNAME"),
    )
    assert [line for line, word in zip(lines, words, strict=True) if not line.startswith(word)] == []


def test_the_kernel_and_the_resolver_are_asked() -> None:
    """Whatever they say here: the calls are right."""
    assert check._is_clock_synchronized() in (True, False)
    assert "127.0.0.1" in check._addresses("localhost")
    assert check._addresses("no-such-host.invalid") == []
    assert check._free_shared_memory()


# The commands ----------------------------------------------------------------------------------------------


@pytest.fixture
def without_cuda(good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "has_cuda", lambda: False)
    monkeypatch.setattr(run, "_set_up_logging", lambda *_: None)  # it would stay
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(cli_check, "_lookup_seconds", lambda host: 0.0)


def test_the_name_service_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch asks: for an IPv4 address that is written as an IPv6 one."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getnameinfo", lambda address, flags: asked.append(address[0]))
    assert cli_check._lookup_seconds("127.0.0.1") > 0.0
    assert cli_check._lookup_seconds("no-such-host.invalid") == 0.0
    assert asked == ["::ffff:127.0.0.1"]


@pytest.mark.usefixtures("without_cuda")
def test_a_slow_name_service_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cli_check, "_lookup_seconds", lambda host: asked.append(host) or 5.0)
    assert main(["--check", "-m", "json.tool"]) == 1
    assert main(["--check", "--nnodes", "2", "--rdzv-endpoint", "other:29400", "-m", "json.tool"]) == 1
    assert asked == ["127.0.0.1", "other"]
    assert "the reverse look-up of other took 5 s: torch asks" in capsys.readouterr().out


@pytest.mark.usefixtures("without_cuda")
def test_the_options_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_is_clock_synchronized", lambda: False)
    job = ("-m", "json.tool")
    assert main(["--check", "--nnodes", "1", *job]) == 0
    assert main(["--check", "--nnodes", "2", "--rdzv-endpoint", "other:29400", *job]) == 1
    assert "the clock is not synchronized" in capsys.readouterr().out
    monkeypatch.setattr(check, "has_cuda", lambda: True)
    monkeypatch.setattr(check, "_installed_nccl", lambda: (2, 25, 1))
    assert main(["--check", *job]) == 1
    out = capsys.readouterr().out
    assert "NCCL 2.25.1: " in out
    assert NO_CUDA not in out


@pytest.mark.usefixtures("without_cuda")
def test_ftrun_checks_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    script = os.path.join(tmp_path, "train.py")
    with open(script, "w") as file:
        file.write(f"open({os.path.join(tmp_path, 'started')!r}, 'w')")
    assert main(["--check", script, "--lr", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [NO_CUDA, "nothing found"]
    monkeypatch.setattr(check, "_addresses", lambda _: [])
    assert main(["--check", "--nnodes", "2", "--rdzv-endpoint", "other:29400", script]) == 1
    assert "cannot be looked up" in capsys.readouterr().out
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["--check", script]) == 1
    said = f"script {script}: it cannot be read by this user; chmod a+r {script}"
    assert said in capsys.readouterr().out.splitlines()
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.usefixtures("without_cuda")
def test_files_for_ranks_of_all_nodes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    job = ["--check", "--nproc-per-node", "8", "--rdzv-endpoint", "other:29400", "-m", "json.tool"]
    assert main(["--nnodes", "2", *job]) == 0
    assert main(["--nnodes", "2:64", *job]) == 1
    assert "a rank of 512" in capsys.readouterr().out
