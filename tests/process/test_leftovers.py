"""The checks of conftest.py see what tests leave behind, in a pytest run of its own with two workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TIDY = """
import subprocess, threading
def test(monkeypatch):
    monkeypatch.setenv("X", "1")
    subprocess.run(["true"], check=True)
    threading.Thread(target=lambda: None).start()
"""
LEFT = {
    "child": ("import subprocess\ndef test(): subprocess.Popen(['sleep', '60'])", "sleep 60"),
    "orphan": (
        "import subprocess\n"
        "def test(): subprocess.run(['sh', '-c', 'setsid sleep 61 >/dev/null 2>&1 &'], check=True)",
        "sleep 61",
    ),
    "zombie": ("import os\ndef test():\n    if os.fork() == 0: os._exit(0)", "was not waited for"),
    "thread": (
        "import threading\n"
        "go = threading.Event()\n"
        "def test(): threading.Thread(target=go.wait, args=[2], name='forgotten').start()",
        "thread 'forgotten'",
    ),
    "ft_wrapper daemon": (
        "import threading\n"
        "wait = threading.Event().wait\n"
        "def test(): threading.Thread(target=wait, name='ft_wrapper-x', daemon=True).start()",
        "thread 'ft_wrapper-x' (daemon)",
    ),
    "signal handler": (
        "import signal\ndef test(): signal.signal(signal.SIGUSR1, lambda *_: None)",
        "handler of signal 10:",
    ),
    "environment": ("import os\ndef test(): os.environ['LEFT'] = 'x'", "environment variable LEFT was added"),
    "shared memory": (
        "def test(): open('/dev/shm/ft_wrapper-left' + __file__.replace('/', '-'), 'w').close()",
        "shared memory /dev/shm/ft_wrapper-left",
    ),
    "socket": ("import socket\nkept = []\ndef test(): kept.append(socket.socket())", "-> socket:"),
}


def test_what_tests_leave_fails_them_and_no_other(tmp_path: Path) -> None:
    # A short grace: nothing that is left here goes by itself.
    conftest = CONFTEST.read_text().replace("GRACE = 60.0", "GRACE = 0.2")
    assert "GRACE = 0.2" in conftest
    (tmp_path / "conftest.py").write_text(conftest)
    for number, test in enumerate((TIDY, *(test for test, _ in LEFT.values()))):
        (tmp_path / f"test_{number}.py").write_text(test)
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
    assert [message for _, message in LEFT.values() if message not in done.stdout] == []
