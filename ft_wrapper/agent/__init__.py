"""Which processes run on this node."""
