"""The analysis of a step whose update is computed in batches of equal matrices."""

from __future__ import annotations

import functools
import time

from autopar.steps.analysis import Analysis, with_program
from autopar_passes.graph.operators import update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.program.update_batches import batch_updates


def in_update_batches(analysis: Analysis, devices: int) -> Analysis:
    """Returns the analysis of a step whose update runs in batches of matrices.

    If the update runs the same computation on several matrices, as Muon does, the new
    step runs it on batches of matrices (`autopar_passes.program.update_batches`).

    Args:
      analysis: the analysis of the step after the split into microbatches and
        rematerialisation.
      devices: the number of devices of the plan, which has one stage.

    Returns:
      ``analysis`` itself if no two computations are equal.
    """
    alone = analysis.alone or analysis
    if devices == 1 or alone.traced is None:
        return alone
    make = functools.partial(_with_batches, alone, devices)
    return alone.remember(("update batches", devices), make)


def _with_batches(analysis: Analysis, devices: int) -> Analysis:
    start = time.perf_counter()
    own = equations_of_update(analysis)
    program, batches = batch_updates(analysis.program, own, devices)
    if not batches:
        return analysis
    return with_program(analysis, program, start, alone=analysis, batches=batches)


def equations_of_update(analysis: Analysis) -> frozenset[int]:
    """Returns the equations of the update, without the loop over microbatches."""
    operators = analysis.graph.operators
    others = {op.equation for op in operators if op.role is Role.BACKWARD}
    whole = analysis.program.by_index()
    return frozenset(
        index
        for index in update_equations(analysis.program, analysis.graph)
        if others.isdisjoint(e.index for e in whole[index].inner)
    )
