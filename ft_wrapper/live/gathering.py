"""What ranks say to each other beside the bytes of a state: JSON, signed where the job has a secret.

A process group is not the job's own: who comes first to gloo's keys in the store takes part in its
collectives. So what a collective gives is read as JSON, and only after its signature.
"""

import hmac
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Sign = Callable[[str, bytes], bytes]
"""Signs bytes in an iteration: takes what they are, with whose, and them; empty in an open job."""


def unsigned(what: str, said: bytes) -> bytes:
    """How an open job signs."""
    return b""


def verified(sign: Sign, rank: int, what: str, text: bytes) -> bytes:
    """The bytes that an active rank has signed.

    Args:
        sign: of the iteration.
        rank: which one.
        what: they are.
        text: the bytes, with the signature behind them.

    Raises:
        RuntimeError: they are not signed with the job's secret.
    """
    end = len(text) - len(sign("", b""))
    if not hmac.compare_digest(text[end:], sign(what, text[:end])):
        raise RuntimeError(
            f"live state: what came as active rank {rank}'s is not signed with the job's secret, and was not "
            "used: somebody outside the job takes part in this iteration"
        )
    return text[:end]


class Gather:
    """Gathers what all active ranks say; collective.

    Args:
        sign: of the iteration.
        group: of all active ranks, for host memory.
    """

    def __init__(self, sign: Sign, group: Any = None) -> None:
        self._sign, self._group, self._turn = sign, group, 0

    def __call__(self, mine: Any) -> list[Any]:
        """Returns what each active rank says, by rank, as JSON gives it: tuples and sets are lists.

        Args:
            mine: what this rank says.

        Raises:
            RuntimeError: what came as a rank's is not signed with the job's secret.
        """
        said = json.dumps(mine, default=sorted).encode()
        size = max(map(int.from_bytes, self._swap(len(said).to_bytes(8))))
        return [json.loads(one) for one in self._swap(said.ljust(size))]  # JSON may end with spaces

    def _swap(self, said: bytes) -> list[bytes]:
        """Gathers bytes, as many from each rank."""
        self._turn += 1
        whats = [f"gather {self._turn} {rank}" for rank in range(dist.get_world_size())]
        mine = bytearray(said + self._sign(whats[dist.get_rank()], said))
        texts = [bytearray(len(mine)) for _ in whats]
        views = [torch.frombuffer(one, dtype=torch.uint8) for one in (mine, *texts)]
        dist.all_gather(views[1:], views[0], self._group)
        return [verified(self._sign, rank, what, bytes(texts[rank])) for rank, what in enumerate(whats)]
