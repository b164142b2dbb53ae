"""Jobs of real rank processes for the tests of the wrapper.

All ranks are forked from one template process that has imported torch and ft_wrapper and runs one thread, so
that a rank starts in milliseconds. A rank runs a module-level function of a test file, its *body*; it talks
to the test over a socket of its own (`Rank.say`, `Rank.hear`; `Job.expect`, `Job.tell`), so no test has to
wait for time to pass. Once the body is through, the rank says what it left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import gc
import importlib
import inspect
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ft_wrapper import Limits
from ft_wrapper.store import StoreMixin, TCPStore, TCPStoreServer
from ft_wrapper.store.address import EtcdAddress
from ft_wrapper.store.plan import connect_etcd
from ft_wrapper.testing.etcd_server import free_port

sys.path.append(str(Path(__file__).parents[2]))
from support.ends import end_quickly
from support.warm_ftrun import start_python

TIMEOUT = 120.0
"""Seconds after which a wait of these tests counts as a hang, however busy the machine is."""

# What every wrapped function of these tests gets unless it says otherwise: nothing times out on a busy
# machine, and missed events are noticed soon.
SETTINGS: dict[str, Any] = {
    "soft_timeout": 20.0,
    "hard_timeout": 25.0,
    "barrier_timeout": 30.0,
    "completion_timeout": 30.0,
    "heartbeat_timeout": 20.0,
    "heartbeat_interval": 0.2,
    "monitor_thread_interval": 0.2,
    "monitor_process_interval": 0.2,
    "progress_watchdog_interval": 0.2,
    "termination_grace_time": 0.5,
}


def with_limits(**settings: Any) -> dict[str, Any]:
    """Arguments of Wrapper; those of Limits are in ``limits``."""
    ours = settings.keys() & inspect.signature(Limits).parameters.keys()
    return {"limits": Limits(**{name: settings.pop(name) for name in ours}), **settings}


# Variables that inductor sets for its own use; and what says which process the environment belongs to.
_STAY = ("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "FT_WRAPPER_PROCESS")
_WRITTEN_WITHIN = 2.0  # seconds
_REAPED_WITHIN = 5.0  # seconds; a thread that was joined is in /proc for a moment longer
_NATIVE = ("pt_gloo_runloop", "gloo_tcp_loop", "pt_tcpstore", "pt_nccl")


class Collective:
    """A context manager that holds the file by which a test keeps the ranks of a job outside collectives.

    Gloo loses a send to a peer that is killed in mid-traffic, about once in 1,500 times, and the sender hangs
    until its monitor ends it. So a test that counts on the survivors kills between two collectives.

    Args:
        directory: of what the job's ranks print.
        how: ``LOCK_SH`` in the ranks, while one of them is in a collective; ``LOCK_EX`` in the test.
    """

    def __init__(self, directory: Path, how: int) -> None:
        self._path = directory / "collective"
        self._how = how

    def __enter__(self) -> None:
        self._file = self._path.open("a")
        fcntl.flock(self._file, self._how)

    def __exit__(self, *_: object) -> None:
        self._file.close()


# ---- in the rank --------------------------------------------------------------------------------------


class Rank:
    """What a body is given.

    Args:
        slot: its RANK at the start.
        line: the socket to the test.
        store_settings: of the wrapper, so that the job is on the store that the test is run on.
        directory: of what the job's ranks print.
    """

    def __init__(
        self, slot: int, line: socket.socket, store_settings: dict[str, Any], directory: Path
    ) -> None:
        self.slot = slot
        self.collective = Collective(directory, fcntl.LOCK_SH)
        self.store_settings = store_settings
        self._line = line
        self._unread = b""

    @property
    def store(self) -> str:
        """Which kind of store the job is on: ``tcp`` or ``etcd``."""
        return "etcd" if self.store_settings else "tcp"

    def say(self, event: str, **fields: Any) -> None:
        """Tells the test something."""
        self._line.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")

    def hear(self) -> str:
        """Waits until the test says something."""
        while b"\n" not in self._unread:
            data = self._line.recv(4096)
            if not data:
                raise EOFError("the test is gone")
            self._unread += data
        word, _, self._unread = self._unread.partition(b"\n")
        return word.decode()

    def await_word(self) -> None:
        """Waits until the test has said something, and leaves it unread: for functions that start again."""
        if not self._unread and not self._line.recv(1, socket.MSG_PEEK):
            raise EOFError("the test is gone")

    def is_told(self) -> bool:
        """Whether the test has said something; does not wait, and leaves it unread."""
        return bool(self._unread) or bool(select.select([self._line], [], [], 0)[0])

    def hang(self) -> NoReturn:
        """Lives, and does nothing."""
        while True:
            time.sleep(1000)

    def train(self) -> NoReturn:
        """Makes progress for ever."""
        while True:
            time.sleep(0.02)


@dataclasses.dataclass
class Things:
    """What a process has."""

    threads: list[str]
    native: list[str]
    descriptors: dict[int, str]
    children: list[int]
    handlers: dict[str, str]
    environment: dict[str, str]
    hooks: list[str]

    @classmethod
    def here(cls) -> Things:
        """Looks."""
        gc.collect()
        native, children = [], []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                native.append(Path(task, "comm").read_text().strip())
                children += [int(pid) for pid in Path(task, "children").read_text().split()]
        descriptors = {}
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{entry}")
                if target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")):
                    descriptors[int(entry)] = target
        handlers = {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()}
        status = Path("/proc/self/status").read_text().splitlines()
        handlers.update(
            {name: value for name, _, value in (line.partition(":") for line in status) if name[:3] == "Sig"}
        )
        for pending in ("SigPnd", "SigQ"):
            handlers.pop(pending, None)
        return cls(
            [thread.name for thread in threading.enumerate()],
            [name for name in native if name.startswith(_NATIVE)],
            descriptors,
            children,
            handlers,
            {name: value for name, value in os.environ.items() if name not in _STAY},
            [str(sys.excepthook), str(threading.excepthook), str(os.getcwd())],
        )

    def beyond(self, before: Things) -> list[str]:
        """Says what there is now that was not there, or is gone or changed."""
        left = []
        for field in dataclasses.fields(self):
            now, was = getattr(self, field.name), getattr(before, field.name)
            if isinstance(now, dict):
                now, was = sorted(now.items()), sorted(was.items())
            for thing in now:
                if thing in was:
                    was = was[: was.index(thing)] + was[was.index(thing) + 1 :]
                else:
                    left.append(f"{field.name}: {thing}")
            left += [f"{field.name}: no more {thing}" for thing in was]
        return left


def _run_rank(request: dict[str, Any], line: socket.socket) -> None:
    os.environ.clear()
    os.environ.update(request["env"])
    out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    import torch

    torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # what it keeps for good
    faulthandler.register(signal.SIGTERM, chain=True)  # what a rank was in that its monitor ended
    SETTINGS["monitor_process_logfile"] = request["output"].replace("slot-", "monitor-of-slot-")
    directory = Path(request["output"]).parent
    rank = Rank(request["slot"], line, _store_settings(request["store"]), directory)
    SETTINGS.update(rank.store_settings)
    body: Any = importlib.import_module(request["module"])
    for name in request["body"].split("."):
        body = getattr(body, name)
    before = Things.here()
    try:
        value = body(rank, *request["args"], **request["kwargs"])
    except BaseException as error:
        said = {"error": type(error).__name__, "text": str(error)}
        left = _left(before, error)
        rank.say("raised", **said, left=left)
        raise
    rank.say("returned", value=value, left=_left(before, None))


def _store_settings(store: dict[str, Any]) -> dict[str, Any]:
    """What tells the wrapper which store to use; nothing for the one that rank 0's monitor hosts."""
    if not store:
        return {}
    from ft_wrapper.store import EtcdStore

    return {"store_factory": EtcdStore, "store_kwargs": store}


def _without_kept(left: list[str]) -> list[str]:
    """All but what is kept until the next call, or the process's end.

    One monitor, which keeps watch; the socket to it; and two to the store, of the call and its thread.
    """
    for kind, kept in (("children: ", 1), ("descriptors: (", 3)):
        of_kind = [thing for thing in left if thing.startswith(kind)]
        of_kind = [thing for thing in of_kind if kind == "children: " or "socket:" in thing]
        left = [thing for thing in left if thing not in of_kind[:kept]]
    return left


def _left(before: Things, error: BaseException | None) -> list[str]:
    while error is not None:  # its frames hold what the test's own body holds
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    deadline = time.monotonic() + _REAPED_WITHIN
    while True:
        left = Things.here().beyond(before)
        if time.monotonic() > deadline or not any(thing.startswith("native: ") for thing in left):
            return left
        time.sleep(0.01)  # nothing tells when the kernel is through with a thread that was joined


# ---- the template -------------------------------------------------------------------------------------


def template_main() -> None:
    """All of the template, whose stdout is its control socket; returns in each rank forked from it."""
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    Path("/proc/self/comm").write_text(f"ranks-{os.getpid()}")
    gc.disable()  # a fifth of the imports' time
    import pytest  # noqa: F401
    import torch
    import torch.distributed

    import ft_wrapper.store.etcd
    import ft_wrapper.testing.inject_fault
    from ft_wrapper.torch_groups.warm_up import import_lazy_modules

    for name in ft_wrapper.__all__:  # each is loaded at its first use
        getattr(ft_wrapper, name)
    import_lazy_modules()  # what each rank with an optimizer, or a sharded model, would import
    importlib.import_module("torch.distributed.checkpoint")
    torch.set_num_threads(1)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the template has {threads} threads; a fork of it may hang")
    gc.collect()
    gc.freeze()
    gc.enable()
    control.send(b"{}")
    ranks: dict[int, int] = {}  # pidfd: pid
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                pidfd = int(key.fd)
                selector.unregister(pidfd)
                os.close(pidfd)
                pid = ranks.pop(pidfd)
                _, status = os.waitpid(pid, 0)
                control.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
                continue
            data, fds, _, _ = socket.recv_fds(control, 1 << 18, 1)
            if not data:
                for pid in ranks.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                selector.close()
                for pidfd in ranks:
                    os.close(pidfd)
                control.close()
                try:
                    _run_rank(request, socket.socket(fileno=fds[0]))
                except SystemExit as error:
                    end_quickly(error.code)
                    raise
                except BaseException:
                    traceback.print_exc()
                    end_quickly(1)
                    raise
                end_quickly()
                return
            os.close(fds[0])
            pidfd = os.pidfd_open(pid)
            ranks[pidfd] = pid
            selector.register(pidfd, selectors.EVENT_READ)
            control.send(json.dumps({"started": pid}).encode())


class Template:
    """The test's handle on the template process.

    Args:
        path: where ranks look for bodies, beside here.
    """

    def __init__(self, *path: str) -> None:
        self.control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = start_python(
            ["-c", "import rank_harness; rank_harness.template_main()"],
            stdout=there.fileno(),
            stderr=2,
            start_new_session=True,
            path=[str(Path(__file__).parent), *path],
        )
        there.close()
        self.control.settimeout(TIMEOUT)
        if not self.control.recv(1 << 10):
            raise RuntimeError("the template process did not start")

    def start(self, request: dict[str, Any], line: socket.socket) -> None:
        socket.send_fds(self.control, [json.dumps(request).encode()], [line.fileno()])

    def close(self) -> None:
        self.control.close()
        self.process.wait(TIMEOUT)

    def await_ends(self) -> None:
        """Waits until all ranks and monitors have ended."""
        for pid in self.descendants():
            await_end(pid)

    def descendants(self) -> list[int]:
        """All processes forked from the template, ranks and monitors, that live: they have its name."""
        found = []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            with contextlib.suppress(OSError):
                name = Path("/proc", str(pid), "comm").read_text().strip()
                if name == f"ranks-{self.process.pid}" and pid != self.process.pid:
                    found.append(pid)
        return found


# ---- the job ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Process:
    """The test's handle on a rank.

    Args:
        slot: its RANK at the start.
        line: the socket to it.
        output: what it and its log said.
        pid: its process; 0 until it is known.
        code: its exit code, minus the signal if one ended it; None while it lives.
        messages: all that it said.
    """

    slot: int
    line: socket.socket
    output: Path
    pid: int = 0
    code: int | None = None
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    unread: bytes = b""
    expected: int = 0

    def said(self, event: str) -> list[dict[str, Any]]:
        """What it said of that kind."""
        return [message for message in self.messages if message["event"] == event]

    @property
    def value(self) -> Any:
        """What its body returned."""
        returned = self.said("returned")
        assert returned, f"slot {self.slot} did not return but {self.messages[-1:]}, exit code {self.code}"
        return returned[0]["value"]

    @property
    def error(self) -> str:
        """Name of the exception that its body raised."""
        raised = self.said("raised")
        assert raised, f"slot {self.slot} did not raise but {self.messages[-1:]}, exit code {self.code}"
        return str(raised[0]["error"])

    @property
    def text(self) -> str:
        """The exception's message."""
        assert self.error
        return str(self.said("raised")[0]["text"])

    @property
    def log(self) -> str:
        """All that it printed and logged."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Job:
    """Rank processes of one test.

    Args:
        template: whose forks they are.
        directory: for what they print.
        etcd: where the ranks' keys are; in a TCPStore that the monitor of rank 0 hosts when None.
    """

    def __init__(self, template: Template, directory: Path, etcd: EtcdAddress | None = None) -> None:
        self.ranks: dict[int, Process] = {}
        self.past: list[Process] = []
        """Processes whose slot was started again."""
        self.etcd = etcd
        self.store_is_elsewhere = etcd is not None
        self._requests: dict[int, dict[str, Any]] = {}
        self._template = template
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._selector.register(template.control, selectors.EVENT_READ)
        self._starting: list[Process] = []

    @contextlib.contextmanager
    def announced_store(self) -> Iterator[tuple[StoreMixin, str]]:
        """A store that is there before all ranks, and after them, as an agent has one.

        Returns:
            A client of it, and its address, which the ranks are to find in FT_WRAPPER_STORE.
        """
        self.store_is_elsewhere = True
        with contextlib.ExitStack() as owned:
            store: StoreMixin
            if self.etcd is not None:
                address = str(self.etcd)
                store = connect_etcd(self.etcd, timedelta(seconds=TIMEOUT), begins=True)
            else:
                server = TCPStoreServer(0, "127.0.0.1")
                owned.callback(server.close)
                address = f"127.0.0.1:{server.port}"
                store = TCPStore("127.0.0.1", server.port)
            owned.callback(store.close)
            yield store, address

    def start(
        self,
        world_size: int,
        body: Callable[..., Any],
        *args: Any,
        env: dict[str, str | None] | None = None,
        slots: list[int] | None = None,
        **kwargs: Any,
    ) -> Job:
        """Starts ranks.

        Args:
            world_size: what they are told as WORLD_SIZE.
            body: the module-level function that they run, with a `Rank` and
            args: these, as JSON.
            env: further variables; None removes one.
            slots: which ranks to start; all when None.
            kwargs: keyword arguments of the body.
        """
        if not hasattr(self, "port"):
            self.port = free_port(consecutive=2)  # the store takes the second one
        for slot in range(world_size) if slots is None else slots:
            variables: dict[str, str | None] = {
                **os.environ,
                "RANK": str(slot),
                "LOCAL_RANK": str(slot),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            self._requests[slot] = {
                "slot": slot,
                "module": body.__module__,
                "body": body.__qualname__,
                "args": args,
                "kwargs": kwargs,
                "store": self._store_arguments(),
                "env": {name: value for name, value in variables.items() if value is not None},
            }
            self._start(slot)
        return self

    def _store_arguments(self) -> dict[str, Any]:
        if self.etcd is None:
            return {}
        return {"endpoints": self.etcd.endpoints, "prefix": self.etcd.prefix}

    def start_again(self, *slots: int) -> None:
        """Starts another process of each slot, like the last one, which may still live."""
        for slot in slots:
            self._start(slot)

    def forget(self, *slots: int) -> None:
        """Counts the slots' processes among the past ones: no one takes their places."""
        for slot in slots:
            self.past.append(self.ranks.pop(slot))

    def _start(self, slot: int) -> None:
        if slot in self.ranks:
            self.forget(slot)
        here, there = socket.socketpair()
        here.setblocking(False)
        before = sum(process.slot == slot for process in self.past)
        process = Process(slot, here, self._directory / f"slot-{slot}{f'.{before}' if before else ''}.log")
        self.ranks[slot] = process
        self._starting.append(process)
        self._template.start({**self._requests[slot], "output": str(process.output)}, there)
        there.close()
        self._selector.register(here, selectors.EVENT_READ, process)

    def __getitem__(self, slot: int) -> Process:
        return self.ranks[slot]

    def tell(self, word: str, *slots: int) -> None:
        """Says something to some ranks, or to all that live."""
        for slot in slots or self.ranks:
            with contextlib.suppress(BrokenPipeError):
                self.ranks[slot].line.sendall(word.encode() + b"\n")

    def send_signal(self, slot: int, signum: int) -> None:
        """Sends a signal to a rank."""
        self._turn_until(lambda: self.ranks[slot].pid != 0, f"the start of slot {slot}")
        os.kill(self.ranks[slot].pid, signum)

    def kill(self, *slots: int, signum: int = signal.SIGKILL) -> None:
        """Ends ranks by a signal, while no rank is in its `Rank.collective`, and waits for their end."""
        with Collective(self._directory, fcntl.LOCK_EX):
            for slot in slots:
                self.send_signal(slot, signum)
            self.wait_for_end(*slots)
        assert [self.ranks[slot].code for slot in slots] == [-signum] * len(slots)

    def lose_hosts(self, *slots: int) -> None:
        """Kills ranks with their monitors, as if their hosts were lost: no one is left to tell of it.

        They are stopped first: a rank that notices that its monitor is gone leaves in order, and a monitor
        that its rank is gone tells the others.
        """
        monitors = self.monitors()
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for slot in slots:
                for pid in (self.ranks[slot].pid, monitors[slot]):
                    os.kill(pid, signum)

    def expect(self, event: str, *slots: int, **fields: Any) -> list[dict[str, Any]]:
        """Waits until each of some ranks (all of them, if none are named) says something, and returns it.

        Args:
            event: what.
            slots: who.
            fields: what must be in it.
        """
        found = []
        for slot in slots or list(self.ranks):
            process = self.ranks[slot]

            def came(process: Process = process) -> bool:
                if not process.pid:
                    return False  # it may speak before the template says which one it is
                for position in range(process.expected, len(process.messages)):
                    message = process.messages[position]
                    if message["event"] == event and fields.items() <= message.items():
                        process.expected = position + 1
                        return True
                if process.code is not None:
                    raise AssertionError(f"slot {slot} ended ({process.code}) without {event} {fields}")  # noqa: B023
                return False

            self._turn_until(came, f"{event} {fields} of slot {slot}")
            found.append(process.messages[process.expected - 1])
        return found

    def wait(self, *, killed: tuple[int, ...] = ()) -> list[Any]:
        """Waits until all ranks have ended; returns what those returned that are not said to be killed.

        Args:
            killed: slots that end by a signal and say nothing.
        """
        self.wait_for_end()
        for slot in killed:
            assert self.ranks[slot].code is not None and self.ranks[slot].code < 0, (slot, self.ranks[slot])
        return [process.value for slot, process in sorted(self.ranks.items()) if slot not in killed]

    def wait_for_end(self, *slots: int, leftovers: bool = True) -> None:
        """Waits until ranks (all, if none are named) have ended; nothing may be left behind in them."""
        for slot in slots or list(self.ranks):
            process = self.ranks[slot]
            self._turn_until(lambda process=process: process.code is not None, f"the end of slot {slot}")  # type: ignore[misc]
            for message in process.messages if leftovers else ():
                left = message.get("left", [])
                if slot == 0 and message["event"] == "raised" and not self.store_is_elsewhere:
                    # The monitor of the first slot hosts the store, which the others need: it stays until
                    # they are through. `nothing_left_behind` sees whether it goes then.
                    left = [thing for thing in left if not thing.startswith("children: ")]
                if message["event"] == "returned" and self.store_is_elsewhere:
                    left = _without_kept(left)
                assert not left, f"slot {slot} left behind {left}"

    def monitors(self) -> dict[int, int]:
        """The monitor processes that live, by slot."""
        by_rank = {process.pid: slot for slot, process in self.ranks.items()}
        found = {}
        for pid in self._template.descendants():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent in by_rank:
                    found[by_rank[parent]] = pid
        return found

    def close(self) -> None:
        """Ends what still runs, and prints everything, for a test that failed."""
        ended = all(process.code is not None for process in self._all())
        for _ in range(0 if ended else 3):
            for pid in self._template.descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not ended:
            with contextlib.suppress(AssertionError):
                self._turn_until(lambda: all(process.code is not None for process in self._all()), "the end")
        for process in sorted(self._all(), key=lambda process: process.slot):
            print(f"---- slot {process.slot}, pid {process.pid}, exit code {process.code}")
            for message in process.messages:
                print("   ", json.dumps(message))
            print(process.log)
            monitor = process.output.with_name(f"monitor-of-{process.output.name}")
            if monitor.exists():
                print(f"---- its monitor\n{monitor.read_text(errors='replace')}")
            process.line.close()
        self._selector.close()

    def _all(self) -> list[Process]:
        return [*self.past, *self.ranks.values()]

    def _turn_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                for process in self.ranks.values():
                    if process.code is None:
                        os.kill(process.pid, signal.SIGTERM)  # it writes down where it is
                self._selector.select(_WRITTEN_WITHIN)
                raise AssertionError(f"{what} did not come within {TIMEOUT:g} s")
            # The ranks first: what one said before it ended counts.
            for key, _ in sorted(ready, key=lambda item: item[0].data is None):
                if key.data is None:
                    self._read_template()
                else:
                    self._read_rank(key.data)

    def _read_template(self) -> None:
        message = json.loads(self._template.control.recv(1 << 12))
        if "started" in message:
            self._starting.pop(0).pid = message["started"]
            return
        for process in self._all():
            if process.pid == message["ended"] and process.code is None:
                self._read_rank(process)
                process.code = message["code"]

    def _read_rank(self, process: Process) -> None:
        if process.line not in {key.fileobj for key in self._selector.get_map().values()}:
            return
        while True:
            try:
                data = process.line.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self._selector.unregister(process.line)
                break
            process.unread += data
        *lines, process.unread = process.unread.split(b"\n")
        process.messages += [json.loads(line) for line in lines]


def await_end(pid: int, timeout: float = TIMEOUT) -> None:
    """Waits until a process that is no child of this one has ended."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            ready, _, _ = select.select([pidfd], [], [], timeout)
            assert ready, f"process {pid} did not end within {timeout:g} s"
        finally:
            os.close(pidfd)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(template: Template, directory: Path, etcd: EtcdAddress | None = None) -> Iterator[Job]:
    """A job that is ended with the block."""
    job = Job(template, directory, etcd)
    try:
        yield job
    finally:
        job.close()
