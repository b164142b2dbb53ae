"""Log files on a disk that is full, or cannot be written for another reason: root mounts such a disk here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_wrapper.agent.outputs import RankFiles, read_failure
from ft_wrapper.run import main

TALKS = "head -c 100000 /dev/zero"
Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small disk, with further options; unmounts it at the end."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mounted(*options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", ",".join(["size=64k", *options]), "ft_wrapper_test"]
        command = [*words, str(disk)]
        if subprocess.run(command, capture_output=True, timeout=60).returncode:
            pytest.skip("this process may not mount anything")
        return disk

    yield mounted
    subprocess.run(["umount", str(disk)], capture_output=True, timeout=60)


def test_a_full_disk_is_named_where_a_rank_fails(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    logs = ("--log-dir", str(mount()), "--redirects", "3")
    assert main([*logs, "--max-restarts", "0", "--no-python", "sh", "-c", TALKS]) == 1
    (last,) = [message for message in caplog.messages if message.startswith("exit code 1")]
    assert "/0/stdout.log cannot be written: No space left on device; its prints fail" in last


def test_a_rank_that_says_nothing_goes_on(mount: Mount, tmp_path: Path) -> None:
    disk = mount()
    script = f"head -c 100000 /dev/zero > {disk}/other; touch {tmp_path}/done"
    assert main(["--log-dir", str(disk), "--redirects", "3", "--no-python", "sh", "-c", script]) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [(["nr_inodes=1"], "No space left on device"), (["ro"], "Read-only file system"), ([], "")],
)
def test_why_nothing_can_be_written(mount: Mount, options: list[str], words: str) -> None:
    disk = mount(*options)
    files = RankFiles("", str(disk / "stderr.log"), str(disk / "error.json"))
    failure = read_failure(0, 1, 0, 1, files)
    reason = f"{disk}/stderr.log cannot be written: {words}"
    assert failure.how == (
        f"exit code 1 ({reason}; its prints fail and are lost)" if words else "exit code 1"
    )
    assert not list(disk.iterdir()), "nothing is left there by the look"
