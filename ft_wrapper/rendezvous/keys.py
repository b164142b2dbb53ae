"""The name of every key of a rendezvous. Nothing else spells one."""

from __future__ import annotations

_ROOT = "ft_wrapper/rendezvous/1"

STATE = f"{_ROOT}/state"
"""Register: the record. Never deleted."""


def version(number: int) -> str:
    """Written once the record has this version, to wake those who wait for it: they read `STATE`."""
    return f"{_ROOT}/version/{number}"


def log(epoch: int) -> str:
    """Log: nodes that want to take part."""
    return f"{_ROOT}/log/{epoch}"


def count(epoch: int) -> str:
    """Counts the entries of a log. A hint: the log decides."""
    return f"{_ROOT}/count/{epoch}"


def incarnations(node_id: str) -> str:
    """Counter: how many agents have had this id."""
    return f"{_ROOT}/incarnations/{node_id}"


def alive(name: str) -> str:
    """Sign of life that a node gives again and again."""
    return f"{_ROOT}/alive/{name}"


def endpoint(round_number: int) -> str:
    """Address of the store that the workers of a round use."""
    return f"{_ROOT}/endpoint/{round_number}"


def agents(round_number: int) -> str:
    """Prefix of what the agents of a round tell each other."""
    return f"{_ROOT}/agents/{round_number}"


def goodbye(name: str) -> str:
    """Set once a node has seen that all is over, and needs the store no more."""
    return f"{_ROOT}/goodbye/{name}"


def gone(name: str) -> str:
    """Set once a node whose rendezvous is over uses the store no more, where the last one removes it."""
    return f"{_ROOT}/gone/{name}"
