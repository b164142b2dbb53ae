"""What a failure means for the job: by how a process ends, on which ranks, and when."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_nodes import Cluster

# When: in the last call, before it has ended; between two calls; after the last one.
FAILS = """
    import os, signal, sys, threading, time
    from ft_wrapper import CallWrapper, Wrapper

    folder, how, who, when, calls, joins = sys.argv[1:]
    rank, is_first = os.environ["RANK"], os.environ["FT_WRAPPER_INCARNATION"] == "0"
    last, has_spare = str(int(os.environ["WORLD_SIZE"]) - 1), who == "spare"
    settings = {"active_world_size": 1} if has_spare else {}

    def fail(moment):
        if moment != when or not is_first or (who != "all" and rank != last):
            return
        if how == "raise":
            raise RuntimeError("the export failed")
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)

    def await_that(condition):
        while not condition():
            time.sleep(0.02)

    @Wrapper(use_global_iteration=joins == "joins", on_join="now", rejoin_wait=60, **settings)
    def train(number, call_wrapper: CallWrapper = None):
        if number != calls or when != "in":
            return
        if not has_spare:
            return fail("in")
        open(f"{folder}/inside", "w").close()
        await_that(lambda: os.path.exists(f"{folder}/spare"))
        pid = int(open(f"{folder}/spare").read())
        await_that(lambda: not os.path.exists(f"/proc/{pid}"))

    def fail_as_spare():
        await_that(lambda: os.path.exists(f"{folder}/inside"))
        with open(f"{folder}/pid", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{folder}/pid", f"{folder}/spare")
        fail("in")

    if has_spare and when == "in" and rank == last:  # it does not enter the function
        threading.Thread(target=fail_as_spare, daemon=True).start()
    for number in range(1, int(calls) + 1):
        train(str(number))
        if number < int(calls):
            fail("between")
    fail("after")
"""


def drawn_failures() -> list[tuple[str, ...]]:
    """All ways to fail after the last call, on one rank and on all; the rest of each, and others, by chance.

    Returns:
        How, who, when, number of wrapped calls, whether replacements join, and number of nodes.
    """
    draw = random.Random(40)
    drawn = [
        (how, who, "after", draw.choice("12"), draw.choice(["joins", "alone"]), draw.choice("112"))
        for how in ("raise", "sys.exit", "os._exit", "SIGSEGV")
        for who in ("one", "all")
    ]
    drawn += [("raise", "one", "after", "1", "joins", "2"), ("os._exit", "spare", "after", "1", "alone", "1")]
    drawn += [
        (draw.choice(["os._exit", "SIGSEGV"]), "one", when, "2", joins, draw.choice("12"))
        for when, joins in (("in", "joins"), ("in", "alone"), ("between", "joins"))
    ]
    return [*drawn, ("SIGSEGV", "spare", "in", "1", "alone", "1")]


@pytest.mark.parametrize("case", drawn_failures(), ids="-".join)
def test_a_failure_counts_from_the_end_of_the_last_call_on(tmp_path: Path, case: tuple[str, ...]) -> None:
    *arguments, nodes = case
    when = arguments[2]
    with Cluster(tmp_path, FAILS, nnodes=nodes, nproc=2) as cluster:
        cluster.arguments += arguments
        jobs = [cluster.start(str(number)) for number in range(int(nodes))]
        codes = [job.end() for job in jobs]
    said = "\n---\n".join(job.said for job in jobs)
    if when == "after":
        assert 1 in codes, said
        assert "the job finished all the same" not in said
    else:
        assert codes == [0] * len(jobs), said
        assert said.count("the job finished all the same") == 1
