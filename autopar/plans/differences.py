"""Where two plans differ, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# How long planning took, and sums over the rest.
_LEFT_OUT = frozenset({"seconds", "checks", "solver/seconds"})
_MISSING = "-"


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """The fields of two plans as plain data that differ, with both values.

    Paths are joined by ``/``; elements of lists are numbered, or named where they have
    a name. How long planning took is left out.

    >>> differences({"a": {"b": 1}, "c": [1, 2]}, {"a": {"b": 2}, "c": [1]})
    [('a/b', 1, 2), ('c/1', 2, '-')]
    """
    return [d for d in _walk("", one, other) if d[0] not in _LEFT_OUT]


def _walk(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if path in _LEFT_OUT or one == other:
        return
    pair = (_fields(one), _fields(other))
    if pair[0] is None or pair[1] is None:
        yield path, one, other
        return
    for key in dict.fromkeys([*pair[0], *pair[1]]):
        inner = f"{path}/{key}" if path else str(key)
        values = (fields.get(key, _MISSING) for fields in pair if fields is not None)
        yield from _walk(inner, *values)


def _fields(value: Any) -> Mapping[str, Any] | None:
    """A value's parts by name; None for one without, such as a layout."""
    if isinstance(value, Mapping):
        return value
    parts = isinstance(value, Sequence) and not isinstance(value, str)
    if parts and any(isinstance(x, Mapping | int | float) for x in value):
        return {str(_name(x, k)): x for k, x in enumerate(value)}
    return None


def _name(value: Any, position: int) -> Any:
    if isinstance(value, Mapping):
        return value.get("name") or position
    return position
