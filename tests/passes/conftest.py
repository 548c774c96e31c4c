"""Puts this folder on the path, so that tests can import the helper modules in it."""
