"""The version: the build reads it, as does ``ftrun --version``."""

__version__ = "0.3.0"
