"""Layouts: how arrays are sharded over a mesh, and how they are resharded."""
