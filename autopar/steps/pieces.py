"""The analysis of a step whose loops over layers are in pieces."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from autopar.errors import PlanError
from autopar.progress import say
from autopar.steps.analysis import Analysis, analyse_program
from autopar_passes.graph.build import step_graph
from autopar_passes.layer_loops.operators import whole_path
from autopar_passes.layer_loops.split import in_pieces


def even_pieces(analysis: Analysis, count: int) -> dict[int, tuple[int, ...]]:
    """Pieces of about as many layers each, of state that loops over layers go through.

    Args:
      analysis: of the step as it is written.
      count: how many pieces. Where it divides some stacks of layers, others stay
        whole. Otherwise the first pieces have a layer more.

    Returns:
      Flat argument -> the number of layers of each of its pieces.
    """
    stacked = analysis.stacked_inputs if count > 1 else {}
    divided = {k: layers for k, layers in stacked.items() if layers % count == 0}
    return {
        k: tuple(layers // count + (n < layers % count) for n in range(count))
        for k, layers in (divided or stacked).items()
        if layers >= count
    }


def with_pieces(analysis: Analysis, sizes: Mapping[int, Sequence[int]]) -> Analysis:
    """Returns the analysis of a step with loops over layers in pieces.

    Args:
      analysis: of the step as it is written, on the whole batch.
      sizes: flat argument -> the number of layers of each of its pieces.
    """
    if not sizes:
        return analysis
    key = tuple((k, tuple(own)) for k, own in sorted(sizes.items()))
    known = analysis.cuts.get(key)
    if known is None:
        start = time.perf_counter()
        say("cutting loops over layers")
        traced = in_pieces(analysis.pytrees, sizes)
        made = analyse_program(
            traced.program, step_graph(traced), output_paths=traced.output_paths
        )
        known = analysis.cuts[key] = dataclasses.replace(
            made,
            traced=traced,
            origin=analysis.origin,
            pieces=dict(key),
            spares=analysis.spares,
            trace_s=analysis.trace_s,
            graph_s=analysis.graph_s + time.perf_counter() - start,
        )
    return known


def sizes_by_path(analysis: Analysis) -> dict[str, tuple[int, ...]]:
    """The sizes of pieces, by the path of the argument as the step is written."""
    inputs = analysis.graph.inputs
    return {
        whole_path(inputs[k].path): tuple(own) for k, own in analysis.pieces.items()
    }


def sizes_from_paths(
    analysis: Analysis, sizes: Mapping[str, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """The inverse of `sizes_by_path`, for the step as it is written.

    Raises:
      PlanError: the step has no such argument.
    """
    places = {given.path: k for k, given in enumerate(analysis.graph.inputs)}
    if missing := [path for path in sizes if path not in places]:
        raise PlanError(
            f"the plan cuts '{missing[0]}' into pieces, which the step does not have. "
            "Make a new plan with autopar.plan."
        )
    return {places[path]: tuple(own) for path, own in sizes.items()}
