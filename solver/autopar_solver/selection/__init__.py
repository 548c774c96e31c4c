"""Chooses a codec, which compresses for sending, for each gradient."""
