"""What happens in the diagrams of the page "How ranks agree".

Each follows a trace of the package's own code (`ft_wrapper.testing.Scheduler` prints such traces), shortened
by reads that repeat. Iteration 7 is on when a diagram begins; ``w`` and ``x`` are the nonces of proposals.
"""

from __future__ import annotations

from sequence import Pause, Row, Sequence

_READS = "Reads `end/7`, `arrived/7`, `join/7` and, last, `dead/7`"
_WAKE = "wakes their monitor threads: these abort, and free the main threads"
_FOLLOW = "wakes them: they read `head` and `decision/8/x`, what changed"
_ENTER = "assign ranks; agree on `seat/8/…` and `meeting/8`; enter 8"

RESTART = Sequence(
    "A restart: the function raises on rank 1",
    ("rank 0", "rank 1", "rank 2", "store"),
    (
        Row("rank 1", "the function raises: appends to `faults/7`"),
        Row("rank 1", "compare_set `end/7`: absent → `fault`; sets `wake/end/7`"),
        Row(
            "store",
            _WAKE,
            ("rank 0", "rank 1", "rank 2"),
        ),
        Row("rank 1", "has left: appends `1:0 1 3` to `arrived/7`; adds 1 to `count/gone/7`: 1"),
        Row("rank 0", "has left: `arrived/7`; 2; waits for `wake/head/8`"),
        Row("rank 2", "has left: `arrived/7`; 3: no one is missing, so this rank proposes"),
        Row("rank 2", _READS.lower()),
        Row("rank 2", "writes `decision/8/x` and `roster/8/x`"),
        Row("rank 2", "compare_set `head`: `0:7:w` → `0:8:x`; sets `wake/head/8`"),
        Row("store", _FOLLOW, ("rank 0", "rank 1", "rank 2")),
        Row(("rank 0", "rank 1", "rank 2"), _ENTER),
    ),
)

CRASH = Sequence(
    "A crash: the process of rank 1 is killed",
    ("rank 0", "rank 1", "monitor 1", "rank 2", "store"),
    (
        Row("rank 1", "is killed; the kernel releases the mutex that its main thread held", (), ends=True),
        Row("monitor 1", "gets the mutex. Reads `head`: 7 is on; appends to `faults/7`"),
        Row("monitor 1", "compare_set `end/7`: absent → `fault`; sets `wake/end/7`"),
        Row("monitor 1", "appends `1:0` to `dead/7`; `count/gone/7` is 1"),
        Row("monitor 1", "reads `arrived/7`: `1:0` is not in it, so no proposal can have it; ends"),
        Row("store", _WAKE, ("rank 0", "rank 2")),
        Row("rank 0", "has left: `arrived/7`; 2; waits for `wake/head/8`"),
        Row("rank 2", "has left: `arrived/7`; 3: it proposes. " + _READS),
        Row("rank 2", "writes `decision/8/x` (removed `1:0`) and `roster/8/x`"),
        Row("rank 2", "compare_set `head`: `0:7:w` → `0:8:x`; sets `wake/head/8`"),
        Row("store", _FOLLOW, ("rank 0", "rank 2")),
        Row(("rank 0", "rank 2"), _ENTER),
    ),
)

EARLY_RESPAWN = Sequence(
    "An early respawn: rank 1's host is lost, and its next process comes before the loss is noticed",
    ("rank 0", "rank 1", "rank 2", "new rank 1", "store"),
    (
        Row("rank 1", "is lost, with its monitor: no one can tell the others", (), ends=True),
        Row("new rank 1", "compares `version` and `terms/0`: function and settings are the job's"),
        Row("new rank 1", "add 1 to `incarnations/1`: it is `1:1`; writes `member/1:1`"),
        Row("new rank 1", "reads `head`, `roster/7/w`: `1:0` is in 7, an older process of its slot"),
        Row("new rank 1", "supersedes it: `faults/7`; `end/7`: absent → `fault`; `wake/end/7`"),
        Row("new rank 1", "appends `1:0` to `dead/7`, `1:1 0` to `join/7`; `count/gone/7` is 1"),
        Row("store", _WAKE, ("rank 0", "rank 2")),
        Row("rank 0", "has left: `arrived/7`; 2; waits for `wake/head/8`"),
        Row("rank 2", "has left: `arrived/7`; 3: it proposes. " + _READS),
        Row("rank 2", "writes `decision/8/x` (`1:1` in the place of `1:0`) and `roster/8/x`"),
        Row("rank 2", "compare_set `head`: `0:7:w` → `0:8:x`; sets `wake/head/8`"),
        Row("store", _FOLLOW, ("rank 0", "rank 2")),
        Row("store", "wakes it: it reads `head`, `roster/8/x`, `decision/8/x`, and is in", ("new rank 1",)),
        Row(("rank 0", "rank 2", "new rank 1"), _ENTER),
    ),
    late=("new rank 1",),
)

PROPOSER_KILLED = Sequence(
    "Takeover, 1: the proposer is killed, its monitor lives",
    ("rank 0", "rank 1", "rank 2", "monitor 2", "store"),
    (
        Row(("rank 0", "rank 1"), "have left 7 and wait for `wake/head/8`", ()),
        Row("rank 2", "leaves last, so it proposes. " + _READS),
        Row("rank 2", "writes `decision/8/x` and `roster/8/x`"),
        Row("rank 2", "is killed before it moves `head`", (), ends=True),
        Row("monitor 2", "`faults/7`; `end/7` stands; appends `2:0` to `dead/7`; `count/gone/7` is 4"),
        Row("monitor 2", "no one is missing, so it proposes. " + _READS),
        Row("monitor 2", "writes `decision/8/y` (removed `2:0`) and `roster/8/y`"),
        Row("monitor 2", "compare_set `head`: `0:7:w` → `0:8:y`; sets `wake/head/8`"),
        Row("store", _FOLLOW.replace("/x", "/y"), ("rank 0", "rank 1")),
        Row("monitor 2", "had a proposal kept `2:0`, which had arrived? 8 does not list it: ends"),
        Row(("rank 0", "rank 1"), "enter 8"),
    ),
)

PROPOSER_LOST = Sequence(
    "Takeover, 2: the proposer's host is lost, its monitor with it",
    ("rank 0", "rank 1", "rank 2", "store"),
    (
        Row(("rank 0", "rank 1"), "have left 7 and wait for `wake/head/8`", ()),
        Row("rank 2", "leaves last, so it proposes: reads, writes `decision/8/x` and `roster/8/x`"),
        Row("rank 2", "and is lost before it moves `head`", (), ends=True),
        Pause("0.5 s"),
        Row("rank 0", "looks first, by rank order: `head` has not moved, so it proposes"),
        Row("rank 0", _READS.lower() + ": `2:0` arrived and is not dead: it stays"),
        Row("rank 0", "writes `decision/8/y`, `roster/8/y`; `head`: `0:7:w` → `0:8:y`; `wake/head/8`"),
        Row(("rank 0", "rank 1"), "enter 8, in which `2:0` is still listed"),
        Pause("`heartbeat_timeout` after its last heartbeat"),
        Row("rank 1", "its monitor: `heartbeat/2:0` stands still. `faults/8`; `end/8` is `fault`"),
        Row(("rank 0", "rank 1"), "leave 8: `arrived/8`; wait for `wake/head/9`"),
        Row("rank 1", "its monitor, at its next heartbeat, proposes without the silent `2:0`:"),
        Row("rank 1", "writes `decision/9/z` (removed `2:0`); `head`: `0:8:y` → `0:9:z`; `wake/head/9`"),
        Row(("rank 0", "rank 1"), "enter 9"),
    ),
)

SEQUENCES = {
    "restart": RESTART,
    "crash": CRASH,
    "early-respawn": EARLY_RESPAWN,
    "proposer-killed": PROPOSER_KILLED,
    "proposer-lost": PROPOSER_LOST,
}
