"""Jobs on etcd whose results show what was lost: three nodes of two ranks, four of which train."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agent_job import FtRun, await_that
from test_nodes import CONF, Cluster
from training_rank import ACTIVE, expected, newest

from ft_wrapper.store.address import EtcdAddress

RANK = Path(__file__).with_name("training_rank.py")


class Training(Cluster):
    """A job of `training_rank`.

    Args:
        folder: for all files.
        endpoints: of etcd.
        conf: further options of the rendezvous.
        nnodes: how many nodes; of three, one may be lost.
        settings: of the wrapper.
    """

    reconnects = "20"

    def __init__(
        self, folder: Path, endpoints: str, conf: str = "", *, nnodes: str = "2:3", **settings: Any
    ) -> None:
        super().__init__(folder, "", nnodes=nnodes, nproc=2)
        self.script = RANK
        self.arguments = [json.dumps(settings)]
        self._endpoint = endpoints
        self._conf = CONF.replace("last_call_timeout=0.2", "last_call_timeout=60") + conf
        self._options = ["--nnodes", nnodes, "--nproc-per-node", "2", "--active-world-size", str(ACTIVE)]
        self._options += ["--rdzv-backend", "etcd", "--rdzv-id", "job"]

    @property
    def address(self) -> str:
        files = {"ca": "CACERT", "cert": "CERT", "key": "KEY"}
        tls = {name: os.environ.get(f"ETCDCTL_{variable}") for name, variable in files.items()}
        return str(EtcdAddress(self._endpoint, "ft_wrapper/job", **tls))

    def trained(self) -> tuple[int, int]:
        """The latest iteration, and how many steps were made by then."""
        kept = newest(self.shared)
        return (-1, 0) if kept is None else (int(kept.stem), json.loads(kept.read_text())["step"])

    def go_on(self, *nodes: FtRun, steps: int = 30) -> int:
        """Waits for so many further steps; the iteration that has made the last one."""
        wanted = self.trained()[1] + steps
        await_that(lambda: self.trained()[1] >= wanted, *nodes)
        return self.trained()[0]

    def await_active(self, slots: list[int], *nodes: FtRun) -> int:
        """Waits until these slots train; returns in which iteration."""
        await_that(lambda: self._active(nodes) == slots, *nodes)
        return self.trained()[0]

    def await_all(self, *nodes: FtRun) -> int:
        """Waits until all ranks of these nodes train, or are spares; returns in which iteration."""
        ranks = 2 * len(nodes)
        await_that(lambda: len([*self.shared.glob(f"{self.trained()[0]}.*.in")]) == ranks, *nodes)
        return self.trained()[0]

    def _active(self, nodes: tuple[FtRun, ...]) -> list[int]:
        iteration = self.trained()[0]
        entered = (record for node in nodes for record in node.events("enter"))
        return sorted(record["slot"] for record in entered if record["iteration"] == iteration)

    def finish(self, *nodes: FtRun) -> None:
        super().finish(*nodes)
        kept = newest(self.shared)
        assert kept is not None
        result = json.loads(kept.read_text())
        assert result["weights"] == expected(result["step"])
