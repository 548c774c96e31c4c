"""Cluster systems that run the workers of several processes; each is an extra."""
