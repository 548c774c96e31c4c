"""Finds likely mistakes in the state that a step carries, and warns of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from autopar.steps.analysis import Analysis
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.trace import step_name

_ADVICE = (
    "State is recognised by coming back: as the result, or as a part of it, with the "
    "structure, shapes and dtypes of an argument."
)


class StateWarning(UserWarning):
    """A step carries no state, or carries state whose shapes change."""


def doubts(analysis: Analysis) -> list[str]:
    """Returns a sentence for each likely mistake in the state of a step."""
    if not analysis.carried_arguments:
        return [
            "nothing that it takes comes back, so every argument is planned as a "
            f"batch. {_ADVICE}{_other_dtype(analysis)}"
        ]
    found = _doubts_of_batch(analysis)
    changed = analysis.pytrees.changed
    if not changed:
        return found
    some = ", ".join(f"'{path}'" for path in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return [
        *found,
        f"{some}{more} of a state comes back in another shape or dtype and is not "
        "carried: the next call is planned anew. Keep its shape and dtype.",
    ]


def _other_dtype(analysis: Analysis) -> str:
    """Names an argument and a result that differ only in their dtype; or ''."""
    program = analysis.program
    results = [
        (path, program.values[atom])
        for path, atom in zip(analysis.output_paths, program.body.outputs, strict=True)
        if isinstance(atom, int)
    ]
    for given in analysis.graph.inputs:
        value = program.values[given.value]
        for path, result in results:
            alike = value.floating and result.floating and value.shape == result.shape
            if alike and value.shape and value.dtype != result.dtype:
                return (
                    f" '{given.path}' is {value.dtype}, and '{path}' of its shape is "
                    f"{result.dtype}: return it in the dtype that it had."
                )
    return ""


def _doubts_of_batch(analysis: Analysis) -> list[str]:
    """Names arguments that are state only by their shape, if no argument is batch."""
    inputs = analysis.graph.inputs
    if analysis.pytrees.form.roles.batch is not None:
        return []
    roles = {given.role for given in inputs}
    if InputRole.BATCH in roles or InputRole.PARAMETER not in roles:
        return []
    carried = analysis.carried_arguments
    return [
        f"'{given.path}' comes back with its shape, so it is planned as state, and "
        f"nothing is left to be the batch. If it is the batch, say so: "
        f"batch_argnames='{given.path}'."
        for k, given in enumerate(inputs)
        if k in carried
        and given.role is InputRole.OTHER
        and given.path in analysis.pytrees.form.names
        and analysis.program.values[given.value].floating
    ]


def warn_of_state(step: Callable[..., Any], analysis: Analysis) -> None:
    """Warns of likely mistakes in the state of a step."""
    name = step_name(step)
    for doubt in doubts(analysis):
        warnings.warn(f"{name}: {doubt}", StateWarning, stacklevel=3)
