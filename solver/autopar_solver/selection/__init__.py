"""Chooses for each gradient a codec, which compresses it before it is sent."""
