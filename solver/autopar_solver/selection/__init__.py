"""Chooses a codec for each gradient."""
