"""Runs the command line, as ``python -m autopar``."""

from autopar.cli import main

main()
