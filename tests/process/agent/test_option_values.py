"""Values that no option of ``ftrun`` can have: one line before anything is started, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_wrapper.agent.options import Options, Parser, make_parser, parse_args
from ft_wrapper.agent.outputs import ERROR_FILE_ENV, PREFIX_ENV
from ft_wrapper.cli.main import level_of_ftrun
from ft_wrapper.settings import LONGEST

COUNTS = ("--max-restarts", "--max-rank-restarts", "--node-check-retries", "--drained-exit-code")
COUNTS += (
    "--nproc-per-node",
    "--nnodes",
    "--master-port",
    "--node-rank",
    "--spare-nodes",
    "--active-world-size",
)
DURATIONS = ("--shutdown-timeout", "--exit-barrier-timeout", "--drain-timeout", "--node-check-timeout")
DURATIONS += ("--monitor-interval",)
NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(min_value=1, max_value=5000).map(lambda digits: "9" * digits),
    st.floats().map(str),
    st.text("0123456789-+._e ٣²", max_size=8),
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No one has set options by variables."""
    for name in list(os.environ):
        if name.startswith("PET_") or name in (ERROR_FILE_ENV, PREFIX_ENV):
            monkeypatch.delenv(name)


def parsed(*arguments: str) -> Options:
    return parse_args([*arguments, "--no-python", "true"])


def said_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that refuses them; empty if they will do."""
    try:
        parsed(*arguments)
    except SystemExit as end:
        assert end.code == 2
        err = capsys.readouterr().err
        assert err.startswith("ftrun: error: ") and err.count("\n") == 1
        return err
    return ""


@pytest.mark.parametrize("option", [*COUNTS, *DURATIONS])
@given(value=NUMBERS)
def test_a_number_is_taken_or_refused_in_one_line(option: str, value: str) -> None:
    try:
        options = parsed(f"{option}={value}")
    except SystemExit as end:
        assert end.code == 2
    else:
        assert 1 <= options.nproc_per_node <= 4096 and 0 <= options.drained_exit_code <= 255
        assert max(options.max_restarts, options.max_rank_restarts, options.spare_nodes) < 2**31
        assert 0 <= options.shutdown_timeout <= LONGEST and 0 < options.monitor_interval <= LONGEST


@pytest.mark.parametrize("option", COUNTS)
def test_too_large_a_number_is_named_with_the_way_out(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_of(capsys, option, "99999999999999999999")
    assert said.startswith(f"ftrun: error: {option} 99999999999999999999: use a number")


@pytest.mark.parametrize("option", DURATIONS)
@pytest.mark.parametrize("value", ["1e300", "-1", "nan", "inf"])
def test_a_duration_without_an_end_is_named(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{option} {value}: must be at least 0" in said_of(capsys, option, value)


def with_values(parser: Parser) -> list[str]:
    """The options that take a single value, and whose default is not empty."""
    return [
        action.option_strings[0]
        for action in parser._actions
        if action.option_strings and action.nargs is None and not action.choices
        if action.default not in ("", [])
    ]


@pytest.mark.parametrize("option", with_values(make_parser()))
def test_an_empty_value_is_told(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A variable of a shell script that is not set. torchrun's own lines work all the same."""
    try:
        options = parsed(option, "")
    except SystemExit:
        assert option in capsys.readouterr().err
    else:
        assert option in make_parser()._theirs
        assert any(warning.startswith(f"{option} '': is empty") for warning in options.warnings)


@pytest.mark.parametrize("option", ["--node-id", "--node-check", "--result-file"])
def test_an_empty_value_of_an_option_of_ours_is_an_error(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said_of(capsys, option, "") == (
        f"ftrun: error: {option} '': is empty; give it a value, or leave it out\n"
    )


@pytest.mark.parametrize("variable", ["PET_STANDALONE", "PET_NO_FORK", "PET_MODULE"])
@pytest.mark.parametrize("value", ["2", "-1", "", "yes", " 1"])
def test_a_variable_of_an_option_without_value_is_0_or_1(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert "PET_* of an option without a value must be 0 or 1" in said_of(capsys)


@pytest.mark.parametrize("template", ["${x", "$", "[$rnk] ", "${rank"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_prefix_that_is_not_filled_in_is_told(
    template: str, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_variable:
        monkeypatch.setenv(PREFIX_ENV, template)
    options = parsed(*([] if by_variable else ["--log-line-prefix-template", template]))
    (warning,) = options.warnings
    assert template in warning and "${rank}" in warning
    assert options.log_line_prefix == template


@pytest.mark.parametrize("template", ["[$role_name-${rank}/$local_rank on $hostname] ", "plain", "100 $$ "])
def test_a_prefix_that_is_filled_in_is_not(template: str) -> None:
    assert parsed("--log-line-prefix-template", template).warnings == ()


def test_an_error_file_in_no_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ERROR_FILE_ENV, str(tmp_path / "error.json"))
    assert parsed().warnings == ()
    monkeypatch.setenv(ERROR_FILE_ENV, str(tmp_path / "no" / "error.json"))
    (warning,) = parsed().warnings
    assert warning.startswith(f"{ERROR_FILE_ENV}={tmp_path}/no/error.json: no effect")


@pytest.mark.parametrize("address", ["no-such-host.invalid", "a..b", "x" * 70, "a b"])
def test_an_address_that_nobody_knows_is_told(address: str) -> None:
    line = ("--nnodes", "2", "--rdzv-endpoint", "localhost:29400", "--local-addr")
    (warning,) = parsed(*line, address).warnings
    assert warning.startswith(f"--local-addr {address}: others reach this node by it; here it is unknown")
    for known in ("127.0.0.1", "localhost"):
        assert parsed(*line, known).warnings == ()


def test_a_master_addr_that_is_no_name_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from ft_wrapper.cli.meeting import meet

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


@pytest.mark.parametrize("seconds", [str(LONGEST)])
def test_ranks_may_take_longer_than_epoll_can_wait(seconds: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS_LATER)
    line = [sys.executable, "-m", "ft_wrapper.run", "--shutdown-timeout", seconds, str(tmp_path / "ends.py")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ftrun:
        assert ftrun.stdout is not None
        rank = int(ftrun.stdout.readline())
        ftrun.terminate()
        assert ftrun.stdout.readline() == "15\n"
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for its rank
            ftrun.wait(3)
        os.kill(rank, signal.SIGUSR2)
        out, err = ftrun.communicate(timeout=60)
    assert (ftrun.returncode, out) == (143, "12\n"), err


# The level of ftrun's lines -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["FOO", "debug", "", "10"])
def test_a_level_that_there_is_not_is_named(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGLEVEL", level)
    with pytest.raises(SystemExit) as end:
        level_of_ftrun()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"ftrun: error: LOGLEVEL={level}: there is no such level; use ")


@pytest.mark.parametrize("level", ["DEBUG", "WARNING", "NOTSET"])
def test_a_level_that_there_is_is_taken(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", level)
    assert level_of_ftrun() == level


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
