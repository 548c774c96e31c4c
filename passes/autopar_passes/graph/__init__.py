"""The operator graph of a program: the facts that the planner reads."""
