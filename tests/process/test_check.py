"""The preflight: each finding and its remedy, the commands that print them, and the log of a job."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ft_wrapper import check
from ft_wrapper.check import Finding
from ft_wrapper.cli import run
from ft_wrapper.cli.run import NO_CUDA
from ft_wrapper.run import main

NOW = 1_800_000_000.0
ETHERNET = ("lo", "eth0")


def test_a_finding_is_one_line() -> None:
    assert str(Finding("what", "why", "remedy")) == "what: why; remedy"


IFNAME, WATCHDOG = "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RETHROW, TRACE = "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_TRACE_BUFFER_SIZE"
BEAT, GLOO = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "GLOO_SOCKET_IFNAME"
OLDER, NVLS = "NCCL_ASYNC_ERROR_HANDLING", "NCCL_NVLS_ENABLE"
MINUTES = timedelta(minutes=10)
# What looks; with what it finds something, and with what it does not; what to do.
LOOKS: list[tuple[Callable[..., Iterator[Finding]], list[tuple[Any, ...]], list[tuple[Any, ...]], str]] = [
    (
        lambda *version: check.nccl_version(version),
        [(2, 25, 1), (2, 28, 3), (2, 28, 8)],
        [(2, 26, 2), (2, 28, 2), (2, 28, 9), (2, 29, 3)],
        "or newer",
    ),
    (check.nvls, [({},), ({NVLS: "1"},)], [({NVLS: "0"},)], f"set {NVLS}=0"),
    (
        check.rethrown_errors,
        [({RETHROW: "1"},)],
        [({},), *(({RETHROW: no},) for no in ("0", "False", "no"))],
        f"unset it, or set {RETHROW}=0",
    ),
    (
        check.async_errors,
        [({WATCHDOG: "1"},), ({OLDER: "2"},)],
        [({},), ({WATCHDOG: "0"},), ({OLDER: "2", WATCHDOG: "0"},)],
        "NCCL_ASYNC_ERROR_HANDLING=0",
    ),
    (
        check.heartbeat,
        [({BEAT: "90"}, 90.0), ({}, 500.0)],
        [({BEAT: "91"}, 90.0), ({}, 479.0), ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, 500.0)],
        "set it above ",
    ),
    (check.group_timeout, [(MINUTES, 600.0)], [(MINUTES, 599.0)], "a timeout above 600 s"),
    (
        check.flight_recorder,
        [({TRACE: "0"},)],
        [({},), ({"TORCH_FR_BUFFER_SIZE": "9", TRACE: "0"},)],
        "set TORCH_FR_BUFFER_SIZE=2000",
    ),
    (check.open_files, [(1024, 512)], [(1024, 8), (2176, 512)], "ulimit -n 2176"),
    (check.shared_memory, [(64 << 20,), (None,)], [(1 << 30,)], "--shm-size"),
    (check.clock, [(0.0, True, 1), (NOW, False, 2)], [(NOW, True, 2), (NOW, False, 1)], "run chrony"),
    (
        check.gloo_interface,
        [({GLOO: "eth0,ib0"}, ETHERNET)],
        [({GLOO: "eth0"}, ETHERNET), ({}, ())],
        "name one of eth0, lo",
    ),
    (
        check.nccl_interface,
        [({IFNAME: text}, ETHERNET) for text in ("ib", "=eth", "^eth,lo")],
        [({IFNAME: text}, ETHERNET) for text in ("", "eth", "=eth0", "^eth", "^=eth", "ib,eth")],
        "name one of eth0, lo",
    ),
    (
        check.own_name,
        [("host7", ["127.0.1.1", "::1"], {}, 2), ("host7", [], {}, 2)],
        [
            ("host7", ["127.0.1.1"], {}, 1),
            ("host7", ["127.0.1.1", "10.0.0.7"], {}, 2),
            ("host7", ["fe80::1%eth0"], {}, 2),
            ("host7", ["127.0.1.1"], {GLOO: "eth0"}, 2),
        ],
        f"set {GLOO}",
    ),
    (check.reverse_lookup, [("node0", 5.012)], [("node0", 0.049)], "into /etc/hosts, or run a cache"),
]


@pytest.mark.parametrize(("look", "wrong", "right", "remedy"), LOOKS)
def test_what_is_wrong_is_found_with_a_remedy_and_what_is_right_is_not(
    look: Callable[..., Iterator[Finding]],
    wrong: list[tuple[Any, ...]],
    right: list[tuple[Any, ...]],
    remedy: str,
) -> None:
    for arguments in wrong:
        (found,) = look(*arguments)
        assert remedy in found.remedy and all(dataclasses.astuple(found)) and "\n" not in str(found)
    assert [one for arguments in right for one in look(*arguments)] == []


# The machine -----------------------------------------------------------------------------------------------


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a rank of two nodes, on a machine with which nothing is wrong."""
    monkeypatch.setattr(check, "_is_clock_synchronized", lambda: True)
    monkeypatch.setattr(check, "_addresses", lambda _: ["10.0.0.7"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=1 << 40))
    return {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "16"}


def test_the_machine_is_looked_at(good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.preflight(good) == []
    small = SimpleNamespace(total=1 << 40, free=1 << 20)
    for module, name, pretended, words in (
        (resource, "getrlimit", lambda _: (64, 64), "limit of 64 open files"),
        (shutil, "disk_usage", lambda _: small, "1 MiB free in /dev/shm"),
        (check, "_is_clock_synchronized", lambda: False, "the clock is not"),
        (check, "_addresses", lambda _: [], "cannot be looked up"),
        (socket, "if_nameindex", lambda: [(1, "ib0")], "interface eth7"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, pretended)
            more = {"GLOO_SOCKET_IFNAME": "eth7"} if module is socket else {}
            (found,) = check.preflight({**good, **more})
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
    words = [
        *("NCCL 2.28.5", NVLS, RETHROW, WATCHDOG, BEAT),
        *("process groups", "TORCH_FR_BUFFER_SIZE", IFNAME),
    ]
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
    monkeypatch.setattr(run, "_lookup_seconds", lambda host: 0.0)


def test_the_name_service_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch asks: for an IPv4 address that is written as an IPv6 one."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getnameinfo", lambda address, flags: asked.append(address[0]))
    assert run._lookup_seconds("127.0.0.1") > 0.0
    assert run._lookup_seconds("no-such-host.invalid") == 0.0
    assert asked == ["::ffff:127.0.0.1"]


@pytest.mark.usefixtures("without_cuda")
def test_the_options_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(*options: str) -> str:
        """What is said; and the exit code is that of a finding."""
        code = main(["--check", *options, "-m", "json.tool"])
        said = capsys.readouterr().out
        assert (code == 0) == said.endswith("nothing found\n")
        return said

    nodes = ("--rdzv-endpoint", "other:29400", "--nproc-per-node", "8", "--nnodes")
    with monkeypatch.context() as patch:
        patch.setattr(check, "_is_clock_synchronized", lambda: False)
        assert "nothing found" in finds("--nnodes", "1")
        assert "the clock is not synchronized" in finds(*nodes, "2")
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
        assert "nothing found" in finds(*nodes, "2")
        assert "a rank of 512" in finds(*nodes, "2:64")
    with monkeypatch.context() as patch:
        patch.setattr(run, "_lookup_seconds", lambda host: 5.0)
        assert "the reverse look-up of 127.0.0.1 took 5 s" in finds()
        assert "the reverse look-up of other took 5 s: torch asks" in finds(*nodes, "2")
    monkeypatch.setattr(check, "has_cuda", lambda: True)
    monkeypatch.setattr(check, "_installed_nccl", lambda: (2, 25, 1))
    said = finds()
    assert "NCCL 2.25.1: " in said and NO_CUDA not in said


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
