"""Frameworks through faults, each in a module of its own, which only its users import."""
