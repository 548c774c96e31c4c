"""From a train step to an operator graph, and back to a program."""
