"""The name of every key that the ranks agree on. Nothing else spells one.

``n`` is the number of a global iteration; ``BEFORE_FIRST`` is the one that ends with the first decision.
Keys under ``wake/`` and ``count/`` wake somebody. What they say is a hint, from which nothing is concluded;
only an endpoint is told by the key that wakes who waits for it.
"""

from __future__ import annotations

import re

BEFORE_FIRST = -1
THIS_VERSION = "1"
_ROOT = f"ft_wrapper/{THIS_VERSION}"

VERSION = "ft_wrapper/version"
"""Register, the same in all versions of these names: which of them the store's job uses."""
WAKE = f"{_ROOT}/wake/"
"""What all keys begin with that only wake somebody."""
LIFE = f"{_ROOT}/life"
HEAD = f"{_ROOT}/head"
GOODBYES = f"{_ROOT}/goodbyes"
WANTED = f"{_ROOT}/wanted"
"""The most active ranks that any iteration had: with fewer, the job is degraded. A hint."""
SETTLED = f"{_ROOT}/settled"
"""The last iteration that was on for a while. A hint."""


def terms(call: int) -> str:
    """Register: function and settings of a wrapped call, on which all ranks have to agree."""
    return f"{_ROOT}/terms/{call}"


def incarnations(slot: int) -> str:
    """Counter: how many processes have held the slot."""
    return f"{_ROOT}/incarnations/{slot}"


def member(name: str) -> str:
    """Record of a member, for people: host, pid."""
    return f"{_ROOT}/member/{name}"


def heartbeat(name: str) -> str:
    """Counter that a heart keeps moving: a member's own, or one that all on a node share."""
    return f"{_ROOT}/heartbeat/{name}"


def shared_heart(nonce: str) -> str:
    """The name of a heart that several members share."""
    return f"shared-{nonce}"


def decision(n: int, nonce: str) -> str:
    """What changed from n-1 to n. Immutable, written before head moves."""
    return f"{_ROOT}/decision/{n}/{nonce}"


def roster(n: int, nonce: str) -> str:
    """All members of n. Immutable, written before head moves."""
    return f"{_ROOT}/roster/{n}/{nonce}"


def end(n: int) -> str:
    """Register: absent, ``fault`` or ``done``. The first one wins."""
    return f"{_ROOT}/end/{n}"


def arrived(n: int) -> str:
    """Log: members that have left the function of n, each with its rank in n."""
    return f"{_ROOT}/arrived/{n}"


def finished(n: int) -> str:
    """Log: active ranks that have returned from the function of n."""
    return f"{_ROOT}/finished/{n}"


def dead(n: int) -> str:
    """Log: members of n that have ended, by evidence; marked if a replacement was announced."""
    return f"{_ROOT}/dead/{n}"


def join(n: int) -> str:
    """Log: members that want into the iteration after n, each with the call that it comes for."""
    return f"{_ROOT}/join/{n}"


def faults(n: int) -> str:
    """Log, for people: who, what, where."""
    return f"{_ROOT}/faults/{n}"


def world(n: int) -> str:
    """Register: world size and active world size that the rank assignment gave in n."""
    return f"{_ROOT}/world/{n}"


def seat(n: int, active_rank: int) -> str:
    """Register: the member that holds an active rank in n."""
    return f"{_ROOT}/seat/{n}/{active_rank}"


def endpoint(n: int) -> str:
    """Address of the store that ``torch.distributed`` uses in n; wakes who waits for it."""
    return f"{_ROOT}/wake/endpoint/{n}"


def iteration_prefix(n: int) -> str:
    """Prefix of the store that a user gets in n."""
    return f"{_ROOT}/user/{n}"


def count_gone(n: int) -> str:
    """Counts arrivals and deaths of n."""
    return f"{_ROOT}/count/gone/{n}"


def count_finished(n: int) -> str:
    """Counts ranks that finished n."""
    return f"{_ROOT}/count/finished/{n}"


def wake_end(n: int) -> str:
    """Set once n has ended, well or not."""
    return f"{_ROOT}/wake/end/{n}"


def wake_head(n: int) -> str:
    """Set once head has reached n; says which head that is likely to be."""
    return f"{_ROOT}/wake/head/{n}"


def barrier(name: str, part: str) -> str:
    """A part of a barrier or exchange: ``arrived``, ``count``, ``wake``, ``result/…``."""
    return f"{_ROOT}/barrier/{name}/{part}"


def wake_goodbye(name: str) -> str:
    """Set once a member needs the store no more."""
    return f"{_ROOT}/wake/goodbye/{name}"


def count_entered(n: int) -> str:
    """Counts active ranks that are about to enter the function of n."""
    return f"{_ROOT}/count/entered/{n}"


def entered(n: int) -> str:
    """Log: members that are about to enter n, each with its active rank there."""
    return f"{_ROOT}/entered/{n}"


# What people see of the coordinator and of restarts (coordination.py). The protocol reads none of it.


def last_iteration(slot: int) -> str:
    """Register, only ever raised: the last iteration that was recorded for the slot."""
    return f"{_ROOT}/last_iteration/{slot}"


def iteration_of(key: str) -> int | None:
    """The iteration that a key belongs to; None for keys of a job, a call or a member."""
    found = _OF_ITERATION.match(key)
    return None if found is None else int(found[1])


def member_of(key: str) -> tuple[int, int] | None:
    """The slot and incarnation that a key belongs to; None for other keys."""
    found = _OF_MEMBER.match(key)
    return None if found is None else (int(found[1]), int(found[2]))


def is_shared_heart(key: str) -> bool:
    """Whether a key is a heart's that several members share."""
    return key.startswith(heartbeat(shared_heart("")))


def call_of(key: str) -> int | None:
    """The wrapped call that a key belongs to; None for other keys."""
    found = _OF_CALL.match(key)
    return None if found is None else int(found[1])


_OF_CALL = re.compile(rf"{_ROOT}/terms/(\d+)$")
_OF_ITERATION = re.compile(
    rf"{_ROOT}/(?:decision|roster|end|arrived|finished|dead|join|faults|world|seat|user|entered"
    r"|count/[a-z]+|wake/(?:end|head|endpoint))/(-?\d+)(?:/|$)"
)
_OF_MEMBER = re.compile(rf"{_ROOT}/(?:member|heartbeat|wake/goodbye)/(\d+):(\d+)$")
