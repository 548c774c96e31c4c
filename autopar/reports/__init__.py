"""What people read of a plan: tables, pages and explanations.

Importing it gives plans their texts: ``str``, ``repr`` and the cell of a notebook.
"""

from autopar.reports import notebook

__all__ = ["notebook"]
