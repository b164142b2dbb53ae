"""The checks of conftest.py see what tests leave behind, in a pytest run of its own with two workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import os, signal, socket, subprocess, threading

kept, wait = [], threading.Event().wait

def test_tidy(monkeypatch):
    monkeypatch.setenv("X", "1")
    subprocess.run(["true"], check=True)
    threading.Thread(target=lambda: None).start()

def test_child(): subprocess.Popen(["sleep", "60"])
def test_orphan(): subprocess.run(["sh", "-c", "setsid sleep 61 >/dev/null 2>&1 &"], check=True)
def test_zombie(): os.fork() or os._exit(0)
def test_thread(): threading.Thread(target=wait, args=[2], name="forgotten").start()
def test_daemon(): threading.Thread(target=wait, name="ft_wrapper-x", daemon=True).start()
def test_handler(): signal.signal(signal.SIGUSR1, lambda *_: None)
def test_environment(): os.environ["LEFT"] = "x"
def test_shared_memory(): open("/dev/shm/ft_wrapper-left" + __file__.replace("/", "-"), "w").close()
def test_socket(): kept.append(socket.socket())
"""
LEFT = [
    *("sleep 60", "sleep 61", "was not waited for", "thread 'forgotten'", "thread 'ft_wrapper-x' (daemon)"),
    *("handler of signal 10:", "environment variable LEFT was added"),
    *("shared memory /dev/shm/ft_wrapper-left", "-> socket:"),
]


def test_what_tests_leave_fails_them_and_no_other(tmp_path: Path) -> None:
    # A short grace: nothing that is left here goes by itself.
    conftest = CONFTEST.read_text().replace("GRACE = 60.0", "GRACE = 0.2")
    assert "GRACE = 0.2" in conftest
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_all.py").write_text(TESTS)
    words = ["-q", "-p", "no:cacheprovider", "--numprocesses=2", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    for path in Path("/dev/shm").glob(f"ft_wrapper-left{tmp_path}-*".replace("/", "-")):
        path.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    # Each test itself passes; what it leaves is an error at its end.
    assert f"{len(LEFT) + 1} passed, {len(LEFT)} errors" in done.stdout, done.stdout
    assert done.stdout.count("left behind") >= len(LEFT)
    assert [message for message in LEFT if message not in done.stdout] == []
