"""What the pieces of stacked layers are called."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each piece, and the one behind its last.

    >>> ranges([2, 3])
    [(0, 2), (2, 5)]
    """
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def piece_paths(path: str, sizes: Sequence[int]) -> list[str]:
    """The paths of the pieces of an array.

    >>> piece_paths("params/kernel", [2, 3])
    ['params/kernel@0:2', 'params/kernel@2:5']
    """
    return [f"{path}@{a}:{b}" for a, b in ranges(sizes)]


def whole_path(path: str) -> str:
    """The path of the array that a piece is of; empty for an array that is none.

    >>> whole_path("params/kernel@0:2")
    'params/kernel'
    >>> whole_path("params/kernel")
    ''
    """
    whole, _, layers = path.rpartition("@")
    return whole if layers.replace(":", "").isdecimal() else ""
