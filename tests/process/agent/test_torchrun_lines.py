"""A line that torchrun takes, ftrun takes: with one line of warning where it means something else here."""

from __future__ import annotations

import argparse
import random
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_args_parser

from ft_wrapper.agent import options as ftrun_options
from ft_wrapper.agent.options import NO_EFFECT, Options, make_parser, parse_args
from ft_wrapper.run import main

# Every option of torchrun ------------------------------------------------------------------------------

WORDS: dict[str, list[str]] = {
    "--nnodes": ["1", "2", "1:2", " 2"],
    "--nproc-per-node": ["2", "1", "cpu", "auto"],
    "--rdzv-backend": ["c10d", "static"],
    "--rdzv-endpoint": ["localhost:0", "localhost", "a:1", "[::1]:3", ""],
    "--rdzv-id": ["7", "a b", ""],
    "--rdzv-conf": ["join_timeout=3", "a=b", "is_host=1", "store_type=file", "timeout=9,read_timeout=5"],
    "--max-restarts": ["+1", "0", " 2"],
    "--monitor-interval": ["1", "1e-3"],
    "--start-method": ["spawn", "fork"],
    "--event-log-handler": ["console", "null"],
    "--role": ["x", "a b", ""],
    "--log-dir": ["logs", ""],
    "--redirects": ["3", "0", "0:1,7:2"],
    "--tee": ["3", "1:3"],
    "--local-ranks-filter": ["0", "0,7", " 1, 2", "-1"],
    "--duplicate-stdout-filters": ["a,b", ""],
    "--duplicate-stderr-filters": ["a", ""],
    "--node-rank": ["0", "1", "+1"],
    "--master-addr": ["127.0.0.1", "head", "[::1]", ""],
    "--master-port": ["29501", "0", "+5"],
    "--local-addr": ["127.0.0.1", ""],
    "--logs-specs": ["own"],
    "--numa-binding": ["node"],
    "--signals-to-handle": ["SIGTERM", "SIGTERM, SIGUSR1", "TERM", ""],
    "--shutdown-timeout": ["7", "0"],
    "--log-line-prefix-template": ["<${hostname}>", ""],
}
"""Values that torchrun takes; the first one is not the default."""
NO_DIFFERENCE = {
    *("--nnodes", "--standalone", "--node-rank"),  # said as it is by default
    "--local-addr",  # of nodes that meet others
    *("--start-method", "--run-path"),
}
WARNED_OF = {"--rdzv-backend", "--rdzv-conf", *NO_EFFECT}


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of a parser that do not end it, each once."""
    found = {action.dest: action for action in parser._actions if action.option_strings}
    return [action for name, action in found.items() if name not in ("help", "print_completion")]


def abbreviated(option: str, own: argparse.Action) -> str:
    """The shortest beginning of an option that no other one of torchrun's has; itself if there is none."""
    known = get_args_parser()._option_string_actions.items()
    others = [text for text, action in known if action.dest != own.dest and text.startswith("--")]
    shorter = (option[:end] for end in range(3, len(option)))
    return next((one for one in shorter if not any(text.startswith(one) for text in others)), option)


def forms(option: str, action: argparse.Action) -> list[tuple[list[str], dict[str, str]]]:
    """Ways to give an option: in full, abbreviated, by its variable; what is on the line, and what is not."""
    value = WORDS[option][:1] if action.nargs != 0 else []
    found = [([option, *value], {}), ([abbreviated(option, action), *value], {})]
    if isinstance(action, (env, check_env)):
        found.append(([], {f"PET_{action.dest.upper()}": value[0] if value else "1"}))
    return found


def parsed(*arguments: str) -> Options:
    return parse_args([*arguments, "--no-python", "true"])


class OwnSpecs(DefaultLogsSpecs):
    """What a package might install."""


@pytest.fixture
def own_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers `OwnSpecs`, named own."""
    info = tmp_path / "own-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torchrun.logs_specs]\nown = {__name__}:OwnSpecs\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own_specs")
def test_each_form_of_an_option_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And something, or there is a warning."""
    script = tmp_path / "json.tool"  # the name of a module, of a file and of a program
    script.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def said(line: list[str], environment: dict[str, str]) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            found = parse_args([*line, "json.tool"])
        return {**vars(found), "rendezvous": found.rendezvous and vars(found.rendezvous)}

    plain = said([], {})
    for action in options(get_args_parser()):
        option = max(action.option_strings, key=len)
        long, *others = (said(*form) for form in forms(option, action))
        assert all(other == long for other in others), option
        warnings = long.pop("warnings")
        assert [option in warning for warning in warnings] == [True] * (option in WARNED_OF), option
        is_different = long != {name: value for name, value in plain.items() if name != "warnings"}
        assert is_different == (option not in NO_DIFFERENCE | WARNED_OF), option


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchrun of the future, with more options than today's."""

    def parser() -> argparse.ArgumentParser:
        made = get_args_parser()
        made.add_argument("--warp-factor", "--warp_factor", action=env, type=int, default=1)
        made.add_argument("--node-index", action=check_env)
        made.add_argument("--spare-parts", action=env, default="")
        return made

    monkeypatch.setattr(ftrun_options, "get_args_parser", parser)


@pytest.mark.usefixtures("later")
def test_an_option_of_a_later_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed().warnings == ()
    for line in (["--warp-factor", "9"], ["--warp_factor=9"], ["--war", "9"]):
        (warning,) = parsed(*line).warnings
        assert warning.startswith("--warp-factor 9: has no effect here")
    (warning,) = parsed("--node-index").warnings
    assert warning.startswith("--node-index: has no effect here")
    monkeypatch.setenv("PET_WARP_FACTOR", "3")
    (warning,) = parsed().warnings
    assert warning.startswith("--warp-factor 3: ")
    # It takes its abbreviations, too.
    assert parsed("--spare", "3").spare_nodes == 0
    assert make_parser().parse_args(["--node-i", "x"]).node_index


def test_an_option_that_the_installed_torchrun_does_not_have_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = [*NO_EFFECT, "--signals-to-handle", "--virtual-local-rank", "--log-line-prefix-template"]

    def old() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
        for action in get_args_parser()._actions:
            if not set(newer) & set(action.option_strings):
                parser._add_action(action)
        return parser

    monkeypatch.setattr(ftrun_options, "get_args_parser", old)
    options = parsed(
        "--log-line-prefix-template", "<>", "--signals_to_handle", "SIGTERM", "--virtual-local-rank"
    )
    assert (options.log_line_prefix, options.job.signals) == ("<>", (signal.SIGTERM,))
    assert options.job.virtual_local_rank
    assert len(parsed("--numa-binding", "node", "--event-log-handler", "console").warnings) == 2


# Several options at once --------------------------------------------------------------------------------


def torchrun_takes(line: list[str]) -> bool:
    """Whether torchrun would start this; what it finds out only while it waits, too."""
    try:
        args = torchrun.parse_args(line)
        least, most = torchrun.parse_min_max_nnodes(args.nnodes)
        if args.standalone:
            args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
            if least > 1:
                return False
        elif (
            args.rdzv_backend == "static"
            and not args.rdzv_endpoint
            and most == 1
            and args.master_port is None
        ):
            args.rdzv_backend = "c10d"
        args.master_port = 29500 if args.master_port is None else args.master_port
        config, _, _ = torchrun.config_from_args(args)
        parse_rendezvous_endpoint(config.rdzv_endpoint, 29400)
    except Exception:
        return False
    return args.rdzv_backend != "static" or 0 <= args.node_rank < most


@pytest.mark.usefixtures("own_specs")
def test_lines_with_several_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "x.py"
    script.touch(0o755)
    there = [action for action in options(get_args_parser()) if action.dest != "module"]
    chance = random.Random(0)
    taken = 0
    for _ in range(300):
        line = []
        for action in chance.sample(there, chance.randint(2, 5)):
            option = max(action.option_strings, key=len)
            line.append(option if action.nargs == 0 else f"{option}={chance.choice(WORDS[option])}")
        if torchrun_takes([*line, str(script)]):
            taken += 1
            try:
                parse_args([*line, str(script)])
            except SystemExit:
                pytest.fail(f"{line}: {capsys.readouterr().err}")
    assert taken > 200


# Abbreviations -----------------------------------------------------------------------------------------


def test_an_abbreviation_means_torchruns_option_first() -> None:
    read = make_parser().parse_args
    for short, full in {
        "--nproc_": "--nproc-per-node",
        "--node": "--node-rank",  # ours have --node-id
        "--max": "--max-restarts",  # and --max-rank-restarts
        "--node-i": "--node-id",
        "--act": "--active-world-size",
    }.items():
        assert read([short, "3", "x"]) == read([f"{short}=3", "x"]) == read([full, "3", "x"])


# What is superfluous, or unknown -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--rdzv-backend etcd", "--rdzv-backend etcd: no effect"),
        ("--rdzv-backend c10d --node-rank 5", "--rdzv-backend c10d, --node-rank 5: no effect"),
        ("--rdzv-id 7", ""),
        ("--rdzv-backend static", ""),
        ("--standalone", ""),
        (
            "--standalone --nnodes 1:4 --rdzv-backend c10d --rdzv-id 7 --rdzv-conf a=b --node-rank 2",
            "--rdzv-backend c10d, --rdzv-conf a=b, --node-rank 2, --nnodes 1:4, --rdzv-id 7: no effect",
        ),
        ("--standalone --rdzv-backend carrier-pigeon --master-port 1", "carrier-pigeon, --master-port 1: no"),
        ("--redirects 7:3,9:1", "--redirects 7:3,9:1: there is no local rank 7, 9 with --nproc-per-node 1"),
        ("--signals-to-handle SIGTERM,TERM", "--signals-to-handle SIGTERM,TERM: no signal is named 'TERM'"),
    ],
)
def test_one_node_is_alone(line: str, words: str) -> None:
    options = parsed(*line.split())
    assert options.rendezvous is None
    if words:
        (warning,) = options.warnings
        assert words in warning
    else:
        assert options.warnings == ()


def test_values_as_torchrun_takes_them() -> None:
    options = parsed("--nproc-per-node", "2", "--redirects", "1:3,7:3", "--local-ranks-filter", "1, 7")
    assert options.redirects == {1: Std.ALL}
    assert options.local_ranks_filter is not None and 1 in options.local_ranks_filter
    options = parsed(
        "--nnodes= 1: 2", "--max-restarts=+3", "--master-port= 29501", "--node-rank=+1", "--rdzv-id="
    )
    meeting = options.rendezvous
    assert meeting is not None
    assert (meeting.min_nodes, meeting.max_nodes, meeting.run_id, options.job.max_restarts) == (
        1,
        2,
        "none",
        3,
    )
    assert (meeting.endpoint, meeting.config["node_id"]) == ("127.0.0.1:29501", "1")


def test_the_script_is_run_by_its_path_whatever_else_is_said(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    options = parse_args(["--run-path", "--no-python", "-m", str(script)])
    assert options.program.script == str(script)
    assert not options.program.is_module
    (warning,) = options.warnings
    assert warning.startswith("--run-path: makes --no-python and --module superfluous")


MEET = ("--nnodes", "2", "--rdzv-endpoint", "head:29400")


def test_unknown_options_of_the_rendezvous() -> None:
    options = parsed(*MEET, "--rdzv-conf", "last_call=3,join_timeout=9,is_it=so,store_type=file")
    assert options.rendezvous is not None
    assert options.rendezvous.config == {"join_timeout": "9", "nproc": "1", "role": "default"}
    unknown, so, store = options.warnings
    assert unknown.startswith("--rdzv-conf last_call=3: no effect")
    assert "did you mean last_call_timeout?" in unknown
    assert so.startswith("--rdzv-conf is_it=so: no effect")
    assert store.startswith("--rdzv-conf store_type=file: no effect")
    # Torch's own handlers are told all of it, as by torchrun.
    options = parsed(*MEET, "--rdzv-backend", "c10d", "--rdzv-conf", "last_call=3")
    assert options.rendezvous is not None
    assert options.rendezvous.config == {"last_call": "3"}
    assert options.warnings == ()


def test_options_that_ftrun_has_itself() -> None:
    options = parsed(*MEET, "--rdzv-conf", "node_id=3,nproc=4,role=default")
    assert options.rendezvous is not None
    assert options.rendezvous.config == {"node_id": "3", "nproc": "1", "role": "default"}
    assert options.warnings == ("--rdzv-conf nproc=4: no effect: --nproc-per-node says 1",)
    options = parsed(*MEET, "--rdzv-conf", "node_id=3", "--node-rank", "1")
    assert options.warnings == ("--rdzv-conf node_id=3: no effect: --node-rank says 1",)
    options = parsed(*MEET, "--rdzv-backend", "c10d", "--node-id", "3", "--node-rank", "7")
    assert options.warnings == ("--node-id 3: no effect: --rdzv-backend c10d knows no ids",)


@pytest.mark.parametrize(
    ("line", "endpoint", "where"),
    [
        ("--nnodes 2", "127.0.0.1:29500", "127.0.0.1:29500"),
        ("--nnodes 1:2 --rdzv-backend static --node-rank 1", "127.0.0.1:29500", "127.0.0.1:29500"),
        ("--spare-nodes 1", "127.0.0.1:29500", "127.0.0.1:29500"),
        ("--nnodes 2 --rdzv-backend c10d", "", "localhost"),
    ],
)
def test_where_nodes_meet_if_no_one_says(line: str, endpoint: str, where: str) -> None:
    options = parsed(*line.split())
    assert options.rendezvous is not None
    assert options.rendezvous.endpoint == endpoint
    (warning,) = options.warnings
    assert f"the nodes meet at {where}, so all of them have to be on this host" in warning


# Help, and what shells complete ------------------------------------------------------------------------


def test_help_has_every_option_in_one_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: ftrun [options] script ...\n")
    for action in make_parser()._actions:
        for option in action.option_strings:
            shown = f"  {option}" in text or f", {option}" in text
            assert shown is ("_" not in option and action.help != argparse.SUPPRESS), option


def test_what_a_shell_completes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shtab: Any = types.ModuleType("shtab")
    shtab.SUPPORTED_SHELLS = ["bash", "zsh"]
    shtab.complete = lambda parser, shell: f"{shell} completes {parser.prog}"
    monkeypatch.setitem(sys.modules, "shtab", shtab)
    with pytest.raises(SystemExit, match="0"):
        main(["--print", "zsh"])
    assert capsys.readouterr().out == "zsh completes ftrun\n"
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", "zsh"])
    assert "pip install shtab" in capsys.readouterr().err


# A job -------------------------------------------------------------------------------------------------


def test_a_job_of_several_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = ["--nproc", "2", "--rdzv-backend", "c10d", "--numa-binding", "node", "--rdzv-id", "job7"]
    template = ["-t", "1", "--log-dir", str(tmp_path), "--log-line-prefix-template", "<${hostname} ${rank}>"]
    assert main([*line, *template, "--no-python", "sh", "-c", "echo $TORCHELASTIC_RUN_ID"]) == 0
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == [f"<{socket.gethostname()} {rank}>job7" for rank in (0, 1)]
    for words in ("--numa-binding node: has no effect here", "--rdzv-backend c10d: no effect on one node"):
        assert sum(words in message for message in caplog.messages) == 1
