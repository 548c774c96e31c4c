"""Cuts loops over layers, and the state that they read, into pieces."""
