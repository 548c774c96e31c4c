"""Compiles for accelerators by XLA, on hosts without an accelerator."""
