"""Ranks that are forked from the template: they find what a process started by exec finds."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

from agent_job import FtRun, write_script

DUMP = """
    import gc, json, os, pickle, random, signal, sys, threading
    import numpy, torch

    class Mine:
        pass

    record = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "spec": str(__spec__),
        "environment": dict(os.environ),
        "handlers": {int(s): str(signal.getsignal(s)).split(" at ")[0] for s in signal.valid_signals()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "directory": os.getcwd(),
        "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        "gc": gc.isenabled(),
        "threads": torch.get_num_threads(),
        "python threads": [thread.name for thread in threading.enumerate()],
        "descriptors": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 256)
                        if os.path.exists(f"/proc/self/fd/{fd}")],
        "main": threading.current_thread() is threading.main_thread(),
        "pickled": type(pickle.loads(pickle.dumps(Mine()))) is sys.modules["__main__"].Mine,
        "product": (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item(),
    }
    record["random"] = [torch.rand(1).item(), numpy.random.rand(), random.random()]
    record["parent"] = os.getppid()
    with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
        json.dump(record, file)
"""

# Those that name a file, an address or a run, and the counts that differ for each.
OWN = {
    "FT_WRAPPER_STORE",
    "FT_WRAPPER_AGENT",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "FT_WRAPPER_PROCESS",
    "FT_WRAPPER_EVENTS",
    "TMPDIR",
    "PWD",
    "OLDPWD",
}


def dumped(folder: Path, script: str, *options: str) -> list[dict[str, Any]]:
    with FtRun(folder, "--nproc-per-node", "2", *options, script, str(folder), "--x", "-m") as job:
        assert job.end() == 0, job.said
        records = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        assert [record.pop("parent") for record in records] == [job.process.pid] * 2
    for record in records:
        record["argv"].remove(str(folder))
        record["orig_argv"].remove(str(folder))
        record.pop("directory")
        for name in OWN & record["environment"].keys():
            record["environment"].pop(name)
    return records


def test_a_forked_rank_finds_what_an_executed_one_finds(tmp_path: Path) -> None:
    script = write_script(tmp_path, DUMP)
    forked = dumped(tmp_path / "forked", script)
    executed = dumped(tmp_path / "executed", script, "--no-fork")
    for number in range(3):
        assert forked[0]["random"][number] != forked[1]["random"][number]
    for record in (*forked, *executed):
        record.pop("random")
    for one, other in zip(forked, executed, strict=True):
        different = {name: (one[name], other[name]) for name in one if one[name] != other[name]}
        assert not different


ENDS = """
    import os, signal, sys, threading
    rank = int(os.environ["RANK"])
    def fail():
        raise ValueError("of no use")
    if rank == 1: sys.exit(3)
    if rank == 2: fail()
    if rank == 3: os.kill(os.getpid(), signal.SIGSEGV)
    if rank == 4: sys.exit("in words")
    if rank == 5: os._exit(6)
    if rank == 0:
        import atexit
        atexit.register(lambda: print("at exit"))
        threading.Thread(target=lambda: print("in a thread")).start()
"""


def test_exit_codes_and_the_traceback(tmp_path: Path) -> None:
    script = write_script(tmp_path, ENDS)
    options = ["--nproc-per-node", "6", "--restart-policy", "rank", "--max-rank-restarts", "0", "-r", "3"]
    with FtRun(tmp_path / "job", *options, "--log-dir", str(tmp_path / "logs"), script) as job:
        code = job.end()
        ends = {record["rank"]: record["exitcode"] for record in job.events("rank_ended")}
        first = next(rank for rank, exitcode in ends.items() if exitcode)
        assert code == (75 if first == 3 else 1), "the first one decides; a kill may not happen again"
        assert ends == {0: 0, 1: 3, 2: 1, 3: -signal.SIGSEGV, 4: 1, 5: 6}
        assert "5 of 6 ranks failed" in job.said
    (folder,) = (tmp_path / "logs").glob("*/attempt_0")
    assert (folder / "0" / "stdout.log").read_text().splitlines() == ["in a thread", "at exit"]
    trace = (folder / "2" / "stderr.log").read_text()
    assert trace.startswith(f'Traceback (most recent call last):\n  File "{script}", line 7, in <module>')
    assert "ValueError: of no use\n" in trace  # torch 2.15 may say at the end what its bindings leave
    assert "in words" in (folder / "4" / "stderr.log").read_text()


def test_a_module_and_the_template_s_death(tmp_path: Path) -> None:
    job_folder = tmp_path / "job"
    package = job_folder / "pack"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        textwrap.dedent("""
            import os, signal, sys
            from . import __name__ as package
            print(package, __name__, sys.argv[1:], sys.path[0] == os.getcwd(), __spec__.name, flush=True)
            open(f"{os.environ['RANK']}.{os.environ['FT_WRAPPER_INCARNATION']}", "w").close()
            if os.environ["FT_WRAPPER_INCARNATION"] == "0":
                signal.pause()
        """)
    )
    options = ["--restart-policy", "rank", "--max-rank-restarts", "1", "-m", "pack", "a", "-b"]
    with FtRun(job_folder, *options) as job:
        job.await_file(job_folder / "0.0")
        assert "pack __main__ ['a', '-b'] True pack.__main__" in job.said
        (first,) = job.pids(0)
        template = job.template()
        template.kill()
        template.wait(30)
        os.kill(first, signal.SIGKILL)
        # No one is left to fork its replacement from, so that is executed.
        job.await_file(job_folder / "0.1")
        assert job.end() == 0, job.said
        assert job.said.count("pack __main__ ['a', '-b'] True pack.__main__") == 2
        assert "standby process" in job.said
