"""For tests of programs that use the wrapper: a store in memory, virtual time, a deterministic scheduler.

Names are loaded at their first use: only some need the libraries of an extra.
"""

from .. import _names

__getattr__, __dir__, __all__ = _names.attach(__name__, __path__[0])
