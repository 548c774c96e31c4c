"""What the pieces of stacked layers are called, and where they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


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


def piece_arguments(
    count: int, sizes: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Flat argument -> the flat arguments that are its pieces.

    Args:
      count: how many arguments the step has as it is written.
      sizes: flat argument -> how many layers each of its pieces has.
    """
    out: dict[int, list[int]] = {}
    for k in sorted(sizes):
        more = len(sizes[k]) - 1
        out[k] = [k, *range(count, count + more)]
        count += more
    return out


def one_each(sizes: Sequence[int], stages: Sequence[int], count: int) -> bool:
    """Whether every stage has a piece of an array, equally large and in their order.

    The array can then be split over them.

    Args:
      sizes: of the pieces.
      stages: where they are.
      count: how many stages there are.
    """
    return len(set(sizes)) == 1 and list(stages) == list(range(count))


def whole_path(path: str) -> str:
    """The path of the array that a piece is of; empty for an array that is none.

    >>> whole_path("params/kernel@0:2")
    'params/kernel'
    >>> whole_path("params/kernel")
    ''
    """
    whole, _, layers = path.rpartition("@")
    return whole if layers.replace(":", "").isdecimal() else ""
