"""What a job of the benchmarks is to do: written by the driver, read by its workers."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault, injected once all ranks are in the function.

    Args:
        kind: ``exception``, ``sigkill`` or ``hang``.
        rank: the rank that it happens on, as numbered when it happens.
        pause: seconds of training before it. Random, because how long a fault stays unnoticed by what looks
            only once in a while depends on the moment.
    """

    kind: str
    rank: int
    pause: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """One job.

    Args:
        module: what is imported and whose ``Wrapper`` is used; empty for none (torchrun).
        settings: durations of the wrapper, in seconds, by argument name.
        store: ``host:port`` of the store that the driver hosts: for counting ranks, and for the process
            groups of an implementation that does not see to a store for them.
        log: path of the file that workers append their stamps to.
        limit: whole seconds after which a worker ends itself, should the driver be gone.
        group: whether the function makes a process group, trains with collectives and loses it in a fault.
        own_group_store: whether the process group uses the driver's store (NVRx); else it is made by a plain
            ``init_process_group``.
        faults: what happens, one after the other.
        resident: bytes that the last rank holds in memory.
    """

    module: str
    settings: dict[str, float]
    store: str
    log: str
    limit: int
    group: bool = False
    own_group_store: bool = False
    faults: tuple[Fault, ...] = ()
    resident: int = 0

    def to_json(self) -> str:
        """Returns the plan as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Plan:
        """Reads what `to_json` wrote."""
        fields = json.loads(line)
        fields["faults"] = tuple(Fault(**fault) for fault in fields["faults"])
        return cls(**fields)
