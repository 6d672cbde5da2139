"""The command line. It uses only the public API of the library."""

from .app import app, main

__all__ = ["app", "main"]
