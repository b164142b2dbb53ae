"""What some versions of torch cannot do, for the tests that need it."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

needs_fsdp2_on_cpu = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="FSDP2 of torch 2.6 does not run on the CPU"
)
