"""A node without others: it hosts the store of its ranks, and the record that commands are written into."""

import contextlib
import os
import socket
import threading

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError

from ..exception import StoreError
from ..rendezvous.presence import Watcher
from ..rendezvous.record import Node, RendezvousRecord, RoundPolicy, Seat
from ..rendezvous.register import Board, RecordRegister
from ..rendezvous.workers import announce_endpoint
from ..store import TCPStore, TCPStoreServer, secret
from ..store.address import host_port, loopback
from .ft_nodes import news_in
from .job_in_store import STORE_TIMEOUT
from .node_check import NodeCheck, await_pass
from .nodes import Nodes
from .rounds import Round, alone

_END_TIMEOUT = 5.0


class OneNode(Nodes):
    """No other nodes: this one hosts the store of its ranks, a new one for each round.

    Args:
        nproc: number of ranks.
        address: of this host; the loopback when None, where only this host reaches the store.
        port: where the store listens; 0 for a free port, another one in each round.
        role: what the ranks do.
        check: what the node has to pass before each round; None: nothing.
    """

    def __init__(
        self,
        nproc: int,
        address: str | None = None,
        port: int = 0,
        *,
        role: str = "default",
        check: NodeCheck | None = None,
    ) -> None:
        super().__init__()
        self._check = check
        self._nproc = nproc
        self._address = address or loopback()
        self._port = port
        self._role = role
        self._rounds = 0
        self._of_round = contextlib.ExitStack()
        self._given = secret.job_secret()

    def next_round(self) -> Round:
        self._of_round.close()
        self.inbox.begin_term()
        if self._given is None:  # another one, so that nothing of an earlier round is taken
            secret.use(os.urandom(32))
        if self._check is not None:
            await_pass(self._check, "this node", lambda why: None, threading.Event().wait)
        try:
            server = TCPStoreServer(self._port, self._address)
        except StoreError as error:
            if not self._port:
                raise
            raise ValueError(
                f"--master-port {self._port} cannot be used on this host: {error.__cause__}; choose another "
                "port, or leave it out"
            ) from error
        self._of_round.callback(server.close)
        self._watch(server)
        self._rounds += 1
        return alone(host_port(self._address, server.port), self._nproc)

    def drain(self, within: float, why: str) -> str:
        return "no other node would be left"

    def close(self) -> None:
        self._of_round.close()
        secret.use(self._given)
        super().close()

    def _watch(self, server: TCPStoreServer) -> None:
        """Writes the record, and waits for commands in a thread, to the end of the round."""
        address = host_port(self._address, server.port)
        node = Node(socket.gethostname(), self._rounds, self._address, self._nproc, self._role)
        record = RendezvousRecord(
            min_nodes=1,
            max_nodes=1,
            round=self._rounds,
            complete=True,
            policy=RoundPolicy.RANK,
            formation_size=self._nproc,
            next_slot=self._nproc,
            seats=(Seat(0, 0, self._nproc, self._role, node, node.id),),
        )
        store, term = TCPStore(self._address, server.port, timeout=STORE_TIMEOUT), self.inbox.term

        def look(state: RendezvousRecord) -> None:
            for one in news_in(state, node, record.round):
                self.inbox.put(term, one)

        announce_endpoint(store, record.round, address)
        register = RecordRegister(store, record, Board(on_change=look))
        register.touch()
        waker, watcher = RecordRegister(store.clone(), record), Watcher(node, register)
        watcher.start()

        def end() -> None:
            # The thread is woken first: torch's client would print how it has lost the server.
            watcher.stop()
            with contextlib.closing(waker.store), contextlib.suppress(StoreError, DistError, RendezvousError):
                waker.touch()
                watcher.join(_END_TIMEOUT)

        self._of_round.callback(end)
