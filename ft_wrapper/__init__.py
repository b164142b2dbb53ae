"""Keeps distributed PyTorch training going through faults, inside the processes that survive them.

Names are loaded at their first use: ``ftrun report`` and the like need no torch. ``__init__.pyi`` lists them.
"""

import os

from . import _names
from . import log_lines as _log_lines

__version__ = "0.3.0"  # the build reads it

__getattr__, __dir__, __all__ = _names.attach(__name__, __path__[0])
if "FT_WRAPPER_AGENT" in os.environ:  # a rank of ftrun
    _log_lines.install()
