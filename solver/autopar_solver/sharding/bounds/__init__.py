"""Bounds the cost of a field from below, and that of each strategy."""
