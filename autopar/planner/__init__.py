"""Finds the fastest plan for an operator graph and a cluster."""
