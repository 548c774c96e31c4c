"""Measures the figures of this machine that the cost model needs."""
