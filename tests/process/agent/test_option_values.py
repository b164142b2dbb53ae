"""Values that no option of ``ftrun`` can have: one line before anything is started, and no traceback."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.warm_ftrun import start_python

from ft_wrapper.agent.options import Options, Parser, make_parser, parse_args
from ft_wrapper.agent.outputs import ERROR_FILE_ENV, PREFIX_ENV
from ft_wrapper.cli.main import level_of_ftrun
from ft_wrapper.cli.run import meet
from ft_wrapper.run import main
from ft_wrapper.settings import LONGEST

COUNTS = (
    *("--max-restarts", "--max-rank-restarts", "--node-check-retries", "--drained-exit-code", "--nnodes"),
    *("--nproc-per-node", "--master-port", "--node-rank", "--spare-nodes", "--active-world-size"),
)
DURATIONS = (
    *(
        "--shutdown-timeout",
        "--exit-barrier-timeout",
        "--drain-timeout",
        "--notice-grace",
        "--node-check-timeout",
    ),
    "--monitor-interval",
)
NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(min_value=1, max_value=5000).map(lambda digits: "9" * digits),
    st.floats().map(str),
    st.text("0123456789-+._e ٣²", max_size=8),
)


# Command lines, and what is said of each. What all of them run is x.py; nodes meet at localhost:1.
REFUSED = """
--standalone --nnodes 2 | --standalone and --nnodes 2 contradict
--standalone --spare-nodes 1 | --standalone and --spare-nodes 1 contradict
MASTER --node-rank 2 | --node-rank 2: | the last one is 1 | --node-id
--node-rank 1 --master-port 29501 | --node-rank 1: with 1 node the last one is 0 | --nnodes
MASTER --node-rank 1 --node-id a | --node-rank 1 and --node-id a contradict
--nnodes 2 --rdzv-backend etcd --rdzv-id 7 | --nnodes 2 needs --rdzv-endpoint HOST:PORT: etcd's members
--rdzv-backend etcd --rdzv-endpoint a,b,c | --rdzv-backend etcd needs --rdzv-id ID
--active-world-size 0 | --active-world-size 0: | at least one
--nproc-per-node 4 --active-world-size 5 | --active-world-size 5: is more than the 4 ranks | per-node 4
--nnodes 1:2 --nproc-per-node 9 --active-world-size 9 --devices-per-node 4 | --nproc-per-node 9 \
  --active-world-size 9: there are 2 x 4 devices for 9 active ranks; lower --active-world-size to 8; or \
  start 4 ranks a node, with --spare-nodes; or give --devices-per-node 0
MEET --nproc-per-node 3 --spare-nodes 1 --devices-per-node 2 | --nproc-per-node 3 --spare-nodes 1: \
  there are 2 x 2 devices for 6 active ranks; start 2 ranks
--nproc-per-node 3 --active-world-size 2 --devices-per-node 2 --virtual-local-rank | --nproc-per-node 3 \
  --active-world-size 2 and --virtual-local-rank contradict
--devices-per-node gpu | --devices-per-node gpu: | use a number of at least 0
MEET --spare-nodes 1 --active-world-size 2 | --spare-nodes 1 and --active-world-size 2 contradict
MEET --spare-nodes 1 --restart-policy group | --spare-nodes 1 and --restart-policy group contradict
MEET --spare-nodes 1 --rdzv-backend c10d | --spare-nodes 1 and --rdzv-backend c10d | use --rdzv-backend ft
--start-method thread | --start-method | 'thread'
--logs-specs no-such | --logs-specs no-such: | torchrun.logs_specs
--nproc-per-node many | --nproc-per-node many: | cpu, gpu, xpu or auto
--redirects 4 | --redirects 4:
--local-ranks-filter a | --local-ranks-filter a:
--signals-to-handle SIGKILL | --signals-to-handle SIGKILL: no program can handle
--log-dir file | --log-dir file: is a file; name a directory
--restart-policy alone | --restart-policy alone: use auto, rank or group
--restart-policy rank --max-restarts 1 | --max-restarts 1 and --restart-policy rank contradict
--restart-policy group --max-rank-restarts 1 | --max-rank-restarts 1 and --restart-policy group contradict
--no 2 | --no could match --no-python, --node-rank
--no-such-option 2 | --no-such-option
--nnodes some | --nnodes some: | 2:4
--nnodes 3:2 | --nnodes 3:2: the least, 3, is more than the most, 2
MEET --rdzv-conf join_timeout=x | join_timeout=x
--nnodes 2 --rdzv-endpoint a:b:c | --rdzv-endpoint a:b:c:
MEET --node-id 'a b' | 'a b' | letters, digits
MEET --rdzv-backend carrier | --rdzv-backend carrier: | c10d
MEET --rdzv-backend c10d --node-check true | --node-check true and --rdzv-backend c10d contradict
MEET --rdzv-backend c10d --node-bench | --node-bench and --rdzv-backend c10d contradict
--node-bench-slower-than 0.5 | --node-bench-slower-than 0.5: use a number from 1
--node-check-timeout 0 | --node-check-timeout 0: must be at least 0.001 and finite
""".replace("MASTER", "--nnodes 2 --master-addr head --master-port 29501")
MEETING = "--nnodes 2 --rdzv-endpoint localhost:1"
NO_PROGRAM = """
| required: script
nowhere.py | script nowhere.py: no such file
-m no_such_module_ | module no_such_module_: not found
-m json.no_such_module_ | module json.no_such_module_: not found
-m concurrent | module concurrent: | __main__
-m a..b | module a..b:
-m --no-python json.tool | --no-python and --module contradict
--no-python no-such-program- | no-such-program-: no such program
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ERROR_FILE_ENV, PREFIX_ENV):
        monkeypatch.delenv(name, raising=False)


def parsed(*arguments: str) -> Options:
    return parse_args([*arguments, "--no-python", "true"])


def said_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that refuses them."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ftrun: error: ")
    return err


LINES = [line.replace("MEET", MEETING).replace(" |", " x.py |", 1) for line in REFUSED.strip().splitlines()]


@pytest.mark.parametrize("line", [*LINES, *NO_PROGRAM.strip().splitlines()])
def test_what_is_refused_before_anything_is_started(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])  # an old finder, which Python skips
    Path("x.py").write_text("open('started', 'w')")
    Path("file").touch()
    arguments, *words = (" ".join(part.split()) for part in line.split("|"))
    said = said_of(capsys, *shlex.split(arguments))
    assert [word for word in words if word not in said] == [], said
    assert not Path("started").exists()


def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    said = said_of(capsys, "--virtual-local-rank", "--nproc-per-node", "3", "--no-python", "true")
    assert "CUDA_VISIBLE_DEVICES=3,5" in said
    assert parsed("--virtual-local-rank", "--nproc-per-node", "2").job.virtual_local_rank


@settings(max_examples=300)
@given(option=st.sampled_from([*COUNTS, *DURATIONS]), value=NUMBERS)
def test_a_number_is_taken_or_refused(option: str, value: str) -> None:
    try:
        options = parsed(f"{option}={value}")
    except SystemExit as end:
        assert end.code == 2
    else:
        assert 1 <= options.job.nproc <= 4096 and 0 <= options.drained_exit_code <= 255
        assert max(options.job.max_restarts, options.max_rank_restarts, options.spare_nodes) < 2**31
        assert 0 <= options.shutdown_timeout <= LONGEST and 0 < options.monitor_interval <= LONGEST


def test_numbers_out_of_range_are_named_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    for option in COUNTS:
        for value in ("99999999999999999999", "-1", "some"):
            said = said_of(capsys, f"{option}={value}", "x.py")
            assert said.startswith(f"ftrun: error: {option} {value}: use a number")
    for option in DURATIONS:
        for value in ("1e300", "-1", "nan", "inf", "soon"):
            assert f"{option} {value}: must be at least 0" in said_of(capsys, option, value, "x.py")


def with_values(parser: Parser) -> list[str]:
    """The options that take a single value, and whose default is not empty."""
    return [
        action.option_strings[0]
        for action in parser._actions
        if action.option_strings and action.nargs is None and not action.choices
        if action.default not in ("", [])
    ]


def test_an_empty_value_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A variable of a shell script that is not set. torchrun's own lines work all the same."""
    theirs = 0
    for option in with_values(make_parser()):
        try:
            options = parsed(option, "")
        except SystemExit:
            assert option in capsys.readouterr().err
        else:
            theirs += 1
            assert option in make_parser()._theirs
            assert any(warning.startswith(f"{option} '': is empty") for warning in options.warnings)
    assert theirs


@pytest.mark.parametrize("value", ["", "yes"])
def test_a_variable_of_an_option_without_value_is_0_or_1(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("PET_STANDALONE", "PET_NO_FORK"):
        monkeypatch.setenv(variable, value)
        said = said_of(capsys, "--no-python", "true")
        assert "PET_* of an option without a value must be 0 or 1" in said
        monkeypatch.delenv(variable)


def test_a_prefix_that_is_not_filled_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    option = "--log-line-prefix-template"
    for template in ("[$role_name-${rank}/$local_rank on $hostname] ", "plain", "100 $$ "):
        assert parsed(option, template).warnings == ()
    for template in ("${x", "$", "[$rnk] ", "${rank"):
        options = parsed(option, template)
        (warning,) = options.warnings
        assert template in warning and "${rank}" in warning
        assert options.log_line_prefix == template
    monkeypatch.setenv(PREFIX_ENV, "[$rnk] ")
    assert parsed().warnings == parsed(option, "[$rnk] ").warnings != ()


def test_an_error_file_in_no_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ERROR_FILE_ENV, str(tmp_path / "error.json"))
    assert parsed().warnings == ()
    monkeypatch.setenv(ERROR_FILE_ENV, str(tmp_path / "no" / "error.json"))
    (warning,) = parsed().warnings
    assert warning.startswith(f"{ERROR_FILE_ENV}={tmp_path}/no/error.json: no effect")


def test_an_address_that_is_unknown_is_told(caplog: pytest.LogCaptureFixture) -> None:
    line = ("--nnodes", "2", "--rdzv-endpoint", "localhost:29400", "--local-addr")
    for address in ("no-such-host.invalid", "a..b", "x" * 70, "a b"):
        (warning,) = parsed(*line, address).warnings
        assert warning.startswith(f"--local-addr {address}: others reach this node by it; here it is unknown")
    for known in ("127.0.0.1", "localhost"):
        assert parsed(*line, known).warnings == ()
    for address in ("a..b", "x" * 70):
        meet(parsed("--master-addr", address))
        assert f"--master-addr {address} leads to no address of this host" in caplog.text


ENDS_LATER = """
import os, signal

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
print(os.getpid(), flush=True)
for signum in (signal.SIGTERM, signal.SIGUSR2):
    signal.sigwait([signum])
    print(signum, flush=True)
"""


def test_ranks_may_take_longer_than_epoll_can_wait(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS_LATER)
    words = ["--no-fork", "--shutdown-timeout", str(LONGEST), str(tmp_path / "ends.py")]
    with start_python(["-m", "ft_wrapper.run", *words]) as ftrun:
        assert ftrun.stdout is not None
        rank = int(ftrun.stdout.readline())
        ftrun.terminate()
        assert ftrun.stdout.readline() == "15\n"
        os.kill(rank, signal.SIGUSR2)
        out, err = ftrun.communicate(timeout=60)
    assert (ftrun.returncode, out) == (143, "12\n"), err


# The level of ftrun's lines -------------------------------------------------------------------------------


def test_a_level_is_taken_or_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for level in ("DEBUG", "NOTSET"):
        monkeypatch.setenv("LOGLEVEL", level)
        assert level_of_ftrun() == level
    for level in ("FOO", "debug", "", "10"):
        monkeypatch.setenv("LOGLEVEL", level)
        said = said_of(capsys, "--no-python", "true")
        assert said.startswith(f"ftrun: error: LOGLEVEL={level}: there is no such level; use ")


def test_a_wrong_level_is_named_before_torch_fails_for_it() -> None:
    line = [sys.executable, "-m", "ft_wrapper.run", "--no-python", "true"]
    ended = subprocess.run(
        line, env={**os.environ, "LOGLEVEL": "FOO"}, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("ftrun: error: LOGLEVEL=FOO: ")


def test_all_numbers_of_the_command_line_are_here() -> None:
    """An option whose help asks for a number or seconds is in one of the lists above."""
    asked = {
        action.option_strings[0]
        for action in make_parser()._actions
        if action.metavar in ("N", "K", "PORT", "SECONDS")
    }
    assert asked - {"--devices-per-node", "--metrics"} <= {*COUNTS, *DURATIONS}
