"""Gradient compression: codecs, error feedback, synchronisation and policies."""
