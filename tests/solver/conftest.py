"""Puts this folder on the path, so that the rooms below find the helpers here."""
