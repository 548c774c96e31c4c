"""Sums of gradients through codecs while a step runs."""
