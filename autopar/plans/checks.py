"""Sums that tell whether a plan's content, or a part of it, was changed.

A plan remembers a sum of each of its parts from when it was made. So a plan that was
edited, in a file or in a program, says itself which of its parts were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

# Parts that may be set at any time: who made the plan when, how, what for, and what
# follows from the rest.
ABOUT = frozenset(
    {
        "schema", "version", "seconds", "solver", "target", "options", "checks",
        "stages", "worth", "compiled_memory_bytes", "decided",
    }
)  # fmt: skip
_DIGITS = 16
_PART_DIGITS = 8


def digest(content: Any, digits: int = _DIGITS) -> str:
    """Hexadecimal digits that change with anything in a value."""
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:digits]


def checks_of(plan: msgspec.Struct, stages: Sequence[msgspec.Struct]) -> dict[str, str]:
    """Returns a sum of each part; that of a stage's field is of all stages."""
    return {name: digest(part, _PART_DIGITS) for name, part in _parts_of(plan, stages)}


def _parts_of(
    plan: msgspec.Struct, stages: Sequence[msgspec.Struct]
) -> Iterator[tuple[str, Any]]:
    for name in plan.__struct_fields__:
        if name not in ABOUT:
            yield name, getattr(plan, name)
    if stages:
        for name in stages[0].__struct_fields__:
            yield name, [getattr(stage, name) for stage in stages]


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the parts that differ; none of those that were not known before."""
    return tuple(name for name in now if name in before and before[name] != now[name])
