"""Every option of a torchrun in each way to say it: in full, abbreviated, and by its variable."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.argparse_util import check_env, env

VALUES = {
    "nnodes": "1:1",
    "nproc_per_node": "2",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:0",
    "rdzv_id": "job7",
    "rdzv_conf": "join_timeout=50",
    "max_restarts": "1",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "event_log_handler": "console",
    "role": "trainer",
    "redirects": "3",
    "tee": "0:3",
    "local_ranks_filter": "0,7",
    "duplicate_stdout_filters": "apple,,orange",
    "duplicate_stderr_filters": "apple",
    "node_rank": "0",
    "master_addr": "127.0.0.1",
    "local_addr": "127.0.0.1",
    "logs_specs": "own",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "7",
    "log_line_prefix_template": "<${role_name} ${rank} ${local_rank} ${hostname}>",
}
"""What to give them, by their names in the result of parsing; but ``log_dir`` and ``master_port``."""

END = ("help", "print_completion")
"""Options that print something and end."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to give one option.

    Args:
        option: in full.
        dest: its name in the result of parsing.
        how: ``long``, ``abbreviated`` or ``variable``.
        arguments: what stands on the command line.
        environment: what does not.
    """

    option: str
    dest: str
    how: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def forms(*parsers: argparse.ArgumentParser, log_dir: Path, master_port: int) -> Iterator[Form]:
    """All forms of all options of torchrun but those that end it.

    Args:
        parsers: torchrun's, of one or more versions. An abbreviation is one that is unique in all of them.
        log_dir: what to give ``--log-dir``.
        master_port: what to give ``--master-port``.

    Raises:
        KeyError: an option takes a value, and `VALUES` has none.
    """
    values = {**VALUES, "log_dir": str(log_dir), "master_port": str(master_port)}
    for action in options(*parsers):
        if action.dest in END:
            continue
        given = () if action.nargs == 0 else (values[action.dest],)
        option = max(action.option_strings, key=len)
        yield Form(option, action.dest, "long", (option, *given))
        yield Form(option, action.dest, "abbreviated", (abbreviated(option, *parsers), *given))
        if isinstance(action, (env, check_env)):
            variable = (f"PET_{action.dest.upper()}", given[0] if given else "1")
            yield Form(option, action.dest, "variable", (), (variable,))


def options(*parsers: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of all of them, each once.

    Args:
        parsers: torchrun's, of one or more versions.
    """
    found = {action.dest: action for parser in parsers for action in parser._actions if action.option_strings}
    return list(found.values())


def abbreviated(option: str, *parsers: argparse.ArgumentParser) -> str:
    """The shortest beginning of an option that no other one has; the option itself if there is none.

    Args:
        option: with hyphens or underscores.
        parsers: which others there are.
    """
    own = next(action.dest for action in options(*parsers) if option in action.option_strings)
    others = [
        text
        for action in options(*parsers)
        for text in action.option_strings
        if action.dest != own and text.startswith("--")
    ]
    for end in range(3, len(option)):
        if not any(text.startswith(option[:end]) for text in others):
            return option[:end]
    return option
