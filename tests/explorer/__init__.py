"""Simulated jobs on the real protocol: random schedules with faults, and what must hold at every step."""
