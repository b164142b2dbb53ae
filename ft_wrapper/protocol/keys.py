"""The names of all keys of the protocol. No other file spells one.

``n`` is the number of a global iteration; ``BEFORE_FIRST`` is the one that ends with the first decision.
Keys under ``wake/`` are notification keys: they wake waiters. Their values, and the counts under ``count/``,
are hints: no decision relies on them. Two notification keys also carry data: those of an endpoint and of a
restart's report.
"""

import re
from collections.abc import Callable

BEFORE_FIRST = -1
THIS_VERSION = "1"
_ROOT = f"ft_wrapper/{THIS_VERSION}"

#: Register: version of the key names that the job uses. This key is the same in all versions.
VERSION = "ft_wrapper/version"
#: Prefix of all notification keys.
WAKE = f"{_ROOT}/wake/"
LIFE = f"{_ROOT}/life"
HEAD = f"{_ROOT}/head"
GOODBYES = f"{_ROOT}/goodbyes"
#: The most active ranks of any iteration so far; with fewer the job is degraded. A hint.
ACTIVE_TARGET = f"{_ROOT}/wanted"
#: Number of CUDA devices that are visible to a process that uses its own device. A hint.
CUDA = f"{_ROOT}/cuda"
#: The last iteration that ran for a few join windows. A hint.
SETTLED = f"{_ROOT}/settled"


def _key(kind: str) -> Callable[..., str]:
    """Keys of one kind, by what distinguishes them."""
    return lambda *which: "/".join((_ROOT, kind, *map(str, which)))


# Register, by call: function and settings of the wrapped call, which must be the same on all ranks.
terms = _key("terms")
# Counter, by slot: number of processes that have held the slot.
incarnations = _key("incarnations")
# By member: its `MemberRecord`.
member = _key("member")
# Counter or lease, by name of the heartbeat: a member's own, or one that all members on a node share.
heartbeat = _key("heartbeat")
# A part of a barrier or exchange, by name and part: ``arrived``, ``count``, ``wake``, ``result/…``.
barrier = _key("barrier")
# Register, by folder of checkpoints: the job's name in that folder.
checkpoints = _key("checkpoints")
# Notification key, by member: the member no longer needs the store.
wake_goodbye = _key("wake/goodbye")
# Register, by slot, for people: the highest iteration that was recorded for the slot.
last_iteration = _key("last_iteration")


def live(name: str) -> str:
    """Register: the last sealed recovery of a live state, and the recovery that began its history."""
    return f"{_ROOT}/live/{name}/sealed"


def shared_heart(nonce: str) -> str:
    """The name of a heartbeat that several members share."""
    return f"shared-{nonce}"


# Keys of one iteration. One function makes them all, so `iteration_of` knows every kind, and all are deleted.

_kinds: list[str] = []


def _of_iteration(kind: str) -> Callable[..., str]:
    """Keys of one kind, by number of the iteration, then by what else distinguishes them."""
    _kinds.append(kind)
    return _key(kind)


# By nonce: a proposal for n. Immutable, written before head moves.
decision = _of_iteration("decision")
# By nonce: all members of n.
roster = _of_iteration("roster")
# Register, by active rank: the member that holds the rank in n.
seat = _of_iteration("seat")
# Register: the outcome, ``fault`` or ``done``; absent while n runs. The first value written stays.
end = _of_iteration("end")
# The endpoint of ``torch.distributed``, and both world sizes of the rank assignment. Rank 0 writes it.
meeting = _of_iteration("meeting")
# Log: members that have arrived, each with its rank and the world size.
arrived = _of_iteration("arrived")
# Log: active ranks that have returned from the function.
finished = _of_iteration("finished")
# Log: dead members, known by evidence, each with its mark: see `records.deaths_in`.
dead = _of_iteration("dead")
# Log: joiners of the iteration after n, each with its call.
join = _of_iteration("join")
# Log of `Fault`, for people.
faults = _of_iteration("faults")
# Log: hearts whose ranks wait or hang; and what each says, by its name.
claims = _of_iteration("claims")
claim = _of_iteration("claim")
# Register: why ranks of n may take long; empty or absent if they may not.
excuse = _of_iteration("excuse")
# Register, for people: what is known of the steps.
learned = _of_iteration("learned")
# Log: hearts that have said how late their ranks are; and what each says, by its name. Without a name: what
# is usual in the job, by the heart of active rank 0.
paces = _of_iteration("paces")
pace = _of_iteration("pace")
# Log, for people: slots of ranks that have become slow, each with the reason, or are no longer slow. And the
# register ``replaced``: the member that a spare replaces for that.
slow = _of_iteration("slow")
# Log: members that are about to enter n, each with its active rank.
entered = _of_iteration("entered")
# Counts: of arrivals and deaths; of ranks that finished; of active ranks about to enter the function.
count_gone = _of_iteration("count/gone")
count_finished = _of_iteration("count/finished")
count_entered = _of_iteration("count/entered")
# Register, by number of the notice in n: the step at which all active ranks see it, and the notice. By
# ``met``: all active ranks have met to leave, since the job ends.
notice = _of_iteration("notice")
# Log, and its count, by number of the notice: ranks that have one, each with the step at which it noted it.
noticed = _of_iteration("noticed")
count_noticed = _of_iteration("count/noticed")
# Notification key: n has ended, by a fault or as done.
wake_end = _of_iteration("wake/end")
# Notification key: head has reached n. Its value is the likely head.
wake_head = _of_iteration("wake/head")
# Notification key of ``meeting``, with the same value.
wake_meeting = _of_iteration("wake/meeting")
# Notification key: the report, for people, of the restart that led to n. Empty if there is no report.
restarted = _of_iteration("wake/restarted")
# Prefix of the store that the wrapped function gets.
iteration_prefix = _of_iteration("user")


# What a key belongs to


def iteration_of(key: str) -> int | None:
    """The iteration that a key belongs to; None for keys of a job, a call or a member."""
    return int(found[1]) if (found := _OF_ITERATION.match(key)) else None


def member_of(key: str) -> tuple[int, int] | None:
    """The slot and incarnation that a key belongs to; None for other keys."""
    return (int(found[1]), int(found[2])) if (found := _OF_MEMBER.match(key)) else None


def is_shared_heart(key: str) -> bool:
    """Whether a key is that of a heartbeat that several members share."""
    return key.startswith(heartbeat(shared_heart("")))


def call_of(key: str) -> int | None:
    """The wrapped call that a key belongs to; None for other keys."""
    return int(found[1]) if (found := _OF_CALL.match(key)) else None


_OF_CALL = re.compile(rf"{_ROOT}/terms/(\d+)$")
_OF_ITERATION = re.compile(rf"{_ROOT}/(?:{'|'.join(_kinds)})/(-?\d+)(?:/|$)")
_OF_MEMBER = re.compile(rf"{_ROOT}/(?:member|heartbeat|wake/goodbye)/(\d+):(\d+)(?:/|$)")
