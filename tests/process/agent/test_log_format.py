"""``ftrun --log-format json``, and what no line may have in it: passwords."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_job import FtRun
from support.etcd_users import require_login

from ft_wrapper.agent.process import Job
from ft_wrapper.log_lines import FORMAT_ENV, choose_format
from ft_wrapper.run import main, parse_args
from ft_wrapper.store import EtcdStore
from ft_wrapper.store.etcd_client import EtcdClient
from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.store.plan import announced_plan, plan_store
from ft_wrapper.testing import EtcdServer

# In the first iteration one rank raises.
RAISES = """
from ft_wrapper import CallWrapper, Wrapper

@Wrapper(rejoin=True)
def train(call_wrapper: CallWrapper = None):
    if call_wrapper.iteration == 0 and call_wrapper.state.rank == 1:
        raise ValueError("told to")

train()
"""
USER, PASSWORD = "mallory7", "pa55word"
LOGIN = f"{USER}:{PASSWORD}"


@pytest.fixture(autouse=True)
def no_format(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(FORMAT_ENV, raising=False)
    yield
    choose_format("text")  # `main` in this process sets it


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(RAISES)
    return str(path)


def objects(said: str) -> list[dict[str, Any]]:
    """All lines, each of which has to be a JSON object, but for those of torch's C++."""
    return [json.loads(line) for line in said.splitlines() if "] [c10d] " not in line]


def test_each_line_is_an_object(tmp_path: Path, script: str) -> None:
    with FtRun(tmp_path / "job", "--nproc-per-node", "2", "--log-format", "json", script) as job:
        assert job.end() == 0, job.said
    lines = objects(job.said)
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["node"] == "0" and line["message"]
        assert line.keys() <= {*("time", "level", "logger", "node", "rank", "slot", "message", "exception")}
    of_ranks = [line for line in lines if "rank" in line]
    (failed,) = (line for line in of_ranks if line["message"].endswith("failed in iteration 0"))
    assert (failed["level"], failed["rank"], failed["slot"]) == ("WARNING", 1, 1)
    assert failed["exception"].endswith("ValueError: told to")
    (restart,) = (line for line in of_ranks if line["message"].startswith("restart 1: rank 1 (slot 1 on "))
    assert restart["logger"] == "ft_wrapper.restart.on_restart" and "exception" not in restart
    of_agent = [line for line in lines if "rank" not in line]
    assert {"INFO"} == {line["level"] for line in of_agent}
    assert not any(line["message"].startswith("ftrun:") or "slot" in line for line in of_agent)


def test_ranks_are_told_only_what_they_do_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_args(["--no-python", "true"]).log_format == "text"
    job = Job(1, "default", "id", 0)
    assert FORMAT_ENV not in job.shared_environment()
    choose_format("json")
    assert job.shared_environment()[FORMAT_ENV] == "json"
    monkeypatch.setenv(FORMAT_ENV, "json")
    assert parse_args(["--no-python", "true"]).log_format == "json"
    assert FORMAT_ENV not in job.shared_environment()
    choose_format(parse_args(["--log-format", "text", "--no-python", "true"]).log_format)
    assert job.shared_environment()[FORMAT_ENV] == "text"


def test_a_job_that_cannot_start_says_so_in_a_line(tmp_path: Path, script: str) -> None:
    options = ["--log-format", "json", "--log-dir", "/dev/null/logs", "--redirects", "3"]
    with FtRun(tmp_path / "job", *options, script) as job:
        assert job.end() == 2
    last = objects(job.said)[-1]
    assert (last["level"], last["logger"]) == ("ERROR", "ft_wrapper.run")
    assert last["message"].startswith(f"cannot start {script}: ")


# ---- secrets


@pytest.fixture
def guarded() -> Iterator[EtcdServer]:
    """An etcd that wants a user and a password."""
    with EtcdServer() as server:
        require_login(server, {"root": PASSWORD, USER: PASSWORD}, {USER: "ft_wrapper/job/"})
        yield server


def test_no_line_of_a_job_has_the_password_of_its_etcd(
    tmp_path: Path,
    script: str,
    guarded: EtcdServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ["--nnodes", "1", "--nproc-per-node", "2"]
    options += ["--rdzv-backend", "etcd", "--rdzv-id", "job", "--rdzv-endpoint", guarded.endpoints]
    options += ["--log-dir", str(tmp_path / "logs"), "--tee", "3"]
    monkeypatch.setenv("ETCDCTL_USER", LOGIN)
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    with FtRun(tmp_path / "job", *options, script) as job:
        assert job.end() == 0, job.said
    assert "restart 1: rank 1 (slot 1 on " in job.said and guarded.endpoints in job.said
    with contextlib.closing(EtcdClient(guarded.endpoints, user="root", password=PASSWORD)) as client:
        assert client.read(Range.prefix(b"ft_wrapper")) == (), "the job has left something"
    main(["status", f"etcd://{guarded.endpoints}/ft_wrapper/job"])
    files = {path: path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()}
    said = [*files.values(), *capfd.readouterr()]
    assert len(files) > 3
    assert not [text for text in said if PASSWORD in text or USER in text]


@pytest.mark.parametrize(
    "options",
    [
        ["--rdzv-backend", "etcd", "--rdzv-endpoint", f"http://{LOGIN}@127.0.0.1:1"],
        ["--rdzv-backend", "etcd", "--rdzv-endpoint", f"{LOGIN}@127.0.0.1:1,127.0.0.1:2"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOGIN}@127.0.0.1:port"],
        ["--rdzv-endpoint", f"{LOGIN}@127.0.0.1:port"],
        ["--rdzv-endpoint", f"{LOGIN}@/"],
        ["--rdzv-endpoint", "127.0.0.1:1", "--rdzv-conf", f"password={PASSWORD},is_host=0,read_timeout=0.1"],
        ["--standalone", "--rdzv-endpoint", f"{LOGIN}@127.0.0.1:1", "-r", "3", "--log-dir", "/dev/null/x"],
        ["--nproc-per-node", f"http://{LOGIN}@127.0.0.1:1"],
    ],
)
def test_a_command_line_with_a_password_is_not_repeated(
    options: list[str],
    script: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A password that stands where none belongs: the line that says so does without it."""
    try:
        code = main(["--nnodes", "1", "--rdzv-id", "job", *options, script])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert code in (2, 75)  # wrong, or nobody answers
    said = "".join([*capfd.readouterr(), caplog.text])
    assert said and PASSWORD not in said and USER not in said


@pytest.mark.parametrize("address", [f"etcd://{LOGIN}@h:1", f"etcd://{LOGIN}@h:1/job", f"{LOGIN}@h:port"])
def test_nor_is_an_address_with_one(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        announced_plan(address, 1.0).connect()
    assert main(["status", address]) == 2
    said = "".join([str(caught.value), *capfd.readouterr()])
    assert "error" in said and PASSWORD not in said and USER not in said


def test_nor_are_the_arguments_of_a_store() -> None:
    given = {"endpoints": f"http://{LOGIN}@h:1", "user": "me", "password": PASSWORD, "prefix": "job"}
    described = plan_store(EtcdStore, given, timeout=None).description  # type: ignore[arg-type]
    assert "job" in described and PASSWORD not in described
