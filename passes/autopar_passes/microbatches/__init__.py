"""Splits a step into microbatches: what runs for each of them, and what runs once."""
