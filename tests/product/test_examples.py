"""The examples do what they say, as programs that people run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
from support.nightly import at_night
from support.warm_ftrun import start_ftrun, start_python

from ft_wrapper import Wrapper, events
from ft_wrapper.testing.inject_fault import ENV, parse_faults

EXAMPLES = Path(__file__).parents[2] / "examples"
SOAK = Path(__file__).parents[1] / "soak"
FTRUN = (sys.executable, "-m", "ft_wrapper.run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
FINAL = re.compile(r"^final weights sha256 [0-9a-f]{64}  loss \d+\.\d+  steps \d+$", re.MULTILINE)

pytestmark = pytest.mark.timeout(600)


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[name] = module  # dataclasses look themselves up there
    path = list(sys.path)
    sys.path.insert(0, str(EXAMPLES))  # as when it runs as a program
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
        for imported in {name, "committed", "launcher", "table"} - before:
            sys.modules.pop(imported, None)
    return module


def test_examples_use_no_old_form() -> None:
    for path in EXAMPLES.rglob("*.py"):
        found = ast.walk(ast.parse(path.read_text()))
        calls = [node for node in found if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        given = {keyword.arg for call in calls if call.func.id == "Wrapper" for keyword in call.keywords}
        old = given - {None} - inspect.signature(Wrapper).parameters.keys() | given & {"use_global_iteration"}
        assert not old, path


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, with its output in one piece."""
    words = [str(part) for part in command]
    if tuple(words[: len(FTRUN)]) == FTRUN:
        return run_ftrun(words[len(FTRUN) :], environment)
    assert words[0] == sys.executable
    process = start_python(
        words[1:], environment=environment, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def run_ftrun(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as output:
        process = start_ftrun(arguments, output.fileno(), Path.cwd(), environment)
        try:
            process.wait(400)
        except subprocess.TimeoutExpired:
            output.seek(0)
            pytest.fail(f"{arguments} did not end: {output.read().decode()}")
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(arguments, process.returncode, output.read().decode())


@pytest.fixture(autouse=True)
def without_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV, events.ENV):
        monkeypatch.delenv(name, raising=False)


# train_lm.py -------------------------------------------------------------------------------------------


def train(folder: Path, faults: str = "", *live: str, **environment: str) -> subprocess.CompletedProcess[str]:
    options = [*live, "--active", 3, "--steps", 14, "--checkpoint-every", 4, "--checkpoint-dir", folder]
    if faults:
        options += ["--faults", faults]
    return run(*FTRUN, "--nproc-per-node", 4, EXAMPLES / "train_lm.py", *options, **environment)


def test_training_ends_with_the_same_weights_whatever_happens(tmp_path: Path) -> None:
    clean = train(tmp_path / "clean")
    assert clean.returncode == 0, clean.stdout
    # One inside the step, one between two checkpoints, one while a checkpoint is about to be written.
    faults = "exception:rank=1:step=2,sigkill:rank=0:step=6,exception:rank=0:step=11:where=atomic"
    path = str(tmp_path / "events")
    faulty = train(tmp_path / "faulty", faults, **{events.ENV: path})
    assert faulty.returncode == 0, faulty.stdout
    records = events.load(path)
    assert [r["kind"] for r in records if r["event"] == "inject"] == ["exception", "sigkill", "exception"]
    assert {r["iteration"] for r in records if r["event"] == "enter"} == {0, 1, 2, 3}
    assert len(FINAL.findall(clean.stdout)) == 1, clean.stdout
    assert FINAL.findall(clean.stdout) == FINAL.findall(faulty.stdout)


def test_a_malformed_fault_is_refused(tmp_path: Path) -> None:
    result = run(*FTRUN, EXAMPLES / "train_lm.py", "--checkpoint-dir", tmp_path, "--faults", "sigkil:rank=0")
    assert result.returncode == 1
    assert "'sigkil' is not one of" in result.stdout


train_lm = load("train_lm")
committed = load("committed")


def test_steps_that_are_done_again_are_counted() -> None:
    def of(iteration: int, first: int, last: int, committed: int) -> list[dict[str, object]]:
        steps = [{"event": "step", "iteration": iteration, "step": n, "began": 0.0} for n in (first, last)]
        return [*steps, {"event": "left", "iteration": iteration, "committed": committed}, *steps[:1]]

    rolled = {"event": "left", "iteration": 1, "committed": 3}  # and came to no step of its own
    once = [*of(0, 0, 2, 2), rolled, *of(2, 3, 5, 5), *of(2, 3, 5, 6)]
    assert committed.done_again([{"event": "enter"}, *once]) == (6, 0)
    assert committed.done_again([*once, *of(3, 4, 4, 5), *of(4, 5, 8, 9)]) == (9, 2)


def saved(folder: Path) -> list[str]:
    return [path.name for path in train_lm.written(folder, "pt")]


def save(folder: Path, run: int, iteration: int, step: int) -> None:
    train_lm.save_checkpoint(folder, (run, iteration), step, {"step": step})


def test_the_last_checkpoints_are_kept_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for numbers in [(1, 0, 5), (1, 9, 90), (1, 9, 100), (1, 10, 90), (2, 0, 5)]:
        save(tmp_path, *numbers)
    names = ["run-2-iteration-0-step-5.pt", "run-1-iteration-10-step-90.pt", "run-1-iteration-9-step-100.pt"]
    assert saved(tmp_path) == names
    assert train_lm.newest_readable(tmp_path).name == names[0]


def test_what_an_iteration_writes_after_the_next_one_has_begun_is_not_believed(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, 5)
    assert train_lm.begin_with(tmp_path, (1, 1)) == "run-1-iteration-1-step-5.pt"
    with pytest.raises(SystemExit, match=r"\(1, 0\) is over: \(1, 1\) has begun"):
        save(tmp_path, 1, 0, 10)
    assert saved(tmp_path) == ["run-1-iteration-1-step-5.pt", "run-1-iteration-0-step-5.pt"]
    # And if it was paused between its look and its write:
    whole = (tmp_path / "run-1-iteration-0-step-5.pt").read_bytes()
    (tmp_path / "run-1-iteration-0-step-10.pt").write_bytes(whole)
    assert train_lm.begin_with(tmp_path, (1, 2)) == "run-1-iteration-2-step-5.pt"


def test_a_number_is_not_used_twice_in_a_folder(tmp_path: Path) -> None:
    """As when a second job uses the folder under the same name."""
    assert train_lm.begin_with(tmp_path, (1, 0)) is None
    save(tmp_path, 1, 3, 5)
    for iteration in (0, 3):
        with pytest.raises(SystemExit, match="give --run-id a name that was not used before"):
            train_lm.begin_with(tmp_path, (1, iteration))
    assert train_lm.begin_with(tmp_path, (2, 0)) == "run-2-iteration-0-step-5.pt"


def test_a_writer_removes_the_unfinished_files_of_earlier_iterations_only(tmp_path: Path) -> None:
    names = [f"run-1-iteration-{iteration}-step-5.tmp" for iteration in (0, 1, 2)]
    for name in names:
        (tmp_path / name).touch()
    save(tmp_path, 1, 1, 10)
    assert sorted(path.name for path in tmp_path.glob("*.tmp")) == names[1:]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    assert train_lm.newest_readable(tmp_path) is None
    save(tmp_path, 1, 0, 5)
    whole = (tmp_path / "run-1-iteration-0-step-5.pt").read_bytes()
    (tmp_path / "run-1-iteration-0-step-10.pt").write_bytes(whole[: len(whole) // 2])
    assert train_lm.begin_with(tmp_path, (1, 1)) == "run-1-iteration-1-step-5.pt"


def test_a_write_that_is_cut_short_changes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 0, 5)
    before = saved(tmp_path)

    def die_half_way(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die_half_way)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1, 0, 10)
    assert saved(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 2
    save(tmp_path, 1, 1, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"run-1-iteration-1-step-10.pt", *before}


# stateful_loader.py --------------------------------------------------------------------------------------

SEEN = re.compile(r"^rank \d epoch \d step \d+ rows .*$", re.MULTILINE)


@pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed: pip install torchdata"
)
def test_loaders_go_on_where_they_were_in_the_second_epoch(tmp_path: Path) -> None:
    clean, faulty = (
        run(*FTRUN, "--nproc-per-node", 2, EXAMPLES / "stateful_loader.py", tmp_path / name, *options)
        for name, options in (("clean", ["--clean"]), ("faulty", []))
    )
    assert (clean.returncode, faulty.returncode) == (0, 0), clean.stdout + faulty.stdout
    assert "restart 1: rank 1" in faulty.stdout and "restart" not in clean.stdout
    # From the checkpoint of step 12 on, in the middle of the second of three epochs of eight steps.
    all_rows, rows = SEEN.findall(clean.stdout), SEEN.findall(faulty.stdout)
    assert len(all_rows) == 2 * 24 and len(rows) == 2 * 12
    assert set(rows) == {row for row in all_rows if int(row.split()[5]) > 12}
    weights = [re.findall("final weights sha256 ([0-9a-f]{64})", one.stdout) for one in (clean, faulty)]
    assert weights[0] == weights[1] and len(weights[0]) == 1


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is not None, reason="torchdata is installed")
def test_without_torchdata_the_example_says_what_to_install(tmp_path: Path) -> None:
    done = run(sys.executable, EXAMPLES / "stateful_loader.py", tmp_path)
    assert done.returncode == 1
    assert "pip install torchdata" in done.stdout


# live_ddp.py, live_hsdp.py -----------------------------------------------------------------------------

WITH_FAULTS = f"""
import argparse, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import {{name}} as example
from ft_wrapper.testing.inject_fault import Injector

injector, batch = Injector.from_env({{fired!r}}), example.batch

def faulty_batch(step):
    injector.check("step", rank=example.dist.get_rank(), step=step)
    return batch(step)

example.batch = faulty_batch
{{rest}}
"""
LIVE = """
def steps(self, total, steps=example.LiveState.steps):
    yield from steps(self, total)
    injector.check("step", rank=example.dist.get_rank(), step=total)

example.LiveState.steps = steps
loss = example.train(15)
if loss is not None:
    print(f"loss {loss!r}")
"""


def script_with_faults(folder: Path, name: str, rest: str) -> Path:
    """An example as a module, whose batches may raise or kill, and what calls it."""
    script = folder / f"{name}_with_faults.py"
    script.write_text(WITH_FAULTS.format(name=name, fired=str(folder / "fired"), rest=rest))
    return script


@pytest.mark.parametrize(
    ("name", "options", "faults"),
    [
        ("live_ddp", (4, "--active-world-size", 3), "exception:rank=1:step=4,sigkill:rank=0:step=8"),
        *at_night(
            "live_ddp runs always",
            [
                (
                    "live_hsdp",
                    (6,),
                    "exception:rank=2:step=4,sigkill:rank=0:step=8,sigkill:rank=3:step=9",
                )
            ],
        ),
    ],
)
def test_examples_of_live_state_lose_no_step(
    name: str, options: tuple[object, ...], faults: str, tmp_path: Path
) -> None:
    """Nor where a rank is lost that has done the last one."""
    command = (*FTRUN, "--nproc-per-node", *options)
    assert (
        f"ftrun {' '.join(map(str, command[3:]))} examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text()
    )
    said = []
    for specs in ("", f"{faults},exit:rank=1:step=15"):
        folder = tmp_path / str(len(said))
        folder.mkdir()
        path = str(folder / "events")
        done = run(*command, script_with_faults(folder, name, LIVE), **{ENV: specs, events.ENV: path})
        assert done.returncode == 0, done.stdout
        records = events.load(path)
        assert committed.done_again(records) == (15, 0)
        assert len([r for r in records if r["event"] == "inject"]) == len(parse_faults(specs))
        said.append(sorted(re.findall(r"loss [\d.]+", done.stdout)))
    assert said[0] == said[1] != []


# minimal.py --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [FTRUN, *at_night("ftrun runs always", [(TORCHRUN,)])])
def test_minimal_survives_its_fault(launcher: tuple[str, ...]) -> None:
    result = run(*launcher, "--nproc-per-node", 2, EXAMPLES / "minimal.py")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("the last sum is 18.0") == 2
    assert "something broke" in result.stdout
    assert "restart 1" in result.stdout


# demo.py -----------------------------------------------------------------------------------------------

demo = load("demo")


def a_run(**changes: object) -> object:
    fields = {"exitcode": 0, "sha256": "a", "loss": "1", "output": ["said this\n"], "events": []}
    return demo.Run(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sha256": "b", "loss": "2"}, "the weights differ: loss 2 with faults, 1 without"),
        ({"sha256": None}, "did not reach its end"),
        ({"exitcode": 1}, "the run ended with exit code 1"),
        ({"events": [{"event": "inject"}]}, "1 of 0 faults happened"),
    ],
)
def test_the_demo_fails_when_something_is_wrong(
    changes: dict[str, object], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.check(a_run(), a_run(), ())
    with pytest.raises(SystemExit, match=complaint):
        demo.check(a_run(**changes), a_run(), ())
    assert "said this" in capsys.readouterr().out


@pytest.mark.nightly("an ftrun is stopped by signals in tests/process/agent/test_the_end.py always")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_nothing_behind(signum: signal.Signals, tmp_path: Path) -> None:
    """No folder; and no process, which the check after every test sees."""
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "demo.py"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("  step"):
                process.send_signal(signum)
                break
        process.stdout.read()
    assert process.returncode == 128 + signum
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("ft-wrapper", "ftrun"))]


# kill_and_rejoin.py ------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [(), ("--live",)], ids=["plain", "live"])
@pytest.mark.nightly("training with faults, and live state, run always")
def test_ranks_that_are_killed_and_come_back_lose_nothing(live: tuple[str, ...]) -> None:
    """Short: `make soak` does it for ten minutes. This seed kills slot 0, then slot 2, the only spare."""
    options = ["--ranks", 3, "--active", 2, "--minutes", 0.12, "--every", 2.4, "--seed", 50, "--verbose"]
    result = run(sys.executable, SOAK / "kill_and_rejoin.py", *options, *live)
    assert result.returncode == 0, result.stdout
    assert "the same weights, bit for bit" in result.stdout
    assert "slot 0 joined" in result.stdout
    assert re.search(r"^2 processes were started again, 0 of them", result.stdout, re.MULTILINE), (
        result.stdout
    )
    assert ("0 of them done again" in result.stdout) == bool(live)


# kill_nodes.py -----------------------------------------------------------------------------------------


@pytest.mark.nightly(
    "nodes are lost in tests/process/agent/test_nodes.py, and kill_and_rejoin.py is run always"
)
def test_a_node_that_is_lost_and_comes_back_loses_nothing() -> None:
    """Short: `make soak-nodes` does it for ten minutes. This seed kills slot 0, then the other node."""
    options = ["--minutes", 0.2, "--every", 2.5, "--seed", 619]
    result = run(sys.executable, SOAK / "kill_nodes.py", *options)
    assert result.returncode == 0, result.stdout
    assert "the same weights, bit for bit" in result.stdout
    assert "node lost, " in result.stdout
    assert "node 1 is started again" in result.stdout


# ddp_before.py, ddp_after.py ---------------------------------------------------------------------------


# A gloo thread that drops its last work while Python ends cannot take the GIL any more, and torch aborts. A
# script without the wrapper ends so now and then on a busy machine, under torchrun as under ftrun.
TORCH_ABORTS = "terminate called without an active exception"


@pytest.mark.whole_ends
@pytest.mark.nightly("the script with the wrapper goes through the loss of a rank below")
def test_both_scripts_of_the_readme_end_with_the_same_loss(tmp_path: Path) -> None:
    said = []
    for launcher, name in ((TORCHRUN, "before"), (FTRUN, "before"), (FTRUN, "after")):
        for attempt in range(1 if name == "after" else 10):
            folder = tmp_path / f"{len(said)}.{attempt}"
            folder.mkdir()
            done = run(*launcher, "--nproc-per-node", 2, EXAMPLES / f"ddp_{name}.py", folder)
            if TORCH_ABORTS not in done.stdout:
                break
        assert done.returncode == 0, done.stdout
        said += re.findall(r"^loss \d\.\d{6}$", done.stdout, re.MULTILINE)
        assert (folder / "checkpoint.pt").exists()
    assert len(said) == 3 and len(set(said)) == 1


FAILS_AFTER_THE_LAST_SAVE = """
import os, runpy, sys

script, flag, folder = sys.argv[1:]
replace, saves = os.replace, []

def replace_and_die(source, target):
    replace(source, target)
    saves.append(target)
    if len(saves) == 5 and not os.path.exists(flag):
        open(flag, "w").close()
        os._exit(1)

os.replace = replace_and_die
sys.argv = [script, folder]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.whole_ends
def test_a_training_that_loses_a_rank_after_its_last_step_ends_well(tmp_path: Path) -> None:
    """The third run has the folder of the first, and nothing left to do."""
    script, flag = tmp_path / "fails_once.py", tmp_path / "failed"
    script.write_text(FAILS_AFTER_THE_LAST_SAVE)
    losses = []
    for folder in ("with", "without", "with"):
        (tmp_path / folder).mkdir(exist_ok=True)
        fails = not flag.exists()
        done = run(*FTRUN, "--nproc-per-node", 2, script, EXAMPLES / "ddp_after.py", flag, tmp_path / folder)
        assert done.returncode == 0 and flag.exists(), done.stdout
        assert ("restart 1" in done.stdout) == fails, done.stdout
        losses += re.findall(r"^loss \d\.\d{6}$", done.stdout, re.MULTILINE)
    assert len(losses) == 3 and len(set(losses)) == 1
