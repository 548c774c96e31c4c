"""Readers of published traces, with one module per format."""
