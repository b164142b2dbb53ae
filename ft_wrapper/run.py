"""``ftrun``: runs a job, on one node or as one of several.

It starts the ranks of this node and hosts their coordination store outside of them, so that any rank may die.
In a wrapped job only the dead rank is replaced. It joins the survivors, which keep their processes. A script
without a wrapper is ended, or restarted, as a whole. Options have torchrun's names and meanings.

``ftrun status`` and ``ftrun report`` show the state of a job, and how long its restarts took; ``ftrun
drain``, ``ftrun restart`` and ``ftrun stop`` control a running job.
"""

from typing import Any

from .cli.main import command, main

__all__ = ["command", "main", "parse_args", "run"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name not in ("parse_args", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cli import run  # it needs torch

    return getattr(run, name)


if __name__ == "__main__":
    command()
