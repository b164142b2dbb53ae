"""An etcd that wants to know who asks."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any

from ft_wrapper.store.address import parse_endpoints
from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.testing import EtcdServer


def require_login(server: EtcdServer, passwords: Mapping[str, str], below: Mapping[str, str]) -> None:
    """From now on etcd answers users only.

    Args:
        server: etcd.
        passwords: of all users; one of them is root.
        below: the prefix of each user who may read and write below it, and nothing else; others may do all.
    """
    for user, password in passwords.items():
        role = user if user in below else "root"
        _ask(server, "user/add", {"name": user, "password": password})
        if role == user:
            _ask(server, "role/add", {"name": role})
        if user in below:
            permission = Range.prefix(below[user].encode()).json | {"permType": "READWRITE"}
            _ask(server, "role/grant", {"name": role, "perm": permission})
        _ask(server, "user/grant", {"user": user, "role": role})
    _ask(server, "enable", {})


def _ask(server: EtcdServer, path: str, body: dict[str, Any]) -> None:
    # Once, and with patience: etcd would refuse a repetition, because the user is there already.
    member = parse_endpoints(server.endpoints)[0]
    with contextlib.closing(http.client.HTTPConnection(member.host, member.port, timeout=60.0)) as connection:
        connection.request("POST", f"/v3/auth/{path}", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, (path, response.read())
