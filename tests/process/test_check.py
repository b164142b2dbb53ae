"""The preflight: each finding and its remedy, the commands that print them, and the log of a job."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest

from ft_wrapper import check
from ft_wrapper.check import Finding, findings
from ft_wrapper.cli import check as cli_check
from ft_wrapper.cli import run
from ft_wrapper.cli.check import NO_CUDA
from ft_wrapper.run import main, parse_args

NOW = 1_800_000_000.0
ETHERNET = ("lo", "eth0")


def test_a_finding_is_one_line() -> None:
    assert str(Finding("what", "why", "remedy")) == "what: why; remedy"


# What is found, and what to set; and next to it what is right.
FOUND: dict[str, tuple[Finding | None, str, str, list[Finding | None]]] = {
    "NCCL is old": (
        findings.nccl_version((2, 25, 1)),
        "NCCL 2.25.1",
        "2.26.2 or newer",
        [findings.nccl_version((2, 26, 2)), findings.nccl_version((2, 28, 2))],
    ),
    "NCCL hangs, from": (
        findings.nccl_version((2, 28, 3)),
        "NCCL 2.28.3",
        "2.28.9 or newer",
        [findings.nccl_version((2, 28, 9)), findings.nccl_version((2, 29, 3))],
    ),
    "NCCL hangs, to": (findings.nccl_version((2, 28, 8)), "NCCL 2.28.8", "2.28.9 or newer", []),
    "NVLS is on by default": (
        findings.nvls({}),
        "NCCL_NVLS_ENABLE is not set",
        "set NCCL_NVLS_ENABLE=0",
        [findings.nvls({"NCCL_NVLS_ENABLE": "0"})],
    ),
    "NVLS is on": (findings.nvls({"NCCL_NVLS_ENABLE": "1"}), "NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE=0", []),
    "CUDA errors end the process": (
        findings.rethrown_errors({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}),
        "TORCH_NCCL_RETHROW_CUDA_ERRORS=1",
        "unset it, or set TORCH_NCCL_RETHROW_CUDA_ERRORS=0",
        [
            findings.rethrown_errors({}),
            *(
                findings.rethrown_errors({"TORCH_NCCL_RETHROW_CUDA_ERRORS": text})
                for text in ("0", "False", "no")
            ),
        ],
    ),
    "the watchdog ends the process": (
        findings.async_errors({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1: on an NCCL error or timeout torch's watchdog ends the process",
        "set TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
        [findings.async_errors({}), findings.async_errors({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})],
    ),
    "the watchdog aborts": (
        findings.async_errors({"NCCL_ASYNC_ERROR_HANDLING": "2"}),
        "NCCL_ASYNC_ERROR_HANDLING=2: on an NCCL error or timeout torch's watchdog aborts",
        "set NCCL_ASYNC_ERROR_HANDLING=0",
        [findings.async_errors({"NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})],
    ),
    "the heartbeat monitor is quicker": (
        findings.heartbeat({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "90"}, 90.0),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=90",
        "set it above 90, or TORCH_NCCL_ENABLE_MONITORING=0",
        [
            findings.heartbeat({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "91"}, 90.0),
            findings.heartbeat({}, 479.0),
            findings.heartbeat({"TORCH_NCCL_ENABLE_MONITORING": "0"}, 500.0),
        ],
    ),
    "the heartbeat monitor is quicker by default": (
        findings.heartbeat({}, 500.0),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is not set (480 by default)",
        "set it above 500",
        [],
    ),
    "groups time out": (
        findings.group_timeout(timedelta(minutes=10), 600.0),
        "process groups time out after 600 s",
        "pass init_process_group a timeout above 600 s",
        [findings.group_timeout(timedelta(minutes=10), 599.0)],
    ),
    "no Flight Recorder": (
        findings.flight_recorder({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
        "TORCH_NCCL_TRACE_BUFFER_SIZE=0",
        "set TORCH_FR_BUFFER_SIZE=2000",
        [
            findings.flight_recorder({}),
            findings.flight_recorder({"TORCH_FR_BUFFER_SIZE": "9", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
        ],
    ),
    "few files": (
        findings.open_files(1024, 512),
        "limit of 1024 open files",
        "ulimit -n 2176",
        [findings.open_files(1024, 8), findings.open_files(2176, 512)],
    ),
    "little shared memory": (
        findings.shared_memory(64 << 20),
        "64 MiB free in /dev/shm",
        "--shm-size",
        [findings.shared_memory(1 << 30)],
    ),
    "no shared memory": (findings.shared_memory(None), "no /dev/shm", "--shm-size", []),
    "a clock in the past": (
        findings.clock(0.0, True, 1),
        "the clock says 1970-01-01",
        "run chrony",
        [findings.clock(NOW, True, 2)],
    ),
    "a clock that drifts": (
        findings.clock(NOW, False, 2),
        "the clock is not synchronized",
        "run chrony",
        [findings.clock(NOW, False, 1)],
    ),
    "no interface for gloo": (
        findings.gloo_interface({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, ETHERNET),
        "GLOO_SOCKET_IFNAME=eth0,ib0: there is no interface ib0 here",
        "name one of eth0, lo",
        [findings.gloo_interface({"GLOO_SOCKET_IFNAME": "eth0"}, ETHERNET), findings.gloo_interface({}, ())],
    ),
    "no interface for NCCL": (
        findings.nccl_interface({"NCCL_SOCKET_IFNAME": "ib"}, ETHERNET),
        "NCCL_SOCKET_IFNAME=ib",
        "name one of eth0, lo",
        [
            findings.nccl_interface({"NCCL_SOCKET_IFNAME": text}, ETHERNET)
            for text in ("", "eth", "=eth0", "^eth", "^=eth", "ib,eth")
        ],
    ),
    "no interface of the whole name": (
        findings.nccl_interface({"NCCL_SOCKET_IFNAME": "=eth"}, ETHERNET),
        "NCCL_SOCKET_IFNAME==eth",
        "name one of",
        [],
    ),
    "every interface excluded": (
        findings.nccl_interface({"NCCL_SOCKET_IFNAME": "^eth,lo"}, ETHERNET),
        "NCCL_SOCKET_IFNAME=^eth,lo",
        "name one of",
        [],
    ),
    "a name of the loopback": (
        findings.own_name("host7", ["127.0.1.1", "::1"], {}, 2),
        "this host's name host7 leads to the loopback only",
        "set GLOO_SOCKET_IFNAME",
        [
            findings.own_name("host7", ["127.0.1.1"], {}, 1),
            findings.own_name("host7", ["127.0.1.1", "10.0.0.7"], {}, 2),
            findings.own_name("host7", ["fe80::1%eth0"], {}, 2),
            findings.own_name("host7", ["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth0"}, 2),
        ],
    ),
    "a slow name service": (
        findings.reverse_lookup("node0", 5.012),
        "the reverse look-up of node0 took 5 s",
        "put the addresses of all nodes into /etc/hosts, or run a cache of names",
        [findings.reverse_lookup("node0", 0.049)],
    ),
    "an unknown name": (
        findings.own_name("host7", [], {}, 2),
        "this host's name host7 cannot be looked up",
        "set GLOO_SOCKET_IFNAME, or give host7 its address",
        [],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found_and_what_to_set(case: str) -> None:
    found, what, remedy, right = FOUND[case]
    assert found is not None
    assert str(found).startswith(what)
    assert remedy in found.remedy
    assert all(dataclasses.astuple(found))
    assert "\n" not in str(found)
    assert right == [None] * len(right)


# The machine -----------------------------------------------------------------------------------------------

# What is wrong with the machine, how a test pretends so, and what is found then.
WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "files": (
        lambda patch: patch.setattr(resource, "getrlimit", lambda _: (64, 64)),
        "limit of 64 open files",
    ),
    "memory": (
        lambda patch: patch.setattr(
            shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=1 << 20)
        ),
        "1 MiB free in /dev/shm",
    ),
    "clock": (
        lambda patch: patch.setattr(check, "_is_clock_synchronized", lambda: False),
        "the clock is not",
    ),
    "name": (lambda patch: patch.setattr(check, "_addresses", lambda _: []), "cannot be looked up"),
    "interface": (
        lambda patch: patch.setattr(socket, "if_nameindex", lambda: [(1, "ib0")]),
        "interface eth7",
    ),
}


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


@pytest.mark.parametrize("what", WRONG)
def test_the_machine_is_looked_at(what: str, good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend, words = WRONG[what]
    pretend(monkeypatch)
    if what == "interface":
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
def test_it_says_that_nothing_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "-m", "json.tool"]) == 0
    assert capsys.readouterr().out.splitlines() == [NO_CUDA, "nothing found"]


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
    assert main(["--check", "-m", "json.tool"]) == 0
    capsys.readouterr()
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


def test_bad_options_are_reported_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        ["--check", "none.py"],
        ["--check", "-m", "no_such_module"],
        ["--check", "--nnodes", "x", "s"],
    ):
        with pytest.raises(SystemExit) as ended:
            parse_args(line)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith("ftrun: error: ")


def test_the_command_line() -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "no-such0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ft_wrapper.run", "--check", "-m", "json.tool"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120.0)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[0] == NO_CUDA
    assert any(line.startswith("GLOO_SOCKET_IFNAME=no-such0: ") for line in ended.stdout.splitlines())
