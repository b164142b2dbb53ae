"""Several ftruns on this machine, of which one has to pass a check first: the others do not wait for it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from agent_job import await_that
from test_nodes import CONF, WRAPPED, Cluster, pids_of

from ft_wrapper.cli.main import main

PLAIN = """
    import os, sys, time
    folder, rank = sys.argv[1], os.environ["RANK"]
    if not os.path.exists(f"{folder}/failed"):
        open(f"{folder}/started.{rank}", "w").close()
        while rank == "0" or not os.path.exists(f"{folder}/started.0"):
            time.sleep(0.02)
        open(f"{folder}/failed", "w").close()
        sys.exit(7)
    print("done", rank, os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
REASON = "--node-check: the fan stands still (exit status 3)"


def check(path: Path) -> tuple[str, str]:
    """A check that is passed while a file exists."""
    return "--node-check", f"test -e {path} || {{ echo the fan stands still; exit 3; }}"


def places(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """What ``ftrun status`` says of each node: its place, and why it is kept out."""
    capsys.readouterr()
    assert main(["status", cluster.address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["nodes"]
    nodes = {node["id"]: (node["place"], node["reason"]) for node in found}
    assert len(nodes) == len(found)
    return nodes


def test_a_node_is_kept_out_and_comes_in_once_it_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    well = tmp_path / "well"
    with Cluster(tmp_path, WRAPPED, nnodes="2:3") as cluster:
        first = cluster.start("0")
        cluster.await_first()
        bad = cluster.start("2", *check(well))
        await_that(lambda: f"is kept out of the job until it passes its check: {REASON}" in bad.said, bad)
        second = cluster.start("1")
        began = cluster.await_inside(2, first, second, bad)
        assert places(cluster, capsys) == {"0": ("seat", ""), "1": ("seat", ""), "2": ("kept out", REASON)}
        assert main(["status", cluster.address]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^  2 +kept out ", shown, re.MULTILINE), shown
        last = shown.splitlines()[-1]
        assert re.fullmatch(r"node 2 is kept out since [\d-]+ [\d:]+: " + re.escape(REASON), last), last
        await_that(lambda: "a job has formed" in first.said, first)
        # Nodes that leave while they are kept out do not disturb the job.
        other = cluster.start("3", *check(tmp_path / "never"))
        await_that(lambda: "is kept out" in other.said, other)
        other.process.send_signal(signal.SIGTERM)
        assert other.end() == 128 + signal.SIGTERM, other.said
        tries_once = cluster.start("4", *check(tmp_path / "never"), "--node-check-retries", "0")
        assert tries_once.end() == 76, tries_once.said
        assert f"has failed its check: {REASON}" in tries_once.said
        assert set(places(cluster, capsys)) == {"0", "1", "2"}
        well.touch()
        grown = cluster.await_inside(3, first, second, bad)
        assert places(cluster, capsys)["2"] == ("seat", "")
        cluster.finish(first, second, bad)
    assert [rank["pid"] for rank in grown[:2]] == [rank["pid"] for rank in began]
    assert bad.said.count("is kept out") == 1
    assert bad.said.count("has passed its check") == 1
    assert len(pids_of(bad)) == 1


def test_a_node_that_fails_before_the_next_round_is_not_in_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, PLAIN, nnodes="1:2") as cluster:
        options = ("--max-restarts", "1", "--rdzv-conf", CONF.replace("_timeout=0.2", "_timeout=5"))
        unless = ("--node-check", f"! test -e {cluster.shared}/failed")
        stays, bad = cluster.start("0", *options), cluster.start("1", *options, *unless)
        assert stays.end() == 0, stays.said
        assert bad.end() == 0, bad.said
    assert "done 0 1 0" in stays.said, "it went on alone, and a change of membership is no restart"
    assert "is kept out of the job until it passes its check: --node-check: exit status 1" in bad.said
    assert "the job is over; node 1 (localhost) was kept out to its end" in bad.said
    assert "done " not in bad.said


def test_the_host_may_be_kept_out_and_ends_the_job_as_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(tmp_path, WRAPPED, nnodes="2:3") as cluster:
        host = cluster.start("0", *check(tmp_path / "never"))
        await_that(lambda: "is kept out" in host.said, host)
        assert places(cluster, capsys) == {"0": ("kept out", REASON)}
        others = [cluster.start(node_id) for node_id in ("1", "2")]
        cluster.await_inside(2, host, *others)
        host.process.send_signal(signal.SIGTERM)
        assert host.end() == 128 + signal.SIGTERM, host.said
        assert [other.end() for other in others] == [75, 75]
    assert "which hosts the rendezvous store, has left: it was ended by SIGTERM" in others[0].said
    assert pids_of(host) == {}
