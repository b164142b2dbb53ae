"""Puts ft_wrapper in torch's place in each Python process that finds this folder in its path.

Python imports a module of this name at its start, also in the processes that a test spawns. Nothing is
imported before the process itself imports the part of torch that is replaced. What is put where is said by
``FT_WRAPPER_OUTSIDE`` (a column of torch_elastic.py); without it, nothing is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

ELASTIC = "torch.distributed.elastic"
LAUNCHER, BACKEND = (os.environ.get("FT_WRAPPER_OUTSIDE", "") + ",").split(",")[:2]
SERVERS = {"ft": "FT_WRAPPER_OUTSIDE_TCP", "ft-etcd": "FT_WRAPPER_OUTSIDE_ETCD"}


def endpoint(asked_for: str, given: str) -> str:
    """Where our backend meets: at the same address where both hold a TCPStore, else at a server of ours."""
    return given if (asked_for, BACKEND) == ("c10d", "ft") else os.environ[SERVERS[BACKEND]]


def replace_agent(module: ModuleType) -> None:
    from ft_wrapper.agent.elastic import LocalElasticAgent

    class Agent(LocalElasticAgent):
        """Of this module, as what is in torch's place."""

    module.LocalElasticAgent = Agent  # type: ignore[attr-defined]


def replace_backend(module: ModuleType) -> None:
    make = module.get_rendezvous_handler

    def get_rendezvous_handler(parameters: Any) -> Any:
        if BACKEND and parameters.backend in ("c10d", "etcd", "etcd-v2"):
            parameters.endpoint = endpoint(parameters.backend, parameters.endpoint)
            if parameters.backend != "c10d":
                parameters.config.pop("is_host", None)  # the store is a server here too
            parameters.backend = BACKEND
        return make(parameters)

    module.get_rendezvous_handler = get_rendezvous_handler  # type: ignore[attr-defined]


def replace_launcher(module: ModuleType) -> None:
    def main(args: Sequence[str] | None = None) -> None:
        """Runs ``ftrun``, and raises what torchrun's function does where the program has an exit code."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

        from ft_wrapper.run import main as ftrun

        words = list(sys.argv[1:] if args is None else args)
        if BACKEND and "--rdzv-backend=c10d" in words:
            given = next(word for word in words if word.startswith("--rdzv-endpoint="))
            where = endpoint("c10d", given.partition("=")[2])
            words[words.index(given)] = f"--rdzv-endpoint={where}"
            words[words.index("--rdzv-backend=c10d")] = f"--rdzv-backend={BACKEND}"
        try:
            code = ftrun(words)
        except SystemExit as error:
            raise ValueError("ftrun does not take these arguments") from error
        if code:
            raise ChildFailedError("ftrun", {0: ProcessFailure(0, -1, code, "")})

    module.main = main  # type: ignore[attr-defined]


PLACES: dict[str, Callable[[ModuleType], None]] = {}
if LAUNCHER:
    PLACES[f"{ELASTIC}.agent.server.local_elastic_agent"] = replace_agent
    PLACES[f"{ELASTIC}.rendezvous.registry"] = replace_backend
if LAUNCHER == "ftrun":
    PLACES["torch.distributed.run"] = replace_launcher


class Replace(importlib.abc.MetaPathFinder):
    """Finds the modules of `PLACES`, and changes each right after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        replace = PLACES.get(fullname)
        spec = None if replace is None else importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_replace(module: ModuleType) -> None:
            execute(module)
            replace(module)

        spec.loader.exec_module = then_replace  # type: ignore[method-assign]
        return spec


if PLACES:
    sys.meta_path.insert(0, Replace())
