"""Pipeline stages: the part of each equation, and the values that stages send."""
