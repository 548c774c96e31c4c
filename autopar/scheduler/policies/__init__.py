"""Policies: each gives devices to jobs, round by round."""
