"""How long a fault stops a job: from the fault to the last rank being back in the function.

    python benchmarks/restart_latency.py            # everything, under ten minutes on two cores
    python benchmarks/restart_latency.py --quick    # fewer ranks and repeats, under two minutes
    python benchmarks/restart_latency.py --etcd     # also with the job's store on an etcd of three members

The same function, with the same faults at the same moments, under ft_wrapper, NVRx 0.4.1 with its defaults,
NVRx with every interval at 50 ms, and torchrun. The rank that fails stamps the time just before; each rank
stamps the time when it is in the function again, and when it has done its first step there. Figures are
medians; times are of this machine, the ratios are what to compare.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each wait that times out would print two warnings

import psutil
from figures import duration, median, ratio, spread, table
from jobs import Job, job, own_all_descendants
from peers import OURS, TORCHRUN, Implementation, add_arguments, chosen
from plan import Fault, Plan
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError

from ft_wrapper import events
from ft_wrapper.store.address import EtcdAddress
from ft_wrapper.store.plan import ANNOUNCED, connect_etcd

WORKER = Path(__file__).resolve().parent / "restart_worker.py"
FORMATION_TIMEOUT = 90.0  # seconds for all ranks to be in the function for the first time
RETURN_TIMEOUT = {"": 10.0, TORCHRUN: 60.0}  # seconds for all ranks to be back after a fault
SOFT_TIMEOUT = 3.0
HANG_TIMEOUT = 15.0  # seconds beyond SOFT_TIMEOUT until a hang counts as not recovered
RESIDENT = 4 << 30
# ft_wrapper's events of a restart, in the order in which a rank meets them.
PHASES = ("fault", "end", "abort", "left", "arrive", "decide", "decided", "enter")
OURS_ON_ETCD = f"{OURS} on etcd"
BACK = {False: "back, no group", True: "back, group"}
FIRST_COLLECTIVE = "group made, collective done"
FIRST_STEP = "first step after"
Sample = tuple[str, str, int, str]  # implementation, fault, ranks, what was measured


@dataclasses.dataclass
class Recovery:
    """What became of one fault.

    Args:
        kind: of the fault.
        back: seconds until the last rank was in the function; None if that did not happen in time.
        ready: the same until the last rank had a group and a collective done in it; None without a group.
        group: seconds that the last rank then needed from the function's first line to that point.
        step: seconds until the last rank had done the first step after the fault.
        alive: ranks living after it.
        phases: by event of ft_wrapper, seconds from the fault until the last rank had it.
    """

    kind: str
    back: float | None
    ready: float | None = None
    group: float | None = None
    step: float | None = None
    alive: int = 0
    phases: dict[str, float] = dataclasses.field(default_factory=dict)


def await_key(store: Store, key: str, timeout: float, living: Job) -> bool:
    """Waits for a key of the driver's store; returns whether it came before the time was up.

    Args:
        store: the driver's.
        key: what to wait for.
        timeout: in seconds.
        living: the job, given up as soon as none of its processes lives.
    """
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=min(left, 2.0)))
            return True
        except DistStoreError:  # a chance for Ctrl-C, and to see that all have ended
            if not living.processes():
                return False
    return False


def recovery_of(job_: Job, fault: Fault, index: int, expected: int) -> Recovery:
    """Reads from the stamps how long a fault took.

    Args:
        job_: the job.
        fault: what happened.
        index: its number.
        expected: how many ranks were to come back.
    """
    records = job_.records()
    at = next(r["monotonic"] for r in records if r["event"] == "fault" and r["index"] == index)
    by_iteration: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if record["event"] != "fault" and record["index"] == index + 1:
            by_iteration[record["iteration"]][record["event"]][record["slot"]] = record["monotonic"]
    complete = [stamps for _, stamps in sorted(by_iteration.items()) if len(stamps["enter"]) == expected]
    if not complete:
        return Recovery(fault.kind, None)
    enter, ready, step = (complete[0][event] for event in ("enter", "ready", "step"))
    back = max(enter.values()) - at
    result = Recovery(fault.kind, back)
    if len(step) == expected:
        result.step = max(step.values()) - at
    if len(ready) == expected:
        result.ready = max(ready.values()) - at
        result.group = max(ready.values()) - max(enter.values())
    if job_.events.exists():
        result.phases = phases_between(events.load(str(job_.events)), at, max(enter.values()))
    return result


def phases_between(records: list[dict[str, Any]], start: float, end: float) -> dict[str, float]:
    """Returns when, after ``start``, the last rank met each event of a restart."""
    last: dict[str, float] = {}
    for record in records:
        if start <= record["monotonic"] <= end and record["event"] in PHASES:
            last[record["event"]] = max(last.get(record["event"], 0.0), record["monotonic"] - start)
    return last


def run(
    folder: Path,
    implementation: Implementation,
    ranks: int,
    faults: list[Fault],
    group: bool,
    resident: int = 0,
    with_events: bool = False,
    settings: dict[str, float] | None = None,
    patience: float | None = None,
) -> list[Recovery]:
    """Runs one job through its faults.

    Args:
        folder: for the job's files.
        implementation: what restarts it.
        ranks: how many.
        faults: what happens, in turn. A killed rank does not come back, except under torchrun.
        group: whether the function trains in a process group.
        resident: bytes that the last rank holds.
        with_events: whether ft_wrapper writes its events, which takes some of the time that is measured.
        settings: durations in seconds, besides the implementation's.
        patience: seconds to wait for the return after each fault; by implementation when None.

    Raises:
        RuntimeError: the job did not even start; the message holds the end of its output.
    """
    torchrun = implementation.name == TORCHRUN
    if patience is None:
        patience = RETURN_TIMEOUT[TORCHRUN if torchrun else ""]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with job(folder) as job_, on_etcd(implementation, job_.name) as announced:
        plan = Plan(
            module=implementation.module,
            settings={**implementation.settings, **(settings or {})},
            store=f"127.0.0.1:{store.port}",
            log=str(job_.log),
            limit=round(FORMATION_TIMEOUT + len(faults) * patience) + 60,
            group=group,
            own_group_store=implementation.own_group_store,
            faults=tuple(faults),
            resident=resident,
        )
        worker = [str(WORKER), plan.to_json()]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            launcher += [f"--nproc-per-node={ranks}", f"--max-restarts={len(faults)}"]
            # Without it torch 2.13 reuses the store of the attempt before, and some restarts fail or hang.
            job_.start([implementation.python, *launcher, *worker], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        else:
            job_.start_ranks([implementation.python, *worker], ranks, with_events, **announced)
        if not await_key(store, "back/0", FORMATION_TIMEOUT, job_):
            raise RuntimeError(f"{implementation.name} with {ranks} ranks did not start:\n{job_.complaint()}")
        recoveries = []
        expected = ranks
        for index, fault in enumerate(faults):
            if fault.kind == "sigkill" and not torchrun:
                expected -= 1
            came_back = await_key(store, f"back/{index + 1}", fault.pause + patience, job_)
            if came_back:
                recoveries.append(recovery_of(job_, fault, index, expected))
            else:
                recoveries.append(Recovery(fault.kind, None))
            recoveries[-1].alive = sum(process.poll() is None for process in job_.started)
            if not came_back:
                print(f"{implementation.name}, {ranks} ranks: not back {patience:.0f} s after {fault.kind}")
                print(job_.complaint(), flush=True)
                break
        return recoveries


@contextlib.contextmanager
def on_etcd(implementation: Implementation, name: str) -> Iterator[dict[str, str]]:
    """Begins a job in etcd as an agent would, and removes what it has left there.

    Args:
        implementation: whose job; nothing is done if it is none on etcd.
        name: of the job.

    Yields:
        What its ranks find in their environment.
    """
    if not implementation.etcd:
        yield {}
        return
    address = EtcdAddress(implementation.etcd, name)
    store = connect_etcd(address, timedelta(seconds=10), begins=True)
    try:
        yield {ANNOUNCED: str(address)}
    finally:
        store.remove()
        store.close()


class Samples:
    """All that was measured."""

    def __init__(self) -> None:
        self.values: dict[Sample, list[float]] = defaultdict(list)
        self.lost: dict[Sample, int] = defaultdict(int)
        self.phases: dict[tuple[str, int, str], list[dict[str, float]]] = defaultdict(list)

    def add(self, name: str, ranks: int, label: str, group: bool, recoveries: list[Recovery]) -> None:
        """Adds what a job showed.

        Args:
            name: of the implementation.
            ranks: how many.
            label: stands behind the fault's name.
            group: whether there was a process group.
            recoveries: one a fault.
        """
        measured = BACK[group]
        for recovery in recoveries:
            kind = recovery.kind + label
            if recovery.phases:  # of a job that wrote its events, which takes time
                last = {**recovery.phases, "function": recovery.back or 0.0}
                if recovery.ready is not None:
                    last["group"] = recovery.ready
                self.phases[kind, ranks, measured].append(last)
                continue
            if recovery.back is None:
                self.lost[name, kind, ranks, measured] += 1
                continue
            self.values[name, kind, ranks, measured].append(recovery.back)
            if recovery.ready is not None:
                self.values[name, kind, ranks, FIRST_COLLECTIVE].append(recovery.ready)
            if recovery.group is not None:
                self.values[name, kind, ranks, "of that, the group"].append(recovery.group)
            if recovery.step is not None:
                with_group = f"{FIRST_STEP}, {'group' if group else 'no group'}"
                self.values[name, kind, ranks, with_group].append(recovery.step)

    def is_lost(self, name: str, kind: str, ranks: int, group: bool) -> bool:
        """Returns whether a job of as many or fewer ranks did not come back: another would only take time."""
        return any((name, kind, fewer, BACK[group]) in self.lost for fewer in range(ranks + 1))

    def cell(self, key: Sample) -> str:
        """Returns the median for people, or that there was no return."""
        name, kind, ranks, measured = key
        if key not in self.values and key not in self.lost:
            tried_before = any((name, kind, fewer, measured) in self.lost for fewer in range(ranks))
            return "not tried" if tried_before else "-"
        text = duration(median(self.values[key])) if key in self.values else "-"
        if key not in self.lost:
            return text
        return f"{text} ({self.lost[key]} not back)" if key in self.values else "not back"

    def print_details(self) -> None:
        """Prints least, median and greatest of everything."""
        rows = [
            [f"{kind}, {ranks} ranks, {measured}", name, spread(values)]
            for (name, kind, ranks, measured), values in self.values.items()
        ]
        print("\nAll figures: median (least .. greatest)\n" + table(["", "", ""], sorted(rows)))

    def print_phases(self) -> None:
        """Prints where ft_wrapper's time goes."""
        rows = []
        names = (*PHASES, "function", "group")
        for (kind, ranks, measured), all_ in self.phases.items():
            medians = [median([one[name] for one in all_ if name in one]) for name in names]
            rows.append([f"{kind}, {ranks} ranks, {measured}", *map(duration, medians)])
        if rows:
            print("\nft_wrapper, from the fault until the last rank had: medians")
            print(table(["", *names], rows))

    def print_comparison(self, names: list[str]) -> None:
        """Prints the table of medians and ratios."""
        peers = [name for name in names if name != OURS]
        keys: dict[tuple[str, int, str], None] = {}
        for _, kind, ranks, measured in (*self.values, *self.lost):
            keys[kind, ranks, measured] = None
        rows = []
        for kind, ranks, measured in sorted(keys):
            ours = median(self.values.get((OURS, kind, ranks, measured), []))
            row = [f"{kind}, {ranks} ranks, {measured}"]
            row += [self.cell((name, kind, ranks, measured)) for name in names]
            row += [ratio(median(self.values.get((name, kind, ranks, measured), [])), ours) for name in peers]
            rows.append(row)
        print("\nFrom the fault to all ranks: medians, and how many times longer the peer takes")
        print(table(["fault", *names, *(f"{peer} /" for peer in peers)], rows))


def faults_of(ranks: int, seed: int, exceptions: int, torchrun: bool) -> list[Fault]:
    """Returns the faults of a job, the same for every implementation.

    Exceptions on all ranks in turn, then a SIGKILL of the last rank: never of rank 0, which hosts NVRx's
    store. Under torchrun, where killed ranks come back, two.
    """
    chance = random.Random(f"{ranks} {seed}")
    pauses = [0.1 + chance.random() for _ in range(exceptions + 1)]
    faults = [Fault("exception", (seed + i) % ranks, pauses[i]) for i in range(exceptions)]
    faults.append(Fault("sigkill", ranks - 1, pauses[-1]))
    return faults + faults[-1:] if torchrun else faults


def hang(folder: Path, implementation: Implementation, faults: int) -> list[Recovery]:
    """One of two ranks falls asleep while the other sits in a gloo collective, several times."""
    chance = random.Random(1)
    plan = [Fault("hang", i % 2, 0.1 + 0.9 * chance.random()) for i in range(faults)]
    return run(
        folder,
        implementation,
        ranks=2,
        faults=plan,
        group=True,
        # hard_timeout ends a rank for good, later: who gets by without it has time to show it.
        settings={"soft_timeout": SOFT_TIMEOUT, "hard_timeout": 4 * SOFT_TIMEOUT},
        patience=SOFT_TIMEOUT + HANG_TIMEOUT,
    )


def print_hang(hangs: dict[str, list[Recovery]]) -> None:
    """Prints what became of the hangs."""
    rows = []
    for name, recoveries in hangs.items():
        late = [r.back - SOFT_TIMEOUT for r in recoveries if r.back is not None]
        lost = sum(r.back is None for r in recoveries)
        patience = SOFT_TIMEOUT + HANG_TIMEOUT
        outcome = f"not back within {patience:.0f} s" if lost else "all back"
        rows.append([name, spread(late), outcome, f"{min(r.alive for r in recoveries)} of 2"])
    print(f"\nOne rank of two hangs behind a collective, soft_timeout {SOFT_TIMEOUT:.0f} s")
    print(table(["", "back later than soft_timeout", "outcome", "ranks alive"], rows))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="jobs of each kind (default: 3)")
    parser.add_argument("--exceptions", type=int, default=2, metavar="N", help="in each job (default: 2)")
    parser.add_argument("--quick", action="store_true", help="2 ranks, one job of each kind")
    parser.add_argument(
        "--skip", nargs="+", default=[], choices=["restarts", "hang", "resident"], help="what not to measure"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the stamps and outputs of all jobs here"
    )
    parser.add_argument(
        "--etcd", action="store_true", help="ft_wrapper with the job's store on an etcd of three members, too"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.repeats = [2], 1
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks {min(arguments.ranks)}: at least 2, since one is killed")
    own_all_descendants()
    implementations = chosen(arguments)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="restart_latency-"))
    begin = time.monotonic()
    try:
        with contextlib.ExitStack() as exits:
            if arguments.etcd:
                from ft_wrapper.testing import EtcdServer  # it needs urllib3

                server = exits.enter_context(EtcdServer(members=3, quick_election=False))
                ours = Implementation(OURS_ON_ETCD, sys.executable, "ft_wrapper", etcd=server.endpoints)
                implementations.insert(1, ours)
            measure(arguments, implementations, folder)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{time.monotonic() - begin:.0f} s in all")


def restart(
    folder: Path,
    samples: Samples,
    implementation: Implementation,
    ranks: int,
    faults: list[Fault],
    group: bool,
    with_events: bool = False,
) -> None:
    """Runs a job, and adds what it shows. Where it does not come back, another one has the other faults."""
    name = implementation.name
    while faults := [fault for fault in faults if not samples.is_lost(name, fault.kind, ranks, group)]:
        recoveries = run(folder, implementation, ranks, faults, group, with_events=with_events)
        samples.add(name, ranks, "", group, recoveries)
        shown = ", ".join(f"{r.kind} {duration(r.back)}" for r in recoveries)
        events_too = ", writing events" if with_events else ""
        print(f"{name}, {ranks} ranks, {'group' if group else 'no group'}{events_too}: {shown}", flush=True)
        faults = faults[len(recoveries) :]


def measure_restarts(
    arguments: argparse.Namespace, implementations: list[Implementation], folder: Path, samples: Samples
) -> None:
    """Exceptions and SIGKILLs, under each implementation in turn, so that all meet the same machine."""
    for ranks in sorted(arguments.ranks):
        for seed in range(arguments.repeats):
            for implementation in implementations:
                torchrun = implementation.name == TORCHRUN
                if torchrun and seed > 0:
                    continue  # its restarts take so long that they differ little
                faults = faults_of(ranks, seed, arguments.exceptions, torchrun)
                for group in (True,) if torchrun else (False, True):  # new processes have a group to make
                    restart(folder, samples, implementation, ranks, faults, group)
        for implementation in implementations:
            if implementation.name == OURS:
                for group in (False, True):
                    faults = faults_of(ranks, 0, arguments.exceptions, False)
                    restart(folder, samples, implementation, ranks, faults, group, with_events=True)


def measure_resident(
    arguments: argparse.Namespace, wrappers: list[Implementation], folder: Path, samples: Samples
) -> None:
    """SIGKILL of a rank that holds much memory, which the kernel takes its time to free, and of a small one.

    The jobs differ in nothing else, and take turns.
    """
    if psutil.virtual_memory().available < 1.5 * RESIDENT:
        print(f"less than {1.5 * RESIDENT / 2**30:.0f} GB available: no rank of 4 GB is killed")
        return
    for seed in range(arguments.repeats):
        for implementation in wrappers:
            faults = faults_of(4, seed, arguments.exceptions, False)
            for resident, victim in ((0, " of a small rank"), (RESIDENT, " of a rank with 4 GB")):
                killed = run(folder, implementation, 4, faults, False, resident)[-1:]
                samples.add(implementation.name, 4, victim, False, killed)
                took = duration(killed[0].back)
                print(f"{implementation.name}, 4 ranks: sigkill{victim} {took}", flush=True)


def measure_hangs(
    arguments: argparse.Namespace, wrappers: list[Implementation], folder: Path
) -> dict[str, list[Recovery]]:
    """Hangs: ours first, then all peers at once, since they use up their time with waiting."""
    hangs = {i.name: hang(folder, i, arguments.repeats) for i in wrappers if i.name == OURS}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        running = {i.name: threads.submit(hang, folder, i, 1) for i in wrappers if i.name != OURS}
        return hangs | {name: future.result() for name, future in running.items()}


def measure(arguments: argparse.Namespace, implementations: list[Implementation], folder: Path) -> None:
    """Runs all jobs, prints a line for each and the tables at the end."""
    samples = Samples()
    wrappers = [i for i in implementations if i.name != TORCHRUN and not i.etcd]
    hangs: dict[str, list[Recovery]] = {}
    if "restarts" not in arguments.skip:
        measure_restarts(arguments, implementations, folder, samples)
    if "resident" not in arguments.skip:
        measure_resident(arguments, wrappers, folder, samples)
    if "hang" not in arguments.skip:
        hangs = measure_hangs(arguments, wrappers, folder)
    if samples.values or samples.lost:
        samples.print_details()
        samples.print_phases()
    if hangs:
        print_hang(hangs)
    if samples.values or samples.lost:
        samples.print_comparison([implementation.name for implementation in implementations])


if __name__ == "__main__":
    main()
