"""A line that torchrun takes, ftrun takes: with one line of warning where it means something else here."""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_job import FtRun
from torch.distributed import run as torchrun
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_args_parser

from ft_wrapper.agent import options as ftrun_options
from ft_wrapper.agent.options import NO_EFFECT, Options, make_parser, parse_args
from ft_wrapper.run import main

# Every option of torchrun in each way to say it: in full, abbreviated, and by its variable -----------------

VALUES = {
    "log_dir": "/nowhere/logs",
    "master_port": "29501",
    "nnodes": "1:1",
    "nproc_per_node": "2",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:0",
    "rdzv_id": "job7",
    "rdzv_conf": "join_timeout=50",
    "max_restarts": "1",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "event_log_handler": "console",
    "role": "trainer",
    "redirects": "3",
    "tee": "0:3",
    "local_ranks_filter": "0,7",
    "duplicate_stdout_filters": "apple,,orange",
    "duplicate_stderr_filters": "apple",
    "node_rank": "0",
    "master_addr": "127.0.0.1",
    "local_addr": "127.0.0.1",
    "logs_specs": "own",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "7",
    "log_line_prefix_template": "<${role_name} ${rank} ${local_rank} ${hostname}>",
}
"""What to give them, by their names in the result of parsing."""

END = ("help", "print_completion")
"""Options that print something and end."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to give one option.

    Args:
        option: in full.
        dest: its name in the result of parsing.
        how: ``long``, ``abbreviated`` or ``variable``.
        arguments: what stands on the command line.
        environment: what does not.
    """

    option: str
    dest: str
    how: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def forms(parser: argparse.ArgumentParser) -> Iterator[Form]:
    """All forms of all options of torchrun but those that end it."""
    for action in options(parser):
        if action.dest in END:
            continue
        given = () if action.nargs == 0 else (VALUES[action.dest],)
        option = max(action.option_strings, key=len)
        yield Form(option, action.dest, "long", (option, *given))
        yield Form(option, action.dest, "abbreviated", (abbreviated(option, parser), *given))
        if isinstance(action, (env, check_env)):
            variable = (f"PET_{action.dest.upper()}", given[0] if given else "1")
            yield Form(option, action.dest, "variable", (), (variable,))


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of a parser, each once."""
    return list({action.dest: action for action in parser._actions if action.option_strings}.values())


def abbreviated(option: str, parser: argparse.ArgumentParser) -> str:
    """The shortest beginning of an option that no other one has; the option itself if there is none."""
    own = next(action.dest for action in options(parser) if option in action.option_strings)
    others = [
        text
        for action in options(parser)
        for text in action.option_strings
        if action.dest != own and text.startswith("--")
    ]
    for end in range(3, len(option)):
        if not any(text.startswith(option[:end]) for text in others):
            return option[:end]
    return option


FORMS = list(forms(get_args_parser()))


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


# Every option, in each form ----------------------------------------------------------------------------

EFFECTS: dict[str, Callable[[Options], bool]] = {
    "nproc_per_node": lambda found: found.nproc_per_node == 2,
    "rdzv_endpoint": lambda found: (
        found.rendezvous is not None and found.rendezvous.endpoint == "localhost:0"
    ),
    "rdzv_id": lambda found: found.run_id == "job7",
    "max_restarts": lambda found: found.max_restarts == 1,
    "monitor_interval": lambda found: found.monitor_interval == 0.5,
    "role": lambda found: found.role == "trainer",
    "module": lambda found: found.program.is_module and found.script == "json.tool",
    "no_python": lambda found: found.program.script is None,
    "log_dir": lambda found: found.log_dir == "/nowhere/logs",
    "redirects": lambda found: found.redirects == Std.ALL,
    "tee": lambda found: found.tee == {0: Std.ALL},
    "local_ranks_filter": lambda found: found.local_ranks_filter == {0, 7},
    "master_addr": lambda found: found.address == "127.0.0.1",
    "master_port": lambda found: found.port == 29501,
    "logs_specs": lambda found: found.logs_specs is OwnSpecs,
    "signals_to_handle": lambda found: found.signals == (signal.SIGTERM, signal.SIGUSR1),
    "shutdown_timeout": lambda found: found.shutdown_timeout == 7,
    "virtual_local_rank": lambda found: found.virtual_local_rank,
    "log_line_prefix_template": lambda found: "${hostname}" in str(found.log_line_prefix),
}
"""What is different with `VALUES`."""
NO_DIFFERENCE = {
    *("nnodes", "standalone", "node_rank"),  # said as it is by default
    "local_addr",  # of nodes that meet others
    *("start_method", "run_path"),
}
WARNED_OF = {"rdzv_backend", "rdzv_conf", "local_ranks_filter"} | {ftrun_options.name(o) for o in NO_EFFECT}


def said(form: Form, script: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    program = {"module": "json.tool", "no_python": "true"}.get(form.dest, str(script))
    with monkeypatch.context() as patch:
        for name, value in form.environment:
            patch.setenv(name, value)
        return parse_args([*form.arguments, program])


def all_of(options: Options) -> dict[str, object]:
    return {**vars(options), "rendezvous": options.rendezvous and vars(options.rendezvous)}


@pytest.mark.usefixtures("own_specs")
def test_each_form_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "x.py"
    script.touch()
    for form in FORMS:
        (long,) = (other for other in FORMS if (other.option, other.how) == (form.option, "long"))
        found = said(form, script, monkeypatch)
        assert all_of(found) == all_of(said(long, script, monkeypatch)), form
        if form.dest in EFFECTS:
            assert EFFECTS[form.dest](found), form
        elif form.dest in NO_DIFFERENCE:
            assert all_of(found) == all_of(said(Form("", "", ""), script, monkeypatch)), form
        warned = form.dest in WARNED_OF or form.dest not in EFFECTS.keys() | NO_DIFFERENCE
        assert [form.option in warning for warning in found.warnings] == [True] * warned, form


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
    assert (options.log_line_prefix, options.signals) == ("<>", (signal.SIGTERM,))
    assert options.virtual_local_rank
    assert len(parsed("--numa-binding", "node", "--event-log-handler", "console").warnings) == 2


# Several options at once --------------------------------------------------------------------------------

WORDS: dict[str, list[str]] = {
    "--nnodes": ["1", "2", "1:2", " 2"],
    "--nproc-per-node": ["1", "2", "cpu", "auto"],
    "--rdzv-backend": ["c10d", "static"],
    "--rdzv-endpoint": ["localhost:0", "localhost", "a:1", "[::1]:3", ""],
    "--rdzv-id": ["7", "a b", ""],
    "--rdzv-conf": [
        "join_timeout=3",
        "a=b",
        "is_host=1",
        "store_type=file",
        "rank=1",
        "timeout=9,read_timeout=5",
    ],
    "--standalone": [],
    "--max-restarts": ["0", "+1", " 2"],
    "--monitor-interval": ["1", "1e-3"],
    "--start-method": ["spawn", "fork"],
    "--event-log-handler": ["null", "console"],
    "--role": ["x", "a b", ""],
    "--no-python": [],
    "--run-path": [],
    "--log-dir": ["logs", ""],
    "--redirects": ["0", "3", "0:1,7:2"],
    "--tee": ["3", "1:3"],
    "--local-ranks-filter": ["0", "0,7", " 1, 2", "-1"],
    "--duplicate-stdout-filters": ["a,b", ""],
    "--node-rank": ["0", "1", "+1"],
    "--master-addr": ["127.0.0.1", "head", "[::1]", ""],
    "--master-port": ["29501", "0", "+5"],
    "--local-addr": ["127.0.0.1", ""],
    "--numa-binding": ["node"],
    "--signals-to-handle": ["SIGTERM", "SIGTERM, SIGUSR1", "TERM", ""],
    "--shutdown-timeout": ["7", "0"],
    "--virtual-local-rank": [],
    "--log-line-prefix-template": ["<${hostname}>", ""],
}


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


def test_lines_with_several_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "x.py"
    script.touch(0o755)
    there = [option for option in WORDS if option in get_args_parser()._option_string_actions]
    chance = random.Random(0)
    taken = 0
    for _ in range(300):
        line = []
        for option in chance.sample(there, chance.randint(2, 5)):
            line.append(f"{option}={chance.choice(WORDS[option])}" if WORDS[option] else option)
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


@pytest.mark.usefixtures("later")
def test_an_option_of_a_later_torchrun_takes_its_abbreviations() -> None:
    assert parsed("--spare", "3").spare_nodes == 0
    assert make_parser().parse_args(["--node-i", "x"]).node_index


def test_every_unique_abbreviation_of_torchruns_is_known() -> None:
    parser = make_parser()
    for action in options(get_args_parser()):
        for option in action.option_strings:
            if option.startswith("--"):
                shortest = abbreviated(option, get_args_parser())
                (match,) = parser._get_option_tuples(shortest)
                assert action.dest == match[0].dest, shortest


# What is superfluous, or unknown -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--rdzv-backend c10d", "--rdzv-backend c10d: no effect on one node without --rdzv-endpoint"),
        ("--rdzv-backend etcd", "--rdzv-backend etcd: no effect"),
        ("--rdzv-conf join_timeout=9", "--rdzv-conf join_timeout=9: no effect"),
        ("--node-id 5", "--node-id 5: no effect"),
        ("--node-rank 5", "--node-rank 5: no effect"),
        ("--rdzv-backend c10d --node-rank 5", "--rdzv-backend c10d, --node-rank 5: no effect"),
        ("--rdzv-id 7", ""),
        ("--rdzv-backend static", ""),
        ("--standalone", ""),
        ("--standalone --rdzv-endpoint a:1", "--rdzv-endpoint a:1: no effect beside --standalone"),
        (
            "--standalone --nnodes 1:4 --rdzv-backend c10d --rdzv-id 7 --rdzv-conf a=b --node-rank 2",
            "--rdzv-backend c10d, --rdzv-conf a=b, --node-rank 2, --nnodes 1:4, --rdzv-id 7: no effect",
        ),
        ("--standalone --rdzv-backend carrier-pigeon --master-port 1", "carrier-pigeon, --master-port 1: no"),
        ("--local-ranks-filter 0,7", "--local-ranks-filter 0,7: there is no local rank 7"),
        ("--redirects 7:3,9:1", "--redirects 7:3,9:1: there is no local rank 7, 9 with --nproc-per-node 1"),
        ("--tee 1:3", "--tee 1:3: there is no local rank 1"),
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


def test_ranks_that_are_not_there_do_not_count() -> None:
    options = parsed("--nproc-per-node", "2", "--redirects", "1:3,7:3", "--local-ranks-filter", "1, 7")
    assert options.redirects == {1: Std.ALL}
    assert options.local_ranks_filter is not None
    assert 1 in options.local_ranks_filter
    assert 0 not in options.local_ranks_filter


def test_numbers_as_torchrun_takes_them() -> None:
    line = ["--nnodes= 1: 2", "--max-restarts=+3", "--master-port= 29501", "--node-rank=+1", "--rdzv-id="]
    options = parsed(*line)
    assert options.rendezvous is not None
    parameters = options.rendezvous
    assert (parameters.min_nodes, parameters.max_nodes, options.max_restarts) == (1, 2, 3)
    assert (parameters.endpoint, parameters.config["node_id"]) == ("127.0.0.1:29501", "1")
    assert parameters.run_id == "none"


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
    (warning,) = options.warnings
    assert warning == "--rdzv-conf nproc=4: no effect: --nproc-per-node says 1"
    options = parsed(*MEET, "--rdzv-conf", "node_id=3", "--node-rank", "1")
    assert options.warnings == ("--rdzv-conf node_id=3: no effect: --node-rank says 1",)


def test_an_id_for_a_rendezvous_without_ids() -> None:
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
    for option in ("--print-completion", "--print_completion", "--print"):
        with pytest.raises(SystemExit) as end:
            main([option, "zsh"])
        assert end.value.code == 0
        assert capsys.readouterr().out == "zsh completes ftrun\n"
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "zsh"])
    assert end.value.code == 2
    assert "pip install shtab" in capsys.readouterr().err


# Real jobs ---------------------------------------------------------------------------------------------


def test_a_job_of_several_options(tmp_path: Path) -> None:
    line = ["--nproc", "2", "--rdzv-backend", "c10d", "--numa-binding", "node", "--rdzv-id", "job7"]
    template = ["-t", "1", "--log-dir", str(tmp_path), "--log-line-prefix-template", "<${hostname} ${rank}>"]
    echo = ["--no-python", "sh", "-c", "echo $TORCHELASTIC_RUN_ID"]
    with FtRun(tmp_path / "job", *line, *template, *echo) as job:
        assert job.end() == 0, job.said
    lines = job.said.splitlines()
    said = sorted(line for line in lines if line.startswith("<"))
    assert said == [f"<{socket.gethostname()} {rank}>job7" for rank in (0, 1)]
    for words in ("--numa-binding node: has no effect here", "--rdzv-backend c10d: no effect on one node"):
        (warning,) = (line for line in lines if words in line)
        assert " ftrun: --" in warning
