"""Rematerialisation: the backward pass recomputes values instead of keeping them."""
