"""Where a job can be reached: on the address that is published, and on the loopback only if it is alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_job import FtRun, await_that, write_script
from support.nightly import at_night
from test_network import PORT, Network, _ip, made
from test_nodes import CONF, WRAPPED

from ft_wrapper.agent.options import parse_args
from ft_wrapper.cli.run import meet


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("[::1]", "[::1]"),
        ("192.0.2.1", "127.0.0.1"),  # of another machine
        ("no-such-host.invalid", "127.0.0.1"),
    ],
)
def test_a_node_alone_is_where_the_user_says(
    given: str, used: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = write_script(tmp_path, "")
    with contextlib.closing(meet(parse_args(["--master-addr", given, script]))) as nodes:
        address = nodes.next_round().address
        host, _, port = address.rpartition(":")
        assert host == used
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    warned = [record.getMessage() for record in caplog.records if "--master-addr" in record.getMessage()]
    assert len(warned) == (given.strip("[]") not in ("", host.strip("[]")))


class Unnamed(Network):
    """Hosts that have addresses and no names: none can look up even its own.

    Args:
        size: number of hosts.
        ipv6: whether they have IPv6 addresses only, also on the loopback.
    """

    def __init__(self, size: int, *, ipv6: bool) -> None:
        super().__init__(size)
        self._ipv6 = ipv6

    def address(self, host: int) -> str:
        return f"fd77::{host + 1}" if self._ipv6 else super().address(host)

    def endpoint(self, host: int) -> str:
        """As a user writes it."""
        return f"[{self.address(host)}]:{PORT}" if self._ipv6 else f"{self.address(host)}:{PORT}"

    def _give_address(self, host: int) -> None:
        if self._ipv6:
            where = (f"{self.address(host)}/64", "dev", "eth0", "nodad")
            _ip("-n", self._namespace(host), "-6", "address", "add", *where)
            _ip("-n", self._namespace(host), "address", "del", "127.0.0.1/8", "dev", "lo")
        else:
            super()._give_address(host)

    def _write_names(self, host: int) -> None:
        folder = Path("/etc/netns") / self._namespace(host)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"{'::1' if self._ipv6 else '127.0.0.1'} localhost\n")
        (folder / "nsswitch.conf").write_text("hosts: files\n")


@pytest.fixture
def unnamed(request: pytest.FixtureRequest) -> Iterator[Unnamed]:
    """Two hosts."""
    with made(Unnamed(2, ipv6=request.param == "ipv6")) as network:
        yield network


@pytest.mark.parametrize("unnamed", ["ipv6", *at_night("IPv6 runs always", ["ipv4"])], indirect=True)
def test_hosts_without_names_meet_and_listen_where_they_are_published(
    tmp_path: Path, unnamed: Unnamed
) -> None:
    script, shared = write_script(tmp_path, WRAPPED), tmp_path / "shared"
    shared.mkdir()
    with contextlib.ExitStack() as exits:
        nodes = [
            exits.enter_context(
                FtRun(
                    tmp_path / f"node{host}",
                    *("--nnodes", "2", "--nproc-per-node", "1"),
                    *("--rdzv-endpoint", unnamed.endpoint(0), "--rdzv-conf", CONF, "--node-id", str(host)),
                    *(script, str(shared)),
                    before=unnamed.command(host),
                )
            )
            for host in range(2)
        ]
        await_that(lambda: len(list(shared.glob("in.2.0.?"))) == 2, *nodes)
        listening = [listening_in(node.process.pid) for node in nodes]
        (shared / "finish").touch()
        for node in nodes:
            assert node.end() == 0, node.said
    # The rendezvous' store, that of the job, and that of the iteration; on the other host nothing.
    assert listening == [{unnamed.address(0)}, set()]


@pytest.mark.parametrize("unnamed", ["ipv4"], indirect=True)
def test_a_name_that_torch_cannot_look_up_is_advised_on(tmp_path: Path, unnamed: Unnamed) -> None:
    """Torch's own rendezvous looks up the host's name, whatever its endpoint is."""
    script = write_script(tmp_path, "")
    options = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", unnamed.endpoint(0))
    with FtRun(tmp_path / "job", *options, script, before=unnamed.command(0)) as job:
        assert job.end() == 2, job.said
    (line,) = [line for line in job.said.splitlines() if line.startswith("ftrun: error: ")]
    assert f"this host's own name, {socket.gethostname()}, can be looked up here (/etc/hosts)" in line


def listening_in(pid: int) -> set[str]:
    """Where somebody listens in the network namespace of a process."""
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                words = bytes.fromhex(local.rpartition(":")[0])
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, address))
    return found
