"""A store's host that loses its power: the kernel ends the calls on connections to it.

No FIN comes then, and no RST. torch's client reads without a timeout, so a call would be out for as long as
the kernel sends again: 15 minutes, and for ever in a call that waits. A host that lives acknowledges what it
gets though the server is busy or stopped. So its silence says that it is lost, and nothing else does.
"""

import ctypes
import os
import socket
import struct

_libc = ctypes.CDLL(None)  # Python's own sockets would make the descriptors non-blocking


def limit_silence(port: int, seconds: float) -> None:
    """Limits how long the other end of a connection may be silent: then a call on it fails.

    Args:
        port: there. All connections of this process to such a port are meant: torch does not tell which
            descriptor is its.
        seconds: of silence. A call on such a connection fails then with ETIMEDOUT.
    """
    third = max(1, int(seconds / 3))
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,  # where nothing is to be acknowledged
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): third,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): third,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): int(1e3 * seconds),
    }
    peer = ctypes.create_string_buffer(128)  # sizeof(struct sockaddr_storage)
    for fd in map(int, os.listdir("/proc/self/fd")):
        failed = _libc.getpeername(fd, peer, ctypes.byref(ctypes.c_uint32(len(peer)))) != 0
        if not failed and peer.raw[2:4] == struct.pack("!H", port):
            for (level, option), value in options.items():
                _libc.setsockopt(fd, level, option, ctypes.byref(ctypes.c_int(value)), 4)
