"""Finds which scores of attention a mask hides, by the difference of positions.

A mask that a step computes from positions (``iota``) compares the position of a query
with that of a key. The operators on scores run for all differences of positions at
once, on abstract values. An integer is ``scale * q + offset[difference]``; a truth is
1, 0, or -1 if it is not known; a score is low (1), not low (0), or -1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar_passes.rules.blockwise import Constant, Step

# A score this low is a masked one: its softmax is 0 next to any other score.
_LOW = -1e9


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    scale: float
    offset: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class _Truth:
    known: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class _Low:
    known: np.ndarray


def hidden_differences(
    steps: Sequence[Step], leaves: Sequence[str], result: int, length: int
) -> np.ndarray | None:
    """Which scores a mask hides, by the difference of positions.

    Args:
      steps: the operators on scores.
      leaves: for each array that they read: ``product``, ``q`` or ``k`` for positions
        of queries or keys, or ''.
      result: the number of the softmax's operand.
      length: the number of positions.

    Returns:
      For each difference between a query's and a key's position, from ``1 - length``
      on: 1 if all scores are so low that their softmax is 0 next to any other score, 0
      if none is, and -1 if this is not known; None if nothing is known.
    """
    difference = np.arange(1 - length, length)
    none = np.zeros(len(difference), np.int8)
    first: dict[str, Any] = {
        "product": _Low(none),
        "q": _Number(1.0, np.zeros(len(difference))),
        "k": _Number(1.0, -difference.astype(float)),
    }
    found: list[Any] = [first.get(x) for x in leaves]
    for step in steps:
        read = [
            _number(x, len(difference)) if isinstance(x, Constant) else found[x]
            for x in step.inputs
        ]
        found.append(_abstract(step, read))
    return _low(found[result])


def is_causal(hidden: np.ndarray | None) -> bool:
    """Whether a mask hides all later keys, and not the key at the query's position.

    Args:
      hidden: the result of `hidden_differences`.
    """
    if hidden is None:
        return False
    own = len(hidden) // 2
    return bool((hidden[:own] == 1).all() and hidden[own] == 0)


def _number(constant: Constant, count: int) -> Any:
    if isinstance(constant.value, bool):
        return _Truth(np.full(count, constant.value, np.int8))
    return _Number(0.0, np.full(count, float(constant.value)))


def _low(x: Any) -> np.ndarray | None:
    if isinstance(x, _Low):
        return x.known
    if isinstance(x, _Number) and not x.scale:
        known = np.where(np.abs(x.offset) < -_LOW, 0, -1)
        return np.where(x.offset <= _LOW, 1, known).astype(np.int8)
    return None


def holds(dtype: Any, length: float) -> bool:
    """Whether a dtype has all whole numbers up to a length, and below zero."""
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.floating):
        return length <= 2.0 ** (jnp.finfo(kind).nmant + 1)
    return jnp.issubdtype(kind, jnp.signedinteger) and length <= jnp.iinfo(kind).max


def _whole(x: _Number) -> bool:
    return x.scale == int(x.scale) and bool((x.offset == np.floor(x.offset)).all())


def _converted(x: _Number, dtype: Any) -> _Number | None:
    """A number in another dtype; None if it may be rounded."""
    most = float(np.abs(np.where(x.offset <= _LOW, 0, x.offset)).max())
    length = len(x.offset) // 2 + 1
    exact = _whole(x) and holds(dtype, abs(x.scale) * length + most)
    floating = jnp.issubdtype(dtype, jnp.floating)
    low = bool((x.offset <= _LOW).any())
    return x if exact and (floating or not low) else None


_COMPARED: dict[str, Any] = {
    "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def _abstract(step: Step, read: list[Any]) -> Any:
    """The result of an operator; None if nothing is known."""
    name = step.primitive.name
    if name == "select_n" and isinstance(read[0], _Truth) and len(read) == 3:
        return _select(*read)
    if name in ("convert_element_type", "copy", "stop_gradient"):
        new = dict(step.params).get("new_dtype")
        if isinstance(read[0], _Truth) and new != np.bool_:
            known = read[0].known
            return None if (known < 0).any() else _Number(0.0, known.astype(float))
        if isinstance(read[0], _Number) and new is not None and new != np.bool_:
            return _converted(read[0], new)
        return read[0] if new != np.bool_ or isinstance(read[0], _Truth) else None
    if all(isinstance(x, _Truth) for x in read):
        return _logic(name, [x.known for x in read])
    if all(isinstance(x, _Number) for x in read):
        return _arithmetic(name, read)
    if name == "sub" and isinstance(read[1], _Number):
        name, read = "add", [read[0], _Number(-read[1].scale, -read[1].offset)]
    low = [_low(x) for x in read]
    if any(x is None for x in low):
        return None
    return _lowered(name, [x for x in low if x is not None])


def _lowered(name: str, low: list[np.ndarray]) -> Any:
    """The result of an operator on scores and numbers, which are low, or not."""
    either = np.maximum.reduce(low)
    unknown = np.minimum.reduce(low) < 0
    # Numbers that are not low stay so, as far as masks go; what becomes of a low one is
    # known for sums only.
    made = np.where(either > 0, 1 if name == "add" else -1, 0)
    return _Low(np.where(unknown, -1, made).astype(np.int8))


def _select(which: _Truth, one: Any, other: Any) -> Any:
    """``other`` where ``which`` holds, else ``one``."""
    if isinstance(one, _Truth) and isinstance(other, _Truth):
        picked = np.where(which.known == 1, other.known, one.known)
        same = one.known == other.known
        return _Truth(np.where((which.known < 0) & ~same, -1, picked).astype(np.int8))
    known = (which.known >= 0).all()
    if known and isinstance(one, _Number) and isinstance(other, _Number):
        if not (one.scale or other.scale):
            return _Number(0.0, np.where(which.known == 1, other.offset, one.offset))
        return None
    ends = [_low(x) for x in (one, other)]
    low = [np.full(len(which.known), -1, np.int8) if x is None else x for x in ends]
    picked = np.where(which.known == 1, low[1], low[0])
    unsure = (which.known < 0) & (low[0] != low[1])
    return _Low(np.where(unsure, -1, picked).astype(np.int8))


def _logic(name: str, read: list[np.ndarray]) -> Any:
    if name == "not":
        return _Truth(np.where(read[0] < 0, -1, 1 - read[0]).astype(np.int8))
    if name not in ("and", "or"):
        return None
    decides = 0 if name == "and" else 1
    one, other = read
    made = np.where((one < 0) | (other < 0), -1, 1 - decides)
    made = np.where((one == decides) | (other == decides), decides, made)
    return _Truth(made.astype(np.int8))


def _arithmetic(name: str, read: list[_Number]) -> Any:
    if name == "neg":
        return _Number(-read[0].scale, -read[0].offset)
    if len(read) != 2:
        return None
    one, other = read
    if name in _COMPARED:
        # Other numbers than whole ones may be rounded.
        if one.scale != other.scale or not (_whole(one) and _whole(other)):
            return None
        return _Truth(_COMPARED[name](one.offset, other.offset).astype(np.int8))
    if name in ("add", "sub"):
        sign = 1 if name == "add" else -1
        return _Number(one.scale + sign * other.scale, one.offset + sign * other.offset)
    if name == "mul" and not (one.scale and other.scale):
        fixed, varied = (one, other) if not one.scale else (other, one)
        if (fixed.offset == fixed.offset[0]).all():
            by = float(fixed.offset[0])
            return _Number(by * varied.scale, by * varied.offset)
    return None
