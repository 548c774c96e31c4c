"""Texts about a plan for people: tables, pages and explanations.

An import of this package registers the texts of plans: ``str``, ``repr`` and the cell
of a notebook.
"""

from autopar.reports import notebook

__all__ = ["notebook"]
