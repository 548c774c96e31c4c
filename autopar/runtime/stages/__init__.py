"""Runs plans of several stages: tasks in the order of a schedule, on submeshes."""
