"""Improves choices that fit: one node at a time, or a part of the field at once."""
