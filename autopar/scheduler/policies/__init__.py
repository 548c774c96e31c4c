"""Scheduling policies: each assigns devices to jobs, round by round."""
