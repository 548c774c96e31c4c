"""The gradients that a codec does not send, and why not."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Generator, Sequence

from autopar.compression.codecs.registry import parse_codec
from autopar.layouts.assignment import Assignment
from autopar.planner.codecs.sites import Site, gradients_of, parameter_names
from autopar.steps.analysis import Analysis
from autopar.steps.sums import SMALLEST

UNSUMMED = "not summed over devices"
EARLY = "their sums cannot wait for the update"
SMALL = f"a vector, or of fewer than {SMALLEST} elements"

# Most names that are given of one group.
_NAMES = 3

_TOLD = contextvars.ContextVar("told", default=True)


@contextlib.contextmanager
def unasked() -> Generator[None]:
    """Within it codecs are tried that nobody has asked for: no use is no warning."""
    token = _TOLD.set(False)
    try:
        yield
    finally:
        _TOLD.reset(token)


def left_to_compiler(
    analysis: Analysis, assignment: Assignment, found: Sequence[Site]
) -> dict[str, list[str]]:
    """The gradients that no codec can send under an assignment, by reason.

    Args:
      analysis: the step.
      assignment: its layouts.
      found: the gradients that codecs may send (`autopar.planner.codecs.sites`).
    """
    values = gradients_of(analysis)
    names = parameter_names(analysis.graph, analysis.contraction, values)
    sites = {site.value for site in found}
    out: dict[str, list[str]] = {UNSUMMED: [], EARLY: []}
    for deferral in analysis.deferrals:
        makers = [analysis.graph.operators[c] for c in deferral.contributions]
        summed = any(assignment.partial_of(op) for op in makers)
        for value in deferral.ends:
            if value in deferral.gradients and value not in sites:
                out[EARLY if summed else UNSUMMED].append(names[value])
    return {reason: group for reason, group in out.items() if group}


def warn_of_no_use(
    stages: Sequence[tuple[Analysis, Assignment, Sequence[Site]]], text: str
) -> None:
    """Warns that a codec which was asked for sends nothing, with a reason by group.

    Args:
      stages: of each stage of the plan its analysis, layouts and gradients.
      text: the codec.
    """
    if not _TOLD.get():
        return
    groups: dict[str, list[str]] = {}
    for analysis, assignment, found in stages:
        for why, names in left_to_compiler(analysis, assignment, found).items():
            groups.setdefault(why, []).extend(names)
        for site in found:
            why = site.refuses(parse_codec(text)) if site.compressible else SMALL
            groups.setdefault(why, []).append(site.name)
    said = [
        f"\n  {reason} ({len(names)}): "
        + ", ".join(names[:_NAMES])
        + (", ..." if len(names) > _NAMES else "")
        for reason, names in groups.items()
    ]
    why = "".join(said) or " the step has none that is summed."
    warnings.warn(f"compression={text!r} is used for no gradient:{why}", stacklevel=2)
