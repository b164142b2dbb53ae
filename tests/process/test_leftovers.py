"""The checks of conftest.py see what is left behind: each is tried in a pytest run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEFT = {
    "child": (
        "import subprocess\ndef test(): subprocess.Popen(['sleep', '60'])",
        "sleep 60",
    ),
    "orphan": (
        "import subprocess\n"
        "def test(): subprocess.run(['sh', '-c', 'setsid sleep 61 >/dev/null 2>&1 &'], check=True)",
        "sleep 61",
    ),
    "zombie": (
        "import os\ndef test():\n    if os.fork() == 0: os._exit(0)",
        "was not waited for",
    ),
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
    "environment": (
        "import os\ndef test(): os.environ['LEFT'] = 'x'",
        "environment variable LEFT was added",
    ),
    "shared memory": (
        "def test(): open('/dev/shm/ft_wrapper-left' + __file__.replace('/', '-'), 'w').close()",
        "shared memory /dev/shm/ft_wrapper-left",
    ),
    "socket": (
        "import socket\nkept = []\ndef test(): kept.append(socket.socket())",
        "-> socket:",
    ),
}


def pytest_run(directory: Path, *tests: str, workers: int = 0) -> subprocess.CompletedProcess[str]:
    # A short grace: nothing that is left here goes by itself.
    conftest = CONFTEST.read_text().replace("GRACE = 60.0", "GRACE = 0.2")
    assert "GRACE = 0.2" in conftest
    (directory / "conftest.py").write_text(conftest)
    for number, test in enumerate(tests):
        (directory / f"test_{number}.py").write_text(test)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--numprocesses={workers}",
            "--rootdir",
            str(directory),
            str(directory),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    for path in Path("/dev/shm").glob(f"ft_wrapper-left{directory}-*".replace("/", "-")):
        path.unlink()
    return done


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_fails_the_test(tmp_path: Path, kind: str) -> None:
    test, message = LEFT[kind]
    done = pytest_run(tmp_path, test)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "left behind" in done.stdout
    assert message in done.stdout


def test_workers_see_what_their_tests_leave(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, *(test for test, _ in LEFT.values()), workers=2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [message for _, message in LEFT.values() if message not in done.stdout] == []


def test_workers_that_leave_nothing_pass(tmp_path: Path) -> None:
    tidy = "import subprocess\ndef test(): subprocess.run(['true'], check=True)\n"
    done = pytest_run(tmp_path, tidy, tidy, workers=2)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_left_passes(tmp_path: Path) -> None:
    done = pytest_run(
        tmp_path,
        "import subprocess, threading\n"
        "def test(monkeypatch):\n"
        "    monkeypatch.setenv('X', '1')\n"
        "    subprocess.run(['true'], check=True)\n"
        "    threading.Thread(target=lambda: None).start()\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
