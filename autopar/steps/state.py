"""Says what is doubtful about the state that a step carries."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from autopar.steps.analysis import Analysis
from autopar_passes.program.trace import step_name

_ADVICE = (
    "State is recognised by coming back: as the result, or as a part of it, with the "
    "structure, shapes and dtypes of an argument."
)


class StateWarning(UserWarning):
    """A step carries nothing, or state that changes its shapes."""


def doubts(analysis: Analysis) -> list[str]:
    """Returns a sentence for everything that is doubtful about a step's state."""
    if not analysis.carried:
        return [
            "nothing that it takes comes back, so every argument is planned as a "
            f"batch. {_ADVICE}"
        ]
    changed = analysis.pytrees.changed
    if not changed:
        return []
    some = ", ".join(f"'{path}'" for path in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return [
        f"{some}{more} of a state comes back in another shape or dtype and is not "
        "carried: the next call is planned anew. Keep its shape and dtype."
    ]


def warn_of_state(step: Callable[..., Any], analysis: Analysis) -> None:
    """Warns of what is doubtful about the state of a step."""
    name = step_name(step)
    for doubt in doubts(analysis):
        warnings.warn(f"{name}: {doubt}", StateWarning, stacklevel=3)
