"""What it saves to keep the process group and DDP over a restart, for a plain and for a compiled model.

    python benchmarks/kept_groups.py            # needs torch >= 2.15
    python benchmarks/kept_groups.py --quick    # one job of each kind

Three ranks train with live state, a fourth one is a spare, as in ``lost_work.py``: exceptions and a SIGKILL,
and the time from the fault to the first new step. Jobs alternate between ``Limits(keep_groups=True)`` with
``live.data_parallel``, and a group and a DDP object made in each iteration. DDP has
``find_unused_parameters=True`` in both. Figures are medians.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from figures import duration, median, ratio, spread, table
from jobs import own_all_descendants
from lost_work import EXCEPTION, FIRST, KILL, NEW, SIZES, Way, faults_of, run
from peers import OURS, Implementation

# A first compilation takes longer than the usual timeouts.
SETTINGS = {"soft_timeout": 200.0, "hard_timeout": 300.0, "barrier_timeout": 600.0}
MODELS = {"plain": False, "compiled": True}
GROUPS = {"kept": True, "made again": False}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--repeats", type=int, default=5, metavar="N", help="jobs of each kind (default: 5)")
    add("--quick", action="store_true", help="one job of each kind")
    arguments = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        parser.error(f"torch {torch.__version__} cannot give a group new peers; 2.15 can")
    own_all_descendants()
    folder = Path(tempfile.mkdtemp(prefix="kept_groups-"))
    took: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    ours = Implementation(OURS, sys.executable, "ft_wrapper", SETTINGS)
    try:
        for model, compiled in MODELS.items():
            for seed in range(1 if arguments.quick else arguments.repeats):
                for name in list(GROUPS)[:: 1 if seed % 2 else -1]:
                    way = Way(ours, True, {"compares": True, "keep": GROUPS[name], "compiled": compiled})
                    losses = run(folder, way, SIZES["10 MB"], faults_of(seed))
                    for loss in losses:
                        took[model, loss.kind, name].append(loss.figures.get(NEW, float("inf")))
                    shown = ", ".join(f"{each.kind} {duration(each.figures.get(NEW))}" for each in losses)
                    print(f"{model}, {name}: {shown}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows, details = [], []
    for model in MODELS:
        for kind in (FIRST, EXCEPTION, KILL):
            values = {name: took[model, kind, name] for name in GROUPS}
            kept, made = (median(one) for one in values.values())
            rows.append([f"{model}, {kind}", duration(kept), duration(made), ratio(made, kept)])
            details.append([f"{model}, {kind}", *map(spread, values.values())])
    print("\nAll figures: median (least .. greatest)\n" + table(["", *GROUPS], details))
    print("\nFrom the fault until the last rank had done a new step: medians")
    print(table(["", *GROUPS, "made again / kept"], rows))


if __name__ == "__main__":
    main()
