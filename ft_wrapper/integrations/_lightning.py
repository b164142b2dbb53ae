"""Lightning's extension points: where a rank stands, and how a file is written."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import TorchElasticEnvironment


class Environment(TorchElasticEnvironment):
    """Each process is a node of one device: Lightning wants as many ranks on each node, and in a row."""

    def local_rank(self) -> int:
        """The only one of its node."""
        return 0

    def node_rank(self) -> int:
        """The active rank."""
        return int(os.environ["RANK"])


class WholeFiles(TorchCheckpointIO):
    """Writes beside, and renames; Lightning moves from ``TMPDIR``: often a copy, which may end half-way."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Writes a file; on an object storage as Lightning does."""
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        beside = f"{os.fspath(path)}.tmp"
        try:
            with open(beside, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise


def arguments(plugins: tuple[Any, ...]) -> dict[str, Any]:
    """What a Trainer or Fabric takes."""
    cuda = torch.cuda.is_available()
    return {
        "accelerator": "cuda" if cuda else "cpu",
        "devices": [int(os.environ["LOCAL_RANK"])] if cuda else 1,
        "num_nodes": int(os.environ["WORLD_SIZE"]),
        "plugins": [Environment(), WholeFiles(), *plugins],
    }


def file_of(folder: Path) -> Path:
    """The checkpoint in its folder, which `Checkpoints` seals; of a sharded one, a folder."""
    return folder / "state.ckpt"
