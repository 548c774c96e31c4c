"""The arguments and help texts of commands; `autopar.cli` does the work."""
