"""The name of every key that the ranks agree on. Nothing else spells one.

``n`` is the number of a global iteration; ``BEFORE_FIRST`` is the one that ends with the first decision.
Keys under ``wake/`` and ``count/`` wake somebody. What they say is a hint, from which nothing is concluded;
only an endpoint, and a restart's report, are told by the key that wakes who waits for it.
"""

import re
from collections.abc import Callable

BEFORE_FIRST = -1
THIS_VERSION = "1"
_ROOT = f"ft_wrapper/{THIS_VERSION}"

#: Register, the same in all versions of these names: which of them the store's job uses.
VERSION = "ft_wrapper/version"
#: What all keys begin with that only wake somebody.
WAKE = f"{_ROOT}/wake/"
LIFE = f"{_ROOT}/life"
HEAD = f"{_ROOT}/head"
GOODBYES = f"{_ROOT}/goodbyes"
#: The most active ranks that any iteration had: with fewer, the job is degraded. A hint.
ACTIVE_TARGET = f"{_ROOT}/wanted"
#: How many CUDA devices a process sees that uses its own. A hint.
CUDA = f"{_ROOT}/cuda"
#: The last iteration that was on for a while. A hint.
SETTLED = f"{_ROOT}/settled"


def _key(kind: str) -> Callable[..., str]:
    """The keys of a kind, by what there is several of."""
    return lambda *which: "/".join((_ROOT, kind, *map(str, which)))


# Register, by call: function and settings of a wrapped call, on which all ranks have to agree.
terms = _key("terms")
# Counter, by slot: how many processes have held it.
incarnations = _key("incarnations")
# Record of a member, for people: host, pid.
member = _key("member")
# Counter that a heart keeps moving, by its name: a member's own, or one that all on a node share.
heartbeat = _key("heartbeat")
# A part of a barrier or exchange, by its name: ``arrived``, ``count``, ``wake``, ``result/…``.
barrier = _key("barrier")
# Register, by folder: what the job calls itself in a folder of checkpoints.
checkpoints = _key("checkpoints")
# Set once a member needs the store no more.
wake_goodbye = _key("wake/goodbye")
# Register, for people, only ever raised, by slot: the last iteration that was recorded for it.
last_iteration = _key("last_iteration")


def live(name: str) -> str:
    """Register: the last recovery of a live state that was sealed, and the one that began its history."""
    return f"{_ROOT}/live/{name}/sealed"


def shared_heart(nonce: str) -> str:
    """The name of a heart that several members share."""
    return f"shared-{nonce}"


# Keys of one iteration, all made by one function: so `iteration_of` knows each, and each is deleted in time.

_kinds: list[str] = []


def _of_iteration(kind: str) -> Callable[..., str]:
    """The keys of a kind, by the number of the iteration, and by what else there is several of."""
    _kinds.append(kind)
    return _key(kind)


# By its nonce: what changed from n-1 to n. Immutable, written before head moves.
decision = _of_iteration("decision")
# By the same: all members of n.
roster = _of_iteration("roster")
# Register, by an active rank: the member that holds it in n.
seat = _of_iteration("seat")
# Register: absent, ``fault`` or ``done``. The first one wins.
end = _of_iteration("end")
# Record: where ``torch.distributed`` meets, and the sizes that the rank assignment gave; rank 0 tells it.
meeting = _of_iteration("meeting")
# Logs: members that have left the function, each with its rank; active ranks that have returned from it.
arrived = _of_iteration("arrived")
finished = _of_iteration("finished")
# Log: members that have ended, by evidence; marked if a replacement was announced.
dead = _of_iteration("dead")
# Log: members that want into the iteration after this, each with the call that it comes for.
join = _of_iteration("join")
# Log, for people: who, what, where.
faults = _of_iteration("faults")
# Log: members that are about to enter, each with its active rank.
entered = _of_iteration("entered")
# Counts of arrivals and deaths, of ranks that finished, of active ranks that are about to enter the function.
count_gone = _of_iteration("count/gone")
count_finished = _of_iteration("count/finished")
count_entered = _of_iteration("count/entered")
# Set once the iteration has ended, well or not.
wake_end = _of_iteration("wake/end")
# Set once head has reached the iteration; says which head that is likely to be.
wake_head = _of_iteration("wake/head")
# Set once that is written, to the same.
wake_meeting = _of_iteration("wake/meeting")
# Report of the restart that led to the iteration, for people; wakes who waits for it. Empty: there is none.
restarted = _of_iteration("wake/restarted")
# Prefix of the store that a user gets.
iteration_prefix = _of_iteration("user")


# What a key belongs to.


def iteration_of(key: str) -> int | None:
    """The iteration that a key belongs to; None for keys of a job, a call or a member."""
    return int(found[1]) if (found := _OF_ITERATION.match(key)) else None


def member_of(key: str) -> tuple[int, int] | None:
    """The slot and incarnation that a key belongs to; None for other keys."""
    return (int(found[1]), int(found[2])) if (found := _OF_MEMBER.match(key)) else None


def is_shared_heart(key: str) -> bool:
    """Whether a key is a heart's that several members share."""
    return key.startswith(heartbeat(shared_heart("")))


def call_of(key: str) -> int | None:
    """The wrapped call that a key belongs to; None for other keys."""
    return int(found[1]) if (found := _OF_CALL.match(key)) else None


_OF_CALL = re.compile(rf"{_ROOT}/terms/(\d+)$")
_OF_ITERATION = re.compile(rf"{_ROOT}/(?:{'|'.join(_kinds)})/(-?\d+)(?:/|$)")
_OF_MEMBER = re.compile(rf"{_ROOT}/(?:member|heartbeat|wake/goodbye)/(\d+):(\d+)(?:/|$)")
