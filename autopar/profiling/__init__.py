"""Measures how fast this machine computes and communicates, for the cost model."""
