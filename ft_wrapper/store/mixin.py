"""StoreMixin: everything the ranks do on a store, topic by topic."""

from .barrier import BarrierMixin
from .coordination import CoordinationMixin


class StoreMixin(CoordinationMixin, BarrierMixin):
    """What a store offers to the wrapper, its plug-ins and its users, beside torch's own operations."""
