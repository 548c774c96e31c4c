"""Scheduling of jobs on a cluster: policies, and a simulator of policies."""
