"""What somebody else does to a job whose store they reach: ``stranger.py OWN HOST PORT ATTACKS FOLDER``.

Runs as nobody, from address OWN. Prints how much it received. Forged keys of all kinds, by which ranks agree,
are in tests/simulation/protocol/test_stranger.py.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ft_wrapper.protocol import keys

NOBODY = 65534
SECONDS = 6.0  # for what may have to wait for the job
LIVE = "ft_wrapper/1/live/state/sealed"


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


class Stranger:
    """Somebody at a job's store.

    Args:
        own: its own address, as the job's hosts reach it.
        host: of the store.
        port: of the store.
        folder: where what it makes others run leaves a trace.
    """

    def __init__(self, own: str, host: str, port: int, folder: Path) -> None:
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
        self.own, self.host, self.port = own, host, port
        self.evil = Evil(f"touch {folder}/ran_code")
        self.received = 0
        head = self.read(keys.HEAD).split()
        _, n, self.nonce = head[0].split(":") if head else ("0", "0", "")  # none where only nodes meet
        self.n = int(n)

    def read(self, key: str) -> str:
        """What a key holds."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    # ---- attacks

    def own_store(self) -> None:
        """Hosts a store as rank 0 and points the next iteration's ranks at it."""
        with socket.socket() as free:
            free.bind((self.own, 0))
            port = free.getsockname()[1]
        text = f"{self.own} {port} 2 2"
        waiting = threading.Thread(target=self._wait_as_rank_0, args=(port,), daemon=True)
        waiting.start()
        self.store.set(keys.meeting(self.n + 1), text)
        self.ask_for_restart()
        deadline = time.monotonic() + SECONDS
        while waiting.is_alive() and time.monotonic() < deadline:
            self.store.set(keys.meeting(self.n + 1), text)  # again: rank 0 may have written its own
            self.store.set(keys.wake_meeting(self.n + 1), text)
            waiting.join(0.001)

    def _wait_as_rank_0(self, port: int) -> None:
        limit = timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", f"tcp://{self.own}:{port}", rank=0, world_size=2, timeout=limit)
        self.received += 1
        said: list[Any] = [None, None]
        for _ in range(4):
            dist.all_gather_object(said, self.evil)

    def ask_for_restart(self) -> None:
        """Ends the iteration, as ``ftrun restart`` does."""
        self.store.compare_set(keys.end(self.n), "", "fault")
        self.store.set(keys.wake_end(self.n), "1")

    def stop(self) -> None:
        """Closes the job in the record of its nodes."""
        record = "ft_wrapper/rendezvous/1/state"
        changed = json.loads(self.read(record).rpartition(" ")[0] or self.read(record))
        changed |= {"closed": True, "version": changed["version"] + 1}
        self.store.set(record, json.dumps(changed))
        self.store.set(f"ft_wrapper/rendezvous/1/version/{changed['version']}", "")

    def forget_progress(self) -> None:
        """Says that the state is at another recovery."""
        for key in self.store.list_keys():
            if "/live/" in key:
                self.store.set(key, "99 99")

    def by_command(self) -> None:
        """Runs ftrun's own commands."""
        from ft_wrapper.cli.main import main

        endpoint = f"{self.host}:{self.port}"
        assert main(["restart", endpoint]) != 0
        assert main(["drain", "0", endpoint]) != 0
        assert main(["stop", endpoint]) != 0

    def ask_the_agent(self) -> None:
        """Asks the job's agent for its secret."""
        for agent in self.read("ft_wrapper/agents").split():
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(SECONDS)
                line.connect(f"\0{agent}")
                with contextlib.suppress(BrokenPipeError):  # refused before it is read
                    line.sendall(b"?")
                _, fds, _, _ = socket.recv_fds(line, 100, 1)
                self.received += len(fds)

    def connect_to_ranks(self) -> None:
        """Connects to all that listens, and guesses what a rank would say."""
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].split(":")[1], 16)
            if fields[3] != "0A" or port == self.port:
                continue
            for hello in (
                bytes(20),
                self.nonce.encode().ljust(16, b"\0") + bytes(4),
                pickle.dumps(self.evil),
            ):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as peer:
                    peer.settimeout(0.2)
                    peer.sendall(hello)
                    self.received += len(peer.recv(1 << 16)) >= 1 << 10

    def race_for_gloo(self) -> None:
        """Overwrites what ranks say of themselves in the store that ``torch.distributed`` uses."""
        host, port, *_ = self.read(keys.meeting(self.n)).split()
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=5))
        for key in store.list_keys() if hasattr(store, "list_keys") else []:
            store.set(key, pickle.dumps(self.evil))

    def forge_reports(self) -> None:
        """Writes what ranks tell people, and what a checkpoint's rank 0 tells the others."""
        self.store.append(keys.faults(self.n), "{}\n")
        self.store.set(keys.restarted(self.n + 1), "{}")
        for key in self.store.list_keys():
            if "/barrier/" in key:
                self.store.set(key, pickle.dumps(self.evil))


ATTACKS = [name for name, of in vars(Stranger).items() if inspect.isfunction(of) and name[0] != "_"]
ATTACKS.remove("read")


def main() -> None:
    """Makes attacks, with commas between their names, one after the other."""
    own, host, port, attacks, folder = sys.argv[1:]
    "localhost".encode("idna")  # while it can still read the modules that this imports
    import ft_wrapper.cli.control
    import ft_wrapper.cli.main  # noqa: F401

    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    stranger = Stranger(own, host, int(port), Path(folder))
    for attack in attacks.split(","):
        getattr(stranger, attack)()
    print(f"received {stranger.received}", flush=True)
    os._exit(0)  # torch would wait for peers that do not come


if __name__ == "__main__":
    main()
