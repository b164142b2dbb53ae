"""What a rank finds in its environment: torchrun's variables, and a few of our own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

from .._addresses import split_host_port
from ..monitor.death import REPLACED_ENV
from ..store.plan import ANNOUNCED
from .round import Round

FORMATION_SIZE_ENV = "FT_WRAPPER_FORMATION_SIZE"
INCARNATION_ENV = "FT_WRAPPER_INCARNATION"
ACTIVE_WORLD_SIZE_ENV = "FT_WRAPPER_ACTIVE_WORLD_SIZE"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"
CPP_LOG_LEVEL_ENV = "TORCH_CPP_LOG_LEVEL"
"""torch's: read once, when torch is imported."""
LOCAL_RANK = "${local_rank}"
"""In an argument it stands for the local rank. It alone is put in, so that a shell's ``$$`` stays."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What all ranks of this node have in common.

    Args:
        nproc: number of ranks.
        role: their name in log lines.
        run_id: of the job on all nodes.
        max_restarts: how often the whole group may be restarted.
        active_world_size: so many ranks call the function of a wrapped job; None: as the wrapper says.
        virtual_local_rank: whether each rank sees its own GPU only.
        timer_file: the named pipe of the watchdog; empty if there is none.
        signals: names of those that end the ranks, with commas.
    """

    nproc: int
    role: str
    run_id: str
    max_restarts: int
    active_world_size: int | None = None
    virtual_local_rank: bool = False
    timer_file: str = ""
    signals: str = ""

    def shared_environment(self) -> dict[str, str]:
        """What libraries read when they are imported, so that it must be there before any rank is forked."""
        variables = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "TORCHELASTIC_RUN_ID": self.run_id,
            # Ranks that wait for another one look after it now and then. At WARNING, c10d writes two lines
            # for each wait that ends in a look.
            CPP_LOG_LEVEL_ENV: os.environ.get(CPP_LOG_LEVEL_ENV, "ERROR"),
        }
        if self.shares_processor():
            variables["OMP_NUM_THREADS"] = "1"
        if self.signals:
            variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = self.signals
        if self.timer_file:
            variables[TIMER_FILE_ENV] = self.timer_file
        return variables

    def shares_processor(self) -> bool:
        """Whether each rank gets one thread, because there are several and no one said otherwise."""
        return self.nproc > 1 and "OMP_NUM_THREADS" not in os.environ

    def environment(self, local_rank: int, restarts: int, where: Round) -> dict[str, str]:
        """What a rank finds, in all of its incarnations.

        Args:
            local_rank: which one of this node.
            restarts: how often the group has been restarted.
            where: what there is on the other nodes.
        """
        host, port = split_host_port(where.address)
        own: dict[str, str] = {}
        if self.active_world_size is not None:
            own[ACTIVE_WORLD_SIZE_ENV] = str(self.active_world_size)
        if self.virtual_local_rank:
            own |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": _own_device(local_rank)}
        return {
            **self.shared_environment(),
            ANNOUNCED: where.store,
            FORMATION_SIZE_ENV: str(where.formation_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            # The store is there already: no rank shall try to host it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RANK": str(where.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(where.role_rank + local_rank),
            "GROUP_RANK": str(where.group_rank),
            "WORLD_SIZE": str(where.world_size),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "ROLE_WORLD_SIZE": str(where.role_world_size),
            "GROUP_WORLD_SIZE": str(where.group_world_size),
            "ROLE_NAME": self.role,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            **own,
        }


def of_incarnation(incarnation: int, error_file: str, replaced: bool) -> dict[str, str]:
    """What a process finds beside it.

    Args:
        incarnation: which process in a row of its rank it is.
        error_file: where ``torch.distributed.elastic``'s ``record`` writes its exception.
        replaced: whether another one is started if it dies, for which the others may wait a little.
    """
    return {
        INCARNATION_ENV: str(incarnation),
        REPLACED_ENV: str(int(replaced)),
        "TORCHELASTIC_ERROR_FILE": "" if error_file == os.devnull else error_file,
    }


def with_local_rank(arguments: Iterable[str], local_rank: str) -> list[str]:
    """Puts a rank's number into arguments.

    Args:
        arguments: with `LOCAL_RANK` in some of them.
        local_rank: the number.
    """
    return [argument.replace(LOCAL_RANK, local_rank) for argument in arguments]


def _own_device(local_rank: int) -> str:
    """The GPU of a rank, as torchrun has it: among those that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
