"""Runs plans: compiles the planned step, creates and moves its state."""
