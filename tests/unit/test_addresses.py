"""How this host is reached."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ft_wrapper.store.address import (
    address_of_this_node,
    host_port,
    is_loopback,
    is_this_host,
    listening_address,
    own_address,
    split_host_port,
)


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

    def look_up(host: str, port: int | None, **_: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(f"{host} is not known")
        return [
            (socket.AF_INET6, socket.SOCK_DGRAM, 0, "", (address, port or 0, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, port or 0))
            for address in known[host].split()
        ]

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


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("node0:1", "node0", 1), ("10.0.0.1:29400", "10.0.0.1", 29400), ("[fd00::1]:29400", "fd00::1", 29400)],
)
def test_endpoint_as_text(text: str, host: str, port: int) -> None:
    assert split_host_port(text) == (host, str(port))
    assert host_port(host, port) == text


FOREIGN = "192.0.2.1"  # for documentation: no one's


@pytest.mark.parametrize(
    ("host", "found", "where"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "::1 127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1 127.0.0.2", ""),  # which of them others try first no one knows
        ("node0", "127.0.1.1", ""),  # Debian's hosts file; other hosts know another address
        ("service", FOREIGN, ""),  # of a proxy
        ("service", f"{FOREIGN} 127.0.0.1", ""),
    ],
)
def test_a_server_listens_where_it_is_published(
    names: dict[str, str], host: str, found: str, where: str
) -> None:
    names[host] = found
    family, address = listening_address(host, 7)
    assert (family, address) == (socket.AF_INET, (where, 7))


def test_a_host_knows_its_own_addresses(names: dict[str, str]) -> None:
    names |= {"localhost": "127.0.0.1", "node0": "127.0.1.1", "node1": FOREIGN, "all": f"{FOREIGN} 127.0.0.1"}
    assert [is_this_host(host) for host in ("localhost", "node0", "node1", "all", "unknown")] == [
        *(True, True, False, True, False)
    ]
