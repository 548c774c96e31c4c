"""The solver's command line, as ``python -m autopar_solver``."""

from autopar_solver.cli import main

main()
