"""Where parts of a pipeline begin in a step whose loops over layers are in pieces."""

from __future__ import annotations

from collections import defaultdict

from autopar.planner.stages.layer_map import LayerMap, batch_inputs
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.layer_loops.paths import piece_arguments
from autopar_passes.stages.flow import Flow
from autopar_passes.stages.layers import top_level


def parts_at_loops(
    whole: Analysis, layers: LayerMap, stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts a step so that each stage has one piece of its loop with most work.

    Args:
      whole: the step with each loop in as many pieces as there are stages.
      layers: its layers.
      stages: how many stages.

    Returns:
      The forward equations at which layers begin, and the layers at which parts do.
    """
    loops = _heaviest(whole, stages)
    starts = tuple(sorted({*layers.starts, *loops[1:]}))
    return starts, (0, *(starts.index(loop) for loop in loops[1:]))


def _heaviest(whole: Analysis, stages: int) -> list[int]:
    """The forward equations of the loop that has most work, in their order."""
    pieces = _piece_numbers(whole)
    graph = whole.graph
    once = update_equations(whole.program, graph)
    batch = frozenset(batch_inputs(whole))
    flow = Flow(whole.program, graph, batch, once)
    work: dict[int, float] = defaultdict(float)
    above = top_level(whole.program)
    for op in graph.operators:
        work[above.get(op.equation, -1)] += op.flops * op.trips
    # Number of a piece -> the loops over it, in the order of the program.
    found: dict[int, list[int]] = defaultdict(list)
    for index, eqn in flow.equations.items():
        if eqn.primitive != "scan" or flow.roles[index] is not Role.FORWARD:
            continue
        read = {
            pieces[v]
            for a in eqn.inputs
            if isinstance(a, int)
            for v in flow.of_state.get(a, ())
            if v in pieces
        }
        if len(read) == 1:
            found[read.pop()].append(index)
    chains = list(zip(*(found[k] for k in range(stages)), strict=False))
    return sorted(max(chains, key=lambda loops: sum(work[k] for k in loops)))


def _piece_numbers(whole: Analysis) -> dict[int, int]:
    """Value of an input that is a piece -> its number among those of its array."""
    inputs, behind = whole.graph.inputs, len(whole.graph.inputs)
    behind -= sum(len(own) - 1 for own in whole.pieces.values())
    out: dict[int, int] = {}
    for k, places in piece_arguments(behind, whole.pieces).items():
        assert places[0] == k
        out.update({inputs[p].value: n for n, p in enumerate(places)})
    return out
