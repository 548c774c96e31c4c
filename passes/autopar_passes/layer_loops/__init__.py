"""Cuts loops over layers, and the state that they go through, into pieces."""
