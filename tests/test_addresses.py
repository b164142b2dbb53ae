"""How this host is reached."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ft_wrapper._addresses import address_of_this_node, is_loopback, own_address


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("localhost", True),
        ("localhost.localdomain", True),
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node0", False),
    ],
)
def test_loopback(host: str, is_one: bool) -> None:
    assert is_loopback(host) == is_one


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Addresses of names; what is not there is not known."""
    known: dict[str, str] = {}

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(f"{host} is not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (known[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize("towards", ["localhost", "127.0.0.1"])
def test_all_hosts_are_this_one(names: dict[str, str], towards: str) -> None:
    names |= {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    assert own_address(towards) == "127.0.0.1"


def test_own_name_with_a_loopback_address_as_on_debian(names: dict[str, str]) -> None:
    names["node0"] = "127.0.1.1"
    assert own_address("node0") == "node0"


def test_no_way_there(names: dict[str, str]) -> None:
    assert own_address("elsewhere") == socket.gethostname()


@pytest.mark.parametrize(
    ("full_name", "address"),
    [
        ("node0.cluster", "node0.cluster"),
        ("localhost", "node1"),  # what a hosts file says for the loopback and this host's name alike
        ("localhost.localdomain", "node1"),
        ("unknown", "node1"),
    ],
)
def test_name_of_a_node(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch, full_name: str, address: str
) -> None:
    names |= {"node0.cluster": "10.0.0.1", "node1": "127.0.1.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr(socket, "getfqdn", lambda: full_name)
    assert address_of_this_node("node1") == address
    assert address_of_this_node("localhost") == "localhost"
