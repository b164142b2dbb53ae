"""Workers that call a function: what ``python -m ft_wrapper.agent.torch_api.call_function FOLDER RANK`` runs.

A function is sent as `multiprocessing` with ``spawn`` does it: by its module's name, with the search path and
the main module of the process that sends it. What it returns comes back in a file, one for each local rank.
"""

import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.api import macros

_CALL = "call.pickle"
# The rest of what `multiprocessing` hands to its children is about itself, or a rank has it anyway.
_PREPARATION = ("sys_path", "init_main_from_name", "init_main_from_path")


def pack(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """What is sent to the workers.

    Args:
        function: what they call; of a module, so that it can be found by its name.
        arguments: its arguments; ``${local_rank}`` in strings is substituted.

    Raises:
        TypeError: it cannot be sent; says what to do.
    """
    data = multiprocessing.spawn.get_preparation_data("worker")
    preparation = {name: data[name] for name in _PREPARATION if name in data}
    try:
        call = pickle.dumps((function, arguments))
    except Exception as error:
        raise TypeError(
            f"entrypoint {getattr(function, '__qualname__', function)!r} and its args cannot be sent to the "
            f"workers: {error}; pass a function from the top level of a module and args that can be pickled, "
            "or a program's name"
        ) from error
    return pickle.dumps((preparation, call))


def write_call(folder: str, packed: bytes) -> None:
    """Records what each worker is to call.

    Args:
        folder: of its own, for this and for what they return.
        packed: the function with its arguments.
    """
    Path(folder, _CALL).write_bytes(packed)


def read_result(folder: str, local_rank: int) -> Any:
    """What a worker has returned.

    Args:
        folder: where the call was written.
        local_rank: whose; it has succeeded.

    Raises:
        OSError: it has returned nothing, as it ended by ``sys.exit``.
    """
    return pickle.loads(Path(folder, str(local_rank)).read_bytes())


@record
def main(folder: str, local_rank: str) -> None:
    """Calls the function, and records what it returns.

    Args:
        folder: where the call is, and where the result goes.
        local_rank: which worker this is.
    """
    Path(folder, local_rank).unlink(missing_ok=True)  # of a process before this one
    preparation, call = pickle.loads(Path(folder, _CALL).read_bytes())
    multiprocessing.spawn.prepare(preparation)
    function, arguments = pickle.loads(call)
    result = pickle.dumps(function(*macros.substitute(list(arguments), local_rank)))
    written = Path(folder, f"{local_rank}.{os.getpid()}")
    written.write_bytes(result)
    written.replace(Path(folder, local_rank))  # whole, or not at all


if __name__ == "__main__":
    main(*sys.argv[1:])
