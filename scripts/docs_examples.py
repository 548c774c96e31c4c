"""Fences the examples of docstrings on the site, as an extension of griffe.

Docstrings hold their examples as plain doctests, which Markdown takes for quotations.
"""

import re
from typing import Any

import griffe

# An example, and the lines below it up to an empty one.
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.M)


class FencedExamples(griffe.Extension):
    """Writes ``>>>`` examples as blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fences the examples of one function, class or module."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each example.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()[2:]
    ['```pycon', '>>> 1 + 1', '2', '```']
    """
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
