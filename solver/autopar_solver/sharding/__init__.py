"""Chooses one strategy for each operator: the intra-operator problem."""
