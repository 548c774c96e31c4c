"""The step as options ask for it: in microbatches, with layers that compute again."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.planner.options import PlanOptions, layers_asked
from autopar.plans import AS_WRITTEN, Rematerialisation
from autopar.steps.analysis import Analysis
from autopar.steps.remat import layer_starts, rematerialise


def remat_wanted(analysis: Analysis, options: PlanOptions) -> Rematerialisation:
    """What the options say to compute again; for ``auto``, what the step says alone.

    Args:
      analysis: the step.
      options: with a number of microbatches.

    Raises:
      PlanError: the step has not so many layers, or none that can be computed again.
    """
    if options.remat in (None, "auto"):
        return AS_WRITTEN
    if options.remat == "none":
        return Rematerialisation(checkpoints=False)
    count, level = layers_asked(options.remat)
    if count == 0:
        return AS_WRITTEN
    couple = options.coupled == "microbatch"
    starts = layer_starts(analysis, options.count, couple=couple)
    if count is not None and count > len(starts):
        raise PlanError(
            f"remat={options.remat!r}: the step has {len(starts)} layers. Give fewer, "
            "or 'all'."
        )
    layers = range(len(starts) if count is None else count)
    return Rematerialisation(layers=tuple(layers), starts=starts, level=level)


def as_asked(analysis: Analysis, options: PlanOptions) -> Analysis:
    """The step in the microbatches, and with the layers computed again, of options.

    Raises:
      PlanError: it cannot be split or rewritten so.
    """
    return rematerialise(
        analysis,
        remat_wanted(analysis, options),
        options.count,
        couple=options.coupled == "microbatch",
    )
