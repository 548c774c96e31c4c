"""Rematerialisation: what the backward pass computes again instead of keeping it."""
