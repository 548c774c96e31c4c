"""Runs the jobs of a table on a real cluster, under a scheduling policy."""
