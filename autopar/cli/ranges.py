"""Ranges on the command line, such as ``batch=8..64`` and ``--cluster 1..8x8:h100``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from autopar.errors import TargetError

_EXAMPLE = "Examples: 8,16,32; 8..64 doubles; 8..32+8 goes on in steps of 8."
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\+(\d+))?")


def values(text: str) -> list[str]:
    """Returns the values of a range; a text without a range is a single value.

    >>> values("8..64"), values("8..32+8"), values("bfloat16,float32")
    (['8', '16', '32', '64'], ['8', '16', '24', '32'], ['bfloat16', 'float32'])

    Raises:
      TargetError: a range is empty, or a value is given twice.
    """
    found = [value for part in text.split(",") for value in _part(part, text)]
    if len(set(found)) < len(found) or (len(found) > 1 and "" in found):
        raise TargetError(f"{text!r} has a value twice, or an empty one. {_EXAMPLE}")
    return found


def _part(part: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        return [part]
    first, last, step = (int(group or 0) for group in match.groups())
    if not 0 < first <= last or (match[3] and not step):
        raise TargetError(f"{text!r} is an empty range, or one without end. {_EXAMPLE}")
    if step:
        return [str(n) for n in range(first, last + 1, step)]
    doubled = itertools.takewhile(
        lambda n: n <= last, (first << k for k in itertools.count())
    )
    return [str(n) for n in doubled]


def combinations(words: dict[str, str]) -> list[dict[str, str]]:
    """Returns all combinations of values of options; the last option varies fastest.

    >>> combinations({"layers": "2", "batch": "8,16"})
    [{'layers': '2', 'batch': '8'}, {'layers': '2', 'batch': '16'}]
    """
    products = itertools.product(*map(values, words.values()))
    return [dict(zip(words, found, strict=True)) for found in products]


def clusters(texts: Sequence[str]) -> list[str]:
    """Expands texts of clusters, in which numbers of devices may be ranges.

    >>> clusters(["1..4x8:h100", "local"])
    ['1x8:h100', '2x8:h100', '4x8:h100', 'local']
    """
    out: list[str] = []
    for text in texts:
        counts, colon, rest = text.partition(":")
        if not colon or not re.fullmatch(r"[\dx.,+]+", counts):
            out.append(text)
            continue
        for found in itertools.product(*map(values, counts.split("x"))):
            out.append(f"{'x'.join(found)}:{rest}")
    return list(dict.fromkeys(out))
