"""Measures the numbers of this machine that the cost model needs."""
