"""One wrapped call."""
