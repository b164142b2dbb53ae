"""Slow ranks: which are named, with which cause, after how many steps; and how often a healthy rank is.

Four gloo ranks with live state under ``ftrun``; from a drawn step on, drawn ones are slow in one of several
ways. The kinds that need a control group or a network namespace need root.

    python benchmarks/slow.py --runs 5 --kinds sleep10,gc --seed 1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANKS, BEGIN = 4, 120
RATE = "100mbit"  # of the slow link
# By kind: the causes that are right.
CAUSES = {
    "none": (),
    "sleepers": (),  # also healthy: ranks that mostly sleep
    "sleep10": ("asleep",),
    "sleep15%": ("asleep",),  # of a step
    "sleep5": ("asleep",),
    "two": ("asleep",),
    "gc": ("works",),
    "loader": ("loader",),
    "pulses": ("stopped",),
    "quota": ("throttled",),
    "link": ("link",),
}


# One rank ---------------------------------------------------------------------------------------------------


def rank_main(folder: Path, kind: str, mode: str, slow: list[int], steps: int) -> None:
    """Trains; from step `BEGIN` on some ranks are slow."""
    import torch
    import torch.distributed as dist

    import ft_wrapper

    torch.set_num_threads(1)
    me = int(os.environ["RANK"])

    @ft_wrapper.Wrapper()
    def train(call_wrapper: ft_wrapper.CallWrapper) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,)) if mode == "fsdp" else None

        def build() -> dict[str, Any]:
            model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
            if mesh is not None:
                from torch.distributed.fsdp import fully_shard

                for part in model:
                    fully_shard(part, mesh=mesh)
                fully_shard(model, mesh=mesh)
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

        live = ft_wrapper.LiveState(call_wrapper, build, **({"mesh": mesh} if mesh else {}))
        model = live["model"]
        if mesh is None:
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        batches = torch.randn(16 if kind == "sleepers" else 64, 256)
        junk: list[Any] = []
        loader = (
            iter(torch.utils.data.DataLoader(Slowly(me in slow), num_workers=1)) if kind == "loader" else None
        )
        began = usual = 0.0
        for step in live.steps(steps):
            if step == 20:
                began = time.monotonic()
            if step == BEGIN:
                usual = (time.monotonic() - began) / (BEGIN - 20)
                (folder / f"begun.{me}").touch()
            is_slow = me in slow and step >= BEGIN
            if loader is not None:
                next(loader)
            if is_slow and (kind.startswith("sleep") or kind == "two"):
                naps = {"sleep5": 0.005, "two": 0.015, "sleep15%": 0.15 * usual}
                time.sleep(naps.get(kind, 0.01))
            if is_slow and kind == "gc":
                junk = junk or [[each] for each in range(1_500_000)]
                if step % 5 == 0:
                    gc.collect()
            time.sleep(0.03 if kind == "sleepers" else 0.006)
            model(batches).square().mean().backward()
            live.commit()

    train()


class Slowly:
    """A data set whose items take long on a slow rank."""

    def __init__(self, is_slow: bool) -> None:
        self._is_slow = is_slow

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> int:
        time.sleep(0.1 if self._is_slow and number >= BEGIN else 0.001)
        return number


# One run ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def slowed(kind: str, folder: Path, pids: dict[int, int], slow: list[int]) -> Iterator[None]:
    """Slows ranks from outside, while the block runs."""
    over, group = threading.Event(), Path(f"/sys/fs/cgroup/cpu/ft_slow_{os.getpid()}")

    def pulse() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.wait(0.16):
                os.kill(pids[slow[0]], signal.SIGSTOP)
                time.sleep(0.04)
                os.kill(pids[slow[0]], signal.SIGCONT)

    pulses = threading.Thread(target=pulse)
    if kind == "quota":
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("15000")
        (group / "cgroup.procs").write_text(str(pids[slow[0]]))
    elif kind == "pulses":
        pulses.start()
    elif kind == "link":
        tc = f"netns exec {{0}} tc qdisc replace dev {{0}} root tbf rate {RATE} burst 256kbit latency 400ms"
        subprocess.run(["ip", *tc.format(link_names()[1]).split()], check=True)
    try:
        yield
    finally:
        over.set()
        if kind == "pulses":
            pulses.join()
        if kind == "quota":
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    Path("/sys/fs/cgroup/cpu/cgroup.procs").write_text(pid)
            group.rmdir()


def link_names() -> list[str]:
    """Of two namespaces, each also the name of its end of the link."""
    return [f"ftsl{os.getpid()}{end}" for end in "ab"]


@contextlib.contextmanager
def linked(ftrun: list[str], script: list[str]) -> Iterator[list[list[str]]]:
    """Two nodes in network namespaces with a link between them; gives their commands."""
    names = link_names()

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add {names[0]} type veth peer name {names[1]}")
        for number, name in enumerate(names, start=1):
            ip(f"link set {name} netns {name}")
            ip(f"-n {name} addr add 10.213.7.{number}/24 dev {name}")
            ip(f"-n {name} link set {name} up")
            ip(f"-n {name} link set lo up")
        options = ["--nnodes", "2", "--nproc-per-node", str(RANKS // 2)]
        options += ["--rdzv-endpoint", "10.213.7.1:29417"]
        inside = [["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name}"] for name in names]
        yield [[*inside[node], *ftrun, *options, "--node-id", str(node), *script] for node in range(2)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])


def one_run(kind: str, mode: str, seed: int, steps: int) -> dict[str, Any]:
    """Runs a job; returns which ranks were slow, and what was said."""
    draw = random.Random(f"{kind} {mode} {seed}")
    count = 0 if not CAUSES[kind] or kind == "link" else 2 if kind == "two" else 1
    slow = sorted(draw.sample(range(RANKS), count))
    with tempfile.TemporaryDirectory(prefix="ft_slow_") as name:
        folder = Path(name)
        ftrun = [sys.executable, "-m", "ft_wrapper.run"]
        script = [__file__, "--rank", name, kind, mode, json.dumps(slow), str(steps)]
        environment = {**os.environ, "FT_WRAPPER_EVENTS": f"{name}/events", "OMP_NUM_THREADS": "1"}
        commands = [[*ftrun, "--standalone", "--nproc-per-node", str(RANKS), *script]]
        owned = contextlib.ExitStack()
        if kind == "link":
            commands = owned.enter_context(linked(ftrun, script))
        with open(folder / "log", "w") as log:
            jobs = [subprocess.Popen(one, env=environment, stdout=log, stderr=log) for one in commands]
        job = jobs[0]
        try:
            await_file(folder / "begun.0", job)
            events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
            pids = {each["rank"]: each["pid"] for each in events if each["event"] == "enter"}
            with slowed(kind, folder, pids, slow):
                for each in jobs:
                    each.wait(600)
        finally:
            for each in jobs:
                if each.poll() is None:
                    each.terminate()
                each.wait(60)
            owned.close()
        begun = (folder / "begun.0").stat().st_mtime
        events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
        end = next((each["time"] for each in reversed(events) if each["event"] == "returned"), time.time())
        step = (end - begun) / (steps - BEGIN)
        named = [each for each in events if each["event"] == "slow"]
        is_starved = "wait for a processor for" in (folder / "log").read_text()
        if job.returncode:
            sys.exit((folder / "log").read_text()[-3000:])
    said = [
        {"rank": each["rank"], "cause": each["cause"], "share": round(each["share"], 2)}
        | {"step": round(BEGIN + (each["time"] - begun) / step), "words": each["words"]}
        for each in named
        if "cause" in each
    ]
    return {
        "kind": kind,
        "mode": mode,
        "seed": seed,
        "slow": slow,
        "step_ms": round(step * 1e3),
        "is_starved": is_starved,
        "said": said,
    }


def await_file(path: Path, job: subprocess.Popen[bytes]) -> None:
    """Waits until a job has made a file."""
    deadline = time.monotonic() + 240
    while not path.exists():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{path.name} was not made: {(path.parent / 'log').read_text()[-3000:]}")
        time.sleep(0.02)


def main() -> None:
    """Runs all kinds, and prints what was named."""
    if sys.argv[1:2] == ["--rank"]:
        folder, kind, mode, slow, steps = sys.argv[2:]
        rank_main(Path(folder), kind, mode, json.loads(slow), int(steps))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default="ddp", help="ddp,fsdp")
    parser.add_argument("--kinds", default=",".join(kind for kind in CAUSES if kind != "link"))
    given = parser.parse_args()
    for mode in given.modes.split(","):
        for kind in given.kinds.split(","):
            found = [one_run(kind, mode, given.seed + run, given.steps) for run in range(given.runs)]
            for run in found:
                print(json.dumps(run), flush=True)
            print(summary(kind, mode, found), flush=True)


def summary(kind: str, mode: str, runs: list[dict[str, Any]]) -> str:
    """One line for people."""
    after, right, false = list[int](), 0, 0
    for run in runs:
        first = {each["rank"]: each for each in reversed(run["said"]) if each["step"] >= BEGIN}
        said = [each for each in run["said"] if kind != "link" or each["cause"] != "link"]
        false += sum(each["rank"] not in run["slow"] or each["step"] < BEGIN for each in said)
        if kind == "link" and first:
            right += {each["cause"] for each in first.values()} == {"link"}
            after.append(min(each["step"] for each in first.values()) - BEGIN)
        if run["slow"] and all(rank in first for rank in run["slow"]):
            right += all(first[rank]["cause"] in CAUSES[kind] for rank in run["slow"])
            after.append(max(first[rank]["step"] for rank in run["slow"]) - BEGIN)
    steps = statistics.median(run["step_ms"] for run in runs)
    words = f"{mode} {kind}: steps of {steps:.0f} ms, {len(runs)} runs: "
    if CAUSES[kind]:
        words += f"named {len(after)}, with the cause {right}; "
        words += f"after {statistics.median(after):.0f} steps, at most {max(after)}; " if after else ""
    causes = collections.Counter(each["cause"] for run in runs for each in run["said"])
    starved = sum(run["is_starved"] for run in runs)
    return f"{words}false names {false}; causes {dict(causes)}; too few processors in {starved}"


if __name__ == "__main__":
    main()
