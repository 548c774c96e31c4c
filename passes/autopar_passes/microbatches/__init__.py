"""Splits a step into equations for each microbatch and equations that run once."""
