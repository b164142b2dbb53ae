"""State that goes on from living peers: no step is lost or done twice."""

from .live_state import LiveState as LiveState
