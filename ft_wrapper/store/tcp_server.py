"""The server of a TCPStore, which keeps its keys."""

import errno
import logging
import socket
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore as TorchTCPStore
from torch.torch_version import TorchVersion

from .._files import check_open_files, quiet_torch, raise_file_limit
from ..exception import StoreError
from .address import host_port, listening_address
from .base import DEFAULT_TIMEOUT

log = logging.getLogger(__name__)

SERVER_IS_LIBUV = TorchVersion(torch.__version__) >= "2.8"
"""Whether a `TCPStoreServer` is torch's newer server, which takes a socket since pytorch 150215."""
# Key: a rank's monitor hosts the server. Without a namespace, since it is about the server, not about a job.
HOSTED_BY_RANK = "ft_wrapper/hosted_by_rank"
_BACKLOG = 4096  # all ranks of a job connect at once
_FILES_OF_A_SERVER = 12  # files that torch's server opens; without them its error is no more than "uv loop"
#: Errors that waiting does not end.
NO_DESCRIPTORS = errno.EMFILE, errno.ENFILE


class TCPStoreServer:
    """A TCPStore server in this process, which must not be a training process.

    Args:
        port: port to listen on; 0 for a free port.
        host_name: name or address by which clients reach this host.
        by_rank: whether a rank's monitor hosts the server, and closes it after the last goodbye; clients can
            read this.

    Raises:
        StoreError: the port is taken, or the host is unknown.
    """

    def __init__(self, port: int = 0, host_name: str = "localhost", *, by_rank: bool = False) -> None:
        try:
            self._store = serve(host_name, port, DEFAULT_TIMEOUT)
        except socket.gaierror as error:
            raise StoreError(
                f"no store can be hosted at {host_name!r}: the name cannot be looked up here "
                f"({error.strerror}); use an address of this host, or add the name to /etc/hosts"
            ) from error
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise StoreError(f"no store can be hosted at {host_name!r}: {error}") from error
            raise StoreError(
                f"port {port} cannot be used for the coordination store: {error}; choose another MASTER_PORT "
                "(the store takes MASTER_PORT + 1) or pass store_kwargs={'port': ...}"
            ) from error
        self.port: int = self._store.port
        if listening_address(host_name, self.port)[1][0] == "":
            log.info(
                "the store at %s listens on all addresses of this host, for that is no single address of it "
                "here; name an address instead to have it listen there only",
                host_port(host_name, self.port),
            )
        if by_rank:
            self._store.set(HOSTED_BY_RANK, "1")

    def close(self) -> None:
        """Ends the server: first its port is freed, then its connections end.

        At the exit of a process these happen in any order.
        """
        del self._store


def serve(host_name: str, port: int, timeout: timedelta) -> TorchTCPStore:
    """Opens a TCPStore server, which listens on the address of `listening_address`.

    Everybody who reaches the server may read and write everything: a TCPStore knows no users.

    The limit of open files of this process is raised as far as possible, see `raise_file_limit`, and torch's
    C++ code in this process logs errors only.

    The socket is of one family. A server that torch opens itself listens on IPv6 and sees ``127.0.0.1`` as
    ``::ffff:127.0.0.1``, whose name it looks up for each client, and no hosts file has that name.

    Args:
        host_name: name or address by which clients reach this host.
        port: port to listen on; 0 for a free port.
        timeout: timeout of operations on the returned store.

    Raises:
        OSError: the port is taken, the host is unknown, or this process may not open enough files.
    """
    raise_file_limit()
    quiet_torch()
    check_open_files(_FILES_OF_A_SERVER, "a process that hosts a store")
    family, address = listening_address(host_name, port)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
        options["master_listen_fd"] = listener.detach()  # the server closes it
        # The server's own client must not connect elsewhere: it would wait, and nothing ends that wait.
        own = host_name if address[0] else {socket.AF_INET6: "::1"}.get(family, "127.0.0.1")
        return TorchTCPStore(own, port, **options, use_libuv=SERVER_IS_LIBUV)
