"""What the environment says of the job's size."""

import os

#: How many ranks the job began with, where WORLD_SIZE is more.
FORMATION_SIZE_ENV = "FT_WRAPPER_FORMATION_SIZE"
#: How many ranks are to be active, as ``ftrun`` was told.
ACTIVE_WORLD_SIZE_ENV = "FT_WRAPPER_ACTIVE_WORLD_SIZE"
#: The most that WORLD_SIZE may say: the ranks of a job are listed in each of its processes.
MOST_RANKS = 1 << 20


def int_from_env(name: str, least: int, most: int, way_out: str) -> int | None:
    """Reads a whole number from the environment; None if the variable is not set.

    Args:
        name: of the variable.
        least: the least that it may be.
        most: the most.
        way_out: for the error: who sets it, or why there are these limits.

    Raises:
        ValueError: it is no number, or beyond the limits.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:  # for too many digits, too
        number = least - 1
    if not least <= number <= most:
        raise ValueError(
            f"environment variable {name}={text!r} must be an integer in {least}..{most}; {way_out}"
        )
    return number


def formation_size(world_size: int) -> int:
    """The number of ranks that the job begins with: its slots are 0 to one less.

    Args:
        world_size: WORLD_SIZE. It counts unless FT_WRAPPER_FORMATION_SIZE is set, which says how many of them
            the job began with.

    Raises:
        ValueError: FT_WRAPPER_FORMATION_SIZE is no number from 1 to ``world_size``.
    """
    why = f"because WORLD_SIZE={world_size}: the number of ranks that the job began with; remove it otherwise"
    return int_from_env(FORMATION_SIZE_ENV, 1, world_size, why) or world_size


def launched_active_world_size() -> int | None:
    """How many ranks are to be active as far as ``ftrun`` knows.

    Raises:
        ValueError: the variable is no number of at least 1.
    """
    way_out = "ftrun sets it by --active-world-size and --spare-nodes; remove it otherwise"
    return int_from_env(ACTIVE_WORLD_SIZE_ENV, 1, MOST_RANKS, way_out)
