"""The stores of the job's keys. They start no processes; only etcd's client keeps threads.

Names are loaded at their first use: an address needs no torch, and no other store urllib3, an extra.
"""

from .. import _names

__getattr__, __dir__, __all__ = _names.attach(__name__, __path__[0])
