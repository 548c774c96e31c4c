"""Beside the helper modules, which the tests in the folders below import by name."""
