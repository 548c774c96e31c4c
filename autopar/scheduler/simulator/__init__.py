"""Runs policies over traces: rounds, jobs with measured tables, and what comes out."""
