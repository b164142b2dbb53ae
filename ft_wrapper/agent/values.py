"""One value of the command line each: read and checked. Errors name the option, the value and the way out."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import determine_local_world_size

from .command_line import Parser


def nproc(parser: Parser, value: str) -> int:
    """Number of ranks of this node.

    Args:
        parser: says what is wrong.
        value: of ``--nproc-per-node``.
    """
    try:
        found: int = determine_local_world_size(value)
    except ValueError as error:
        parser.error(f"--nproc-per-node {value}: use a number of at least 1, cpu, gpu, xpu or auto ({error})")
    if found < 1:
        parser.error(f"--nproc-per-node {value}: at least one rank is needed")
    return found


def nodes(parser: Parser, value: str) -> tuple[int, int]:
    """The least and the most nodes.

    Args:
        parser: says what is wrong.
        value: of ``--nnodes``.
    """
    numbers = [_number(part) for part in value.split(":")]
    least, most = numbers[0], numbers[-1]
    if least is None or most is None or len(numbers) > 2:
        parser.error(f"--nnodes {value}: use a number, or the least and the most: 2:4")
    if least < 1:
        parser.error(f"--nnodes {value}: at least one node is needed")
    if least > most:
        parser.error(f"--nnodes {value}: the least, {least}, is more than the most, {most}; swap them")
    return least, most


def count(parser: Parser, option: str, value: str | None, default: int) -> int:
    """A number of at least 0.

    Args:
        parser: says what is wrong.
        option: its name.
        value: its value.
        default: what is returned if there is none.
    """
    if value is None:
        return default
    number = _number(value)
    if number is None or number < 0:
        parser.error(f"{option} {value}: use a number of at least 0")
    return number


def port(parser: Parser, option: str, value: str) -> int:
    """A port; 0 for a free one.

    Args:
        parser: says what is wrong.
        option: its name.
        value: its value.
    """
    number = _number(value)
    if number is None or not 0 <= number <= 65535:
        parser.error(f"{option} {value}: use a number up to 65535")
    return number


def _number(value: str) -> int | None:
    """A whole number as torchrun takes it, with spaces around it and a sign; None if it is none."""
    try:
        return int(value)
    except ValueError:
        return None


def streams(parser: Parser, option: str, value: str, nproc: int) -> Std | dict[int, Std]:
    """Which streams go elsewhere, for all ranks or by local rank.

    Args:
        parser: says what is wrong.
        option: its name.
        value: its value.
        nproc: number of ranks of this node.
    """
    try:
        found: Std | dict[int, Std] = Std.from_str(value)
    except ValueError:
        parser.error(
            f"{option} {value}: use 0, 1, 2 or 3, or local ranks with one of them each, as in 0:3,1:2"
        )
    if isinstance(found, dict):
        _warn_of_ranks(parser, option, value, found, nproc)
        return {rank: std for rank, std in found.items() if rank < nproc}
    return found


def local_ranks(parser: Parser, option: str, value: str, nproc: int) -> set[int] | None:
    """Some of the local ranks; None if none were named.

    Args:
        parser: says what is wrong.
        option: its name.
        value: its value.
        nproc: number of ranks of this node.
    """
    if not value:
        return None
    try:
        ranks = {int(rank) for rank in value.split(",")}
    except ValueError:
        parser.error(f"{option} {value}: use local ranks with commas between them, as in 0,1,2")
    _warn_of_ranks(parser, option, value, ranks, nproc)
    return ranks


def _warn_of_ranks(parser: Parser, option: str, value: str, ranks: Iterable[int], nproc: int) -> None:
    missing = sorted(rank for rank in ranks if not 0 <= rank < nproc)
    if missing:
        which = ", ".join(map(str, missing))
        parser.warn(
            f"{option} {value}: there is no local rank {which} with --nproc-per-node {nproc}, so that part "
            "has no effect"
        )


def signals(parser: Parser, value: str) -> tuple[signal.Signals, ...]:
    """Signals by their names.

    Args:
        parser: says what is wrong.
        value: of ``--signals-to-handle``.
    """
    found = []
    for name in value.split(","):
        try:
            signum = signal.Signals[name.strip()]
        except KeyError:
            parser.warn(
                f"--signals-to-handle {value}: no signal is named {name.strip()!r}, so it is left out; the "
                "names are as in SIGTERM,SIGUSR1"
            )
            continue
        if signum in (signal.SIGKILL, signal.SIGSTOP):
            parser.error(f"--signals-to-handle {value}: {name.strip()} cannot be handled by any program")
        if signum == signal.SIGCHLD:
            parser.error(f"--signals-to-handle {value}: SIGCHLD is what ftrun is told of its ranks by")
        found.append(signum)
    return tuple(found)


def seconds(parser: Parser, option: str, value: str) -> float:
    """A duration in seconds.

    Args:
        parser: says what is wrong.
        option: its name.
        value: its value.
    """
    try:
        found = float(value)
    except ValueError:
        parser.error(f"{option} {value}: is not a number of seconds")
    if not 0 <= found < float("inf"):
        parser.error(f"{option} {value}: must be at least 0 and finite")
    return found
