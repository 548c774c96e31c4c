"""Layouts: how arrays lie on a mesh, and how they move."""
