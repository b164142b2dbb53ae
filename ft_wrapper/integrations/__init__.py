"""Frameworks through faults, each in its own module, which only its users import."""
