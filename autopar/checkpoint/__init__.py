"""Saves and restores the state of a step, under any plan."""
