"""Parts what a step returned into the next state and the rest.

Which of the results are the next state is known from the trace of the step
(`autopar_passes.program.carried`), so a loop needs to know no form of step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from autopar.runtime.creation import flat_state, replace_leaves, splat
from autopar.steps.analysis import Analysis

__all__ = ["carried_out", "splat"]


def carried_out(analysis: Analysis, state: Any, result: Any) -> tuple[Any, Any]:
    """Returns the next state, and what the step returned besides.

    An array of the state that the step does not return stays. NNX objects, which the
    step has updated in place, are the next state themselves.

    Args:
      analysis: the step.
      state: what the step was called with: one pytree, or a tuple of its leading
        arguments.
      result: what the step returned.
    """
    numbers = _numbers(analysis)
    leaves, structure = jax.tree.flatten(result)
    if len(leaves) != len(numbers):  # objects are returned: they are the caller's own
        return state, result
    carried = analysis.pytrees.carried
    old, _ = flat_state(state)
    next_of = dict(zip(numbers, leaves, strict=True))
    new = [next_of.get(carried.get(k, -1), x) for k, x in enumerate(old)]
    taken = {carried[k] for k in range(len(old)) if k in carried}
    marks = [None if number < 0 else number in taken for number in numbers]
    rest = _rest(result, leaves, structure, marks)
    return (replace_leaves(state, new) if any(marks) else state), rest


def _numbers(analysis: Analysis) -> list[int]:
    """Of each leaf that the step returns, its number among the flat results.

    -1 stands for a leaf that is no array.
    """
    fixed = analysis.pytrees.result.fixed
    static = {k for k, _ in fixed.leaves}
    objects, _ = cast(Sequence[Any], fixed.tree.children())
    found: list[int] = []
    number = 0
    for k in range(fixed.tree.num_leaves):
        if k >= objects.num_leaves:
            found.append(-1 if k in static else number)
        number += k not in static
    return found


def _rest(
    result: Any, leaves: Sequence[Any], structure: Any, marks: Sequence[bool | None]
) -> Any:
    """The result without its parts whose arrays are all marked.

    Leaves that are no arrays, such as the sizes that a module keeps, have no mark.
    """
    if _whole(marks):
        return None
    parts = [_whole(m) for m in _by_child(structure, marks)]
    if type(result) in (tuple, list):
        kept = [x for x, taken in zip(result, parts, strict=True) if not taken]
        return kept[0] if len(kept) == 1 else tuple(kept)
    if isinstance(result, Mapping):
        given = cast(Mapping[Any, Any], result)
        keys = sorted(given) if len(parts) == len(given) else []
        gone = {key for key, taken in zip(keys, parts, strict=False) if taken}
        return {key: x for key, x in given.items() if key not in gone}
    pairs = zip(leaves, marks, strict=True)
    return jax.tree.unflatten(structure, [None if m else x for x, m in pairs])


def _whole(marks: Sequence[bool | None]) -> bool:
    return any(marks) and all(mark is not False for mark in marks)


def _by_child(
    structure: Any, marks: Sequence[bool | None]
) -> list[Sequence[bool | None]]:
    """The marks of each child of a tree."""
    found: list[Sequence[bool | None]] = []
    begin = 0
    for child in structure.children():
        found.append(marks[begin : begin + child.num_leaves])
        begin += child.num_leaves
    return found
