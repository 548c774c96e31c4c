"""Pipeline stages: which part of a step each equation belongs to, and what it sends."""
