"""Files that we write at paths others know: what others have put there gets nothing, and is named."""

from __future__ import annotations

import contextlib
import os
import stat
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.warm_ftrun import run_python

from ft_wrapper import events
from ft_wrapper._files import check_own_file, owners_only
from ft_wrapper.agent.outputs import Tail, opened
from ft_wrapper.run import main
from ft_wrapper.testing.etcd_server import free_port

WAY_OUT = "name a regular file of this user, not a link"
OTHER = 12345  # a user


KINDS = (
    "link",
    "link to nothing",
    "pipe",
    "folder",
    "the shell's",
    "another's",
)


@contextlib.contextmanager
def put_there(kind: str, path: Path) -> Iterator[None]:
    """Something of that kind is at a path, and gets nothing."""
    reader = None
    if kind == "link":
        path.with_name("target").write_text("precious")
        path.symlink_to(path.with_name("target"))
    elif kind == "link to nothing":
        path.symlink_to(path.with_name("not there"))
    elif kind == "folder":
        path.mkdir()
    elif kind == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        path.write_text("precious")
        path.chmod(0o666)
        os.chown(path, OTHER, OTHER)
    elif kind == "the shell's":  # what ``>(cat)`` is in a command line
        reader, writer = os.pipe()
        path.symlink_to(f"/proc/self/fd/{writer}")
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield
    if kind == "the shell's":
        os.close(writer)
    if reader is not None:
        assert os.read(reader, 1) == b""
        os.close(reader)


def write_events(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(events.ENV, str(path))
        events.check_events_file()


def truncate(path: Path) -> None:
    open(path, "w", opener=owners_only).close()


def open_streams(path: Path) -> None:
    with contextlib.ExitStack() as files:
        opened(str(path), files)


def show(path: Path) -> None:
    with open(os.devnull, "w") as console:
        Tail(str(path), console, "").close()


@pytest.mark.parametrize("write", [write_events, truncate, open_streams, show])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(60)
def test_what_others_have_put_there_gets_nothing(
    tmp_path: Path, kind: str, write: Callable[[Path], None]
) -> None:
    path, fds = tmp_path / "known", os.listdir("/proc/self/fd")
    with put_there(kind, path):
        with pytest.raises(OSError, match="known") as caught:
            write(path)
        if write is write_events:
            assert f"FT_WRAPPER_EVENTS={path}: " in str(caught.value) and WAY_OUT in str(caught.value)
        for name in ("known", "target"):
            if path.with_name(name).is_file():
                assert path.with_name(name).read_text() == "precious"
        assert not (tmp_path / "not there").exists()
    assert os.listdir("/proc/self/fd") == fds


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_file_of_ones_own_is_written(tmp_path: Path, umask: int) -> None:
    path, before = tmp_path / "file", os.umask(umask)
    try:
        with open(path, "w", opener=owners_only) as file:
            file.write("longer than the next")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    check_own_file("a name", str(path))
    assert path.read_text() == "longer than the next"
    with open(path, "w", opener=owners_only) as file:
        file.write("short")
    assert path.read_text() == "short"


def test_a_device_is_as_good_as_a_file() -> None:
    with open(os.devnull, "w", opener=owners_only) as file:
        file.write("lost")


def test_events_that_cannot_be_written_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "nowhere" / "events", Path("/dev/stderr")):
        monkeypatch.setenv(events.ENV, str(path))
        assert main(["--no-python", "touch", str(tmp_path / "started")]) == 2
        said = capfd.readouterr().err
        assert f"FT_WRAPPER_EVENTS={path}: " in said and WAY_OUT in said
        assert said.count("\n") == 1
    assert not (tmp_path / "started").exists()


WRAPPED = """
    import sys
    from ft_wrapper import CallWrapper, Wrapper

    @Wrapper(**{sys.argv[1]: sys.argv[2]})
    def function(call_wrapper: CallWrapper):
        print("called")

    function()
"""


@pytest.mark.parametrize("setting", ["monitor_process_logfile", "monitor_process_pidfile"])
def test_a_monitors_file_that_is_a_link_is_named(tmp_path: Path, setting: str) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    (tmp_path / "slot-0").symlink_to(tmp_path / "target")
    words = ["-c", textwrap.dedent(WRAPPED), setting, f"{tmp_path}/slot-{{rank}}"]
    ended = run_python(words, 100, alone)
    assert (ended.returncode, ended.stdout) == (1, ""), ended.stderr
    assert f"OSError: {setting}={tmp_path}/slot-0: " in ended.stderr and WAY_OUT in ended.stderr
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_folder_of_logs_that_we_make_is_ours_alone(tmp_path: Path, umask: int) -> None:
    """With those above it, and what is written there."""
    logs, before = tmp_path / "new" / "logs", os.umask(umask)
    try:
        code = main(["--log-dir", str(logs), "--redirects", "3", "--no-python", "true"])
    finally:
        os.umask(before)
    written = [*logs.iterdir(), *logs.rglob("*.log")]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (logs.parent, logs, *written)]

    assert code == 0
    assert all(mode & 0o077 == 0 for mode in modes), modes


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o755, False), (0o775, False), (0o777, True), (0o1777, False)]
)
def test_a_folder_of_logs_that_is_there_stays_as_it_is(
    tmp_path: Path, mode: int, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(mode)
    assert main(["--log-dir", str(logs), "--redirects", "3", "--no-python", "true"]) == 0
    assert stat.S_IMODE(logs.stat().st_mode) == mode
    assert (f"--log-dir {logs}: any user may replace the job's logs" in caplog.text) == is_open
