"""Loss of power on a store's host: the kernel ends the calls on connections to it.

Then neither FIN nor RST comes. torch's client reads without a timeout, so a call would last for as long as
the kernel retransmits: 15 minutes, or for ever in a call that waits. A living host acknowledges packets even
if the server is busy or stopped. So silence of the host shows that it is lost, and nothing else does.
"""

import ctypes
import os
import socket
import struct

_libc = ctypes.CDLL(None)  # Python's socket objects would make the descriptors non-blocking


def limit_silence(port: int, seconds: float) -> None:
    """Limits how long the host at the other end of a connection may be silent.

    Args:
        port: port at the other end. The limit is set on all connections of this process to such a port, since
            torch does not name the descriptor of its connection.
        seconds: seconds of silence after which a call on a connection fails with ETIMEDOUT.
    """
    third = max(1, int(seconds / 3))
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,  # for connections on which nothing is sent
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
