"""Saves and restores the state of a step, whatever plan it runs by."""
