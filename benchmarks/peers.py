"""What is compared: ft_wrapper, NVIDIA's nvidia-resiliency-ext (NVRx) and torchrun.

NVRx gets a virtual environment of its own, made on first use and kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
NVRX = "nvidia-resiliency-ext==0.4.1"
# NVRx's requirements without those that only its other parts use; it is installed without dependencies
# because it would bring the CUDA build of everything along.
NVRX_REQUIREMENTS = ("psutil", "packaging", "pyyaml", "nvidia-ml-py", "pynvml", "defusedxml", "numpy")
NVRX_ENV = "FT_WRAPPER_BENCHMARK_NVRX"
DEFAULT_FOLDER = Path(__file__).resolve().parent / ".venv-nvrx"

# As often as it can look: everything in it that is an interval, and how long it gathers further faults.
NVRX_TUNED = {
    "monitor_thread_interval": 0.05,
    "monitor_process_interval": 0.05,
    "heartbeat_interval": 0.05,
    "progress_watchdog_interval": 0.05,
    "last_call_wait": 0.05,
}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One of those compared.

    Args:
        name: its name in tables and in ``--only``.
        python: the interpreter of its environment.
        module: where ``Wrapper`` and ``CallWrapper`` are; empty for torchrun.
        settings: durations that are not the defaults, in seconds.
        etcd: members of the etcd that has the job's store; empty for a store of the job's own.
    """

    name: str
    python: str
    module: str
    settings: dict[str, float] = dataclasses.field(default_factory=dict)
    etcd: str = ""

    @property
    def own_group_store(self) -> bool:
        """Whether the function has to bring a store for a process group that is made again."""
        return self.module.startswith("nvidia")


OURS, NVRX_DEFAULTS, NVRX_50MS, TORCHRUN = "ft_wrapper", "NVRx", "NVRx 50 ms", "torchrun"
NAMES = (OURS, NVRX_DEFAULTS, NVRX_50MS, TORCHRUN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what is compared."""
    parser.add_argument(
        "--nvrx",
        type=Path,
        default=Path(os.environ.get(NVRX_ENV, DEFAULT_FOLDER)),
        metavar="DIR",
        help=f"virtual environment with NVRx, made if it is not there (default: %(default)s; or ${NVRX_ENV})",
    )
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}"
    )


def chosen(arguments: argparse.Namespace) -> list[Implementation]:
    """Returns what is to be compared, its environments made.

    Args:
        arguments: of the parser that `add_arguments` was called on.

    Raises:
        RuntimeError: NVRx could not be installed.
    """
    found = []
    for name in NAMES:
        if name not in arguments.only:
            continue
        if name == OURS:
            found.append(Implementation(name, sys.executable, "ft_wrapper"))
        elif name == TORCHRUN:
            found.append(Implementation(name, sys.executable, ""))
        else:
            settings = NVRX_TUNED if name == NVRX_50MS else {}
            python = nvrx_python(arguments.nvrx)
            found.append(Implementation(name, python, "nvidia_resiliency_ext.inprocess", dict(settings)))
    return found


def nvrx_python(folder: Path) -> str:
    """Returns the interpreter of NVRx's virtual environment, which is made where it is not complete yet.

    Args:
        folder: of the virtual environment.

    Raises:
        RuntimeError: a step of the installation failed; its output has been printed.
    """
    python = folder / "bin" / "python"
    if python.exists() and _imports_nvrx(python):
        return str(python)
    print(f"Installing {NVRX} with {TORCH} into {folder}; this happens once and takes minutes.", flush=True)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    for packages in ([TORCH], ["--no-deps", NVRX], list(NVRX_REQUIREMENTS)):
        try:
            subprocess.run([*pip, *packages], check=True, timeout=1800)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(
                f"{error}; to do without NVRx: --only {OURS} {TORCHRUN}; to use an environment that has it: "
                "--nvrx DIR"
            ) from None
    if not _imports_nvrx(python):
        raise RuntimeError(f"{folder} has {NVRX} installed, but {python} cannot import it")
    return str(python)


def _imports_nvrx(python: Path) -> bool:
    code = "from importlib.metadata import version as v; import nvidia_resiliency_ext.inprocess; "
    code += "print(v('nvidia-resiliency-ext'))"
    result = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120)
    return result.returncode == 0 and result.stdout.strip() == NVRX.partition("==")[2]
