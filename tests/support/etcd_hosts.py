"""An etcd whose members run on other hosts, network namespaces say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ft_wrapper.exception import StoreUnavailable
from ft_wrapper.testing import EtcdServer

_ANSWER_WITHIN = 2.0  # seconds

# Asks a member from its own host: address, port.
_ASK = f"""
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout={_ANSWER_WITHIN})
connection.request("POST", "/v3/maintenance/status", body="{{}}")
sys.stdout.buffer.write(connection.getresponse().read())
"""


@dataclasses.dataclass(frozen=True)
class EtcdHost:
    """Where a member runs.

    Args:
        address: it listens there; clients and the other members have to reach it.
        before: what to put in front of a command that is to run there: ``ip netns exec NAME``, say. It
            has to become that command, with the same process id; empty on this host.
    """

    address: str = "127.0.0.1"
    before: Sequence[str] = ()


class EtcdOnHosts(EtcdServer):
    """A member on each host. They are asked from there.

    Args:
        hosts: where each member runs.
    """

    def __init__(self, hosts: Sequence[EtcdHost]) -> None:
        super().__init__(len(hosts))
        self._hosts = list(hosts)

    def _prepare(self) -> None:
        super()._prepare()
        for member, host in zip(self._members, self._hosts, strict=True):
            member.address = host.address

    def _command(self, member: Any) -> list[str]:
        return [*self._before(member), *super()._command(member)]

    def _status(self, member: Any) -> dict[str, Any]:
        words = [sys.executable, "-S", "-c", _ASK, member.address, str(member.client_port)]
        try:
            asked = subprocess.run(
                [*self._before(member), *words], capture_output=True, check=True, timeout=2 * _ANSWER_WITHIN
            )
            status: dict[str, Any] = json.loads(asked.stdout)
        except (subprocess.SubprocessError, ValueError) as error:
            raise StoreUnavailable(f"{member.name} does not say how it is: {error!r}") from error
        return status

    def _before(self, member: Any) -> Sequence[str]:
        return self._hosts[self._members.index(member)].before
