"""The operator graph of a program: what the planner reads."""
