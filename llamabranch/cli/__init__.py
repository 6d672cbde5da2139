"""The command line, written over the public API only."""

from .app import app, main

__all__ = ["app", "main"]
