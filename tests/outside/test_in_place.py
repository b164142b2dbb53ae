"""What torch_elastic.py puts in torch's place is there, in each process that looks for torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

IN_PLACE = Path(__file__).parent / "in_place"
ROOT = Path(__file__).parent.parent.parent

LOOK = """
import torch.distributed.run as run
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.launcher import api
print([cls.__module__ for cls in api.LocalElasticAgent.__mro__[1:2]],
      *(f.__module__ == "sitecustomize" for f in (registry.get_rendezvous_handler, run.main)))
"""


@pytest.mark.nightly("torch_elastic.py is run by hand")
@pytest.mark.parametrize(
    ("column", "found"),
    [
        ("", "['torch.distributed.elastic.agent.server.api'] False False"),
        ("agent,ft", "['ft_wrapper.agent.elastic'] True False"),
        ("ftrun", "['ft_wrapper.agent.elastic'] True True"),
    ],
)
def test_torchs_parts_are_replaced(column: str, found: str) -> None:
    path = os.pathsep.join([str(IN_PLACE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "FT_WRAPPER_OUTSIDE": column}
    looked = subprocess.run(
        [sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, timeout=120
    )
    assert looked.stdout.strip() == found, looked.stderr
