"""The commands: what each is told, and its help. The work is done in `autopar.cli`."""
