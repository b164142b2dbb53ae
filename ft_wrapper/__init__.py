"""Keeps distributed PyTorch training going through faults, inside the processes that survive them.

Names are loaded at their first use: ``ftrun report`` and the like need no torch. ``__init__.pyi`` lists them.
"""

import os

from . import _lazy
from . import exception as exception
from . import log_lines as _log_lines
from ._renamed import of_module as _of_module
from ._version import __version__ as __version__

__getattr__, __dir__, __all__ = _lazy.attach(__name__, __path__[0])
if "FT_WRAPPER_AGENT" in os.environ:  # a rank of ftrun
    _log_lines.install()
# Not in that module itself, which decides nothing and warns of nothing.
_names = {"Drained": "RankDrained", "Excluded": "RankExcluded"}
vars(exception)["__getattr__"] = _of_module(exception.__name__, vars(exception), _names)
