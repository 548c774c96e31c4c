"""The analysis of a step that keeps state in host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.steps.analysis import Analysis, with_program
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.offload import offload_state


def carried_state(analysis: Analysis, role: InputRole) -> list[tuple[str, int]]:
    """Returns path and bytes of each array of carried state, the largest first.

    Args:
      analysis: the step.
      role: the role of the arrays, such as optimizer state.
    """
    graph = analysis.graph
    found = [
        (given.path, graph.values[given.value].nbytes)
        for given in graph.inputs
        if given.role is role
        and given.output >= 0
        and graph.values[given.value].shape
        and not graph.values[given.value].on_host
    ]
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))


OFFLOADS = ("optimizer", "state")
"""Values of the option ``offload`` that name which carried state is in host memory."""


def asked_state(analysis: Analysis, offload: str | None) -> list[str]:
    """Returns the paths of the state that the option ``offload`` names."""
    if offload not in OFFLOADS:
        return []
    found = carried_state(analysis, InputRole.OPTIMIZER_STATE)
    if offload == "state":
        found += carried_state(analysis, InputRole.PARAMETER)
    return [path for path, _ in found]


def keep_on_host(analysis: Analysis, paths: Sequence[str]) -> Analysis:
    """Returns the analysis of a step that keeps arrays in host memory.

    Args:
      analysis: the step after the split into microbatches and rematerialisation.
      paths: the paths of the arrays, which are carried state. If there are
        none, host memory has only the arrays that the user's own code puts there.

    Raises:
      PlanError: the step carries no array of such a path.
    """
    if analysis.offload == tuple(paths):
        return analysis
    base = analysis.alone or analysis
    base = base.on_devices or base
    if not paths:
        return base
    kept = tuple(paths)
    return base.remember(("offload", kept), lambda: _with_state_on_host(base, kept))


def _with_state_on_host(base: Analysis, paths: tuple[str, ...]) -> Analysis:
    start = time.perf_counter()
    place = {given.path: k for k, given in enumerate(base.graph.inputs)}
    carried = base.carried_arguments
    wrong = [path for path in paths if place.get(path) not in carried]
    if wrong:
        raise PlanError(
            f"{base.pytrees.name}: '{wrong[0]}' cannot lie in the memory of the host: "
            "the step carries no state of this name. Make a new plan with autopar.plan."
        )
    program = offload_state(base.program, {place[p]: carried[place[p]] for p in paths})
    return with_program(base, program, start, offload=paths, on_devices=base)
