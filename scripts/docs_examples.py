"""Puts fences around the examples of docstrings, as an extension of griffe.

Docstrings contain their examples as plain doctests, which Markdown would read as
quotations.
"""

import re
from typing import Any

import griffe

# An example, with the lines below it up to an empty line.
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.M)


class FencedExamples(griffe.Extension):
    """Formats ``>>>`` examples as blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Puts fences around the examples of a function, class or module."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each example.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()[2:]
    ['```pycon', '>>> 1 + 1', '2', '```']
    """
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
