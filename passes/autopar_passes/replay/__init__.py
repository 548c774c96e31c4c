"""Replays a program with the layouts of a plan written into it."""
