"""Finds the state that loops over layers go through."""

from __future__ import annotations

from collections.abc import Mapping

from autopar_passes.layer_loops.operators import POINTWISE
from autopar_passes.layer_loops.split import Splitter
from autopar_passes.program.equations import Program


def stacked_state(program: Program, carried: Mapping[int, int]) -> dict[int, int]:
    """Finds the carried arguments that are stacked layers.

    They are what a loop of the top level goes through, as it is or converted, and what
    is updated together with such an array element by element.

    Args:
      program: the flat program of a step.
      carried: flat argument -> flat result that is its next value.

    Returns:
      Flat argument -> its number of layers, which is its first dimension.
    """
    comes_from = _sources(program, carried)
    found: dict[int, int] = {}
    for eqn in program.body.equations:
        if eqn.primitive == "scan" and eqn.params["length"] > 1:
            first = eqn.params["num_consts"] + eqn.params["num_carry"]
            for atom in eqn.inputs[first:]:
                if isinstance(atom, int) and atom in comes_from:
                    k = comes_from[atom]
                    found[k] = program.values[program.body.inputs[k]].shape[0]
    while found:
        splitter = Splitter(program, {k: (1, n - 1) for k, n in found.items()})
        splitter.run({carried[k]: k for k in found})
        more = {comes_from[v] for v in splitter.sliced if v in comes_from}
        more = {
            k
            for k in more - found.keys()
            if program.values[program.body.inputs[k]].shape[0] in found.values()
        }
        if not more:
            break
        for k in more:
            found[k] = program.values[program.body.inputs[k]].shape[0]
    return dict(sorted(found.items()))


def _sources(program: Program, carried: Mapping[int, int]) -> dict[int, int]:
    """Value -> the carried argument that it is, or that it is of element by element."""
    values, arguments = program.values, program.body.inputs
    found = {arguments[k]: k for k in carried if values[arguments[k]].shape}
    for eqn in program.body.equations:
        if eqn.primitive == "slice" and isinstance(read := eqn.inputs[0], int):
            (made,) = eqn.outputs
            if read in found and values[read].shape[1:] == values[made].shape[1:]:
                found[made] = found[read]  # some of the layers
        if eqn.primitive not in POINTWISE or len(eqn.outputs) != 1:
            continue
        shape = values[eqn.outputs[0]].shape
        arrays = [
            a for a in eqn.inputs if isinstance(a, int) and values[a].shape == shape
        ]
        if len(arrays) == 1 and arrays[0] in found:
            found[eqn.outputs[0]] = found[arrays[0]]
    return found
