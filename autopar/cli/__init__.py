"""The command line; `main` is the console script."""

from autopar.cli.app import main

__all__ = ["main"]
