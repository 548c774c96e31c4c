"""Which job gets how many devices of which kind."""
