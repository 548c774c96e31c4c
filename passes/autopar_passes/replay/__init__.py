"""Replays a program with the layouts of a plan stated in it."""
