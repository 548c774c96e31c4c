"""Readers of published traces, one file each."""
