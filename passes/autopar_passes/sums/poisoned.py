"""Finds the results of a step that a NaN or infinity in a gradient can reach.

All other results depend on gradients at most through a comparison.

A NaN or an infinity passes through arithmetic. It does not pass through a comparison or
through ``is_finite``, which return a boolean. A step may use such a boolean, for
example to halve its loss scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator

import jax.numpy as jnp

from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Atom, Equation, Program, walk

# Two lists of atoms and of values: if any of the atoms depends on a gradient, all of
# the values do.
Link = tuple[Iterable[Atom], Iterable[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Poisoned:
    """The effect of a non-finite gradient on carried state.

    Attributes:
      results: flat outputs that non-finite gradients can make non-finite.
      guarded: whether the step itself checks its gradients. A step does so if another
        carried output, such as a loss scale, depends on a comparison of gradients.
    """

    results: frozenset[int]
    guarded: bool


def find_poisoned(
    program: Program,
    graph: OperatorGraph,
    gradients: Collection[int],
    carried: Collection[int],
) -> Poisoned:
    """Follows the gradients of a step to its results.

    All floating-point results of the backward pass count as gradients, too.

    Args:
      program: the flat step.
      graph: the operator graph of the step.
      gradients: further values that are gradients.
      carried: the flat outputs that are the next step's arguments.
    """
    equations = walk(program.body)
    starts = {*gradients, *_backward(program, graph, equations)}

    def keeps(value: int) -> bool:
        return program.values[value].dtype != jnp.bool_

    spoilt = _reachable(equations, starts, keeps)
    decided = _reachable(equations, starts, lambda _: True)
    made = {k: v for k, v in enumerate(program.body.outputs) if isinstance(v, int)}
    results = frozenset(k for k, v in made.items() if v in spoilt)
    depend = {k for k, v in made.items() if v in decided}
    return Poisoned(results, bool(depend & set(carried) - results))


def _backward(
    program: Program, graph: OperatorGraph, equations: Iterable[Equation]
) -> Iterator[int]:
    """Yields the floating-point values that the backward pass computes."""
    backward = {op.equation for op in graph.operators if op.role is Role.BACKWARD}
    for eqn in equations:
        if eqn.index in backward:
            yield from (v for v in eqn.outputs if program.values[v].floating)


def _reachable(
    equations: Iterable[Equation], starts: set[int], keeps: Callable[[int], bool]
) -> set[int]:
    """Returns the values that depend on ``starts``, through values with ``keeps`` true.

    A loop's body may come before values that its next iteration reads, so the search
    needs several rounds.
    """
    links = [(list(a), list(b)) for eqn in equations for a, b in _links(eqn)]
    marked = set(starts)
    before = -1
    while len(marked) != before:
        before = len(marked)
        for sources, targets in links:
            if any(a in marked for a in sources if isinstance(a, int)):
                marked.update(v for v in targets if keeps(v))
    return marked


def _links(eqn: Equation) -> Iterator[Link]:
    """Yields the dependencies within an equation."""
    match eqn.primitive:
        case "scan":
            yield from _scan_links(eqn)
        case "while":
            yield from _while_links(eqn)
        case "cond":
            yield from _cond_links(eqn)
        case "optimization_barrier":
            yield from _pairs(eqn.inputs, eqn.outputs)
        case _:
            yield eqn.inputs, eqn.outputs


def _pairs(atoms: Iterable[Atom], values: Iterable[int]) -> Iterator[Link]:
    for atom, value in zip(atoms, values, strict=True):
        yield (atom,), (value,)


def _scan_links(eqn: Equation) -> Iterator[Link]:
    (body,) = eqn.regions
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    yield from _pairs(eqn.inputs, body.inputs)
    yield from _pairs(body.outputs[:carry], body.inputs[consts : consts + carry])
    yield from _pairs(body.outputs, eqn.outputs)
    # A loop that runs no iteration returns its initial values.
    yield from _pairs(eqn.inputs[consts : consts + carry], eqn.outputs[:carry])


def _while_links(eqn: Equation) -> Iterator[Link]:
    cond, body = eqn.regions
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = eqn.inputs[n_cond + n_body :]
    yield from _pairs(eqn.inputs[:n_cond], cond.inputs[:n_cond])
    yield from _pairs(eqn.inputs[n_cond:], body.inputs)
    for source in (first, body.outputs):
        yield from _pairs(source, cond.inputs[n_cond:])
        yield from _pairs(source, body.inputs[n_body:])
        yield from _pairs(source, eqn.outputs)
    # The condition determines the number of iterations, and thus all results.
    yield cond.outputs, eqn.outputs


def _cond_links(eqn: Equation) -> Iterator[Link]:
    index, *given = eqn.inputs
    for region in eqn.regions:
        yield from _pairs(given, region.inputs)
        yield from _pairs(region.outputs, eqn.outputs)
    yield (index,), eqn.outputs
