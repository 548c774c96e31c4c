"""Rewrites a step so that its backward pass recomputes activations.

The backward pass of a chosen layer reads copies of the layer's values. The copies are
computed from the layer's inputs, behind an optimization barrier, as in
``jax.checkpoint``. Without the barrier the compiler would merge the copies with the
forward pass. A gradient that enters the backward pass of the layer also passes through
the barrier. The recomputation therefore cannot start before it is needed.

The forward pass is unchanged, including its side effects, its auxiliary results and its
new state. Random numbers are drawn again from the same keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from autopar_passes.graph.operators import OperatorGraph, update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Equation, Program, Region
from autopar_passes.program.flatten import (
    barrier_equation,
    next_index,
    renumber_equation,
)
from autopar_passes.remat.copies import (
    FULL,
    Numbers,
    RematError,
    check_level,
    crossing,
    keeps,
    names_of,
    needed_equations,
    owners,
)
from autopar_passes.remat.loops import iterations, recomputed_in_loops
from autopar_passes.stages.flow import Flow, reads


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """The layers that the backward pass recomputes, and the values that it keeps.

    Attributes:
      starts: the forward equation at which each layer begins, ascending
        (`autopar_passes.stages.layers.cluster_layers`). If each iteration of a forward
        loop is a layer, the loop's index is repeated for each iteration.
      layers: numbers of the layers whose activations are recomputed.
      level: ``full`` keeps only those values of such a layer that other layers read.
        ``dots`` also keeps the results of convolutions, and of matrix products without
        batch dimensions, as
        ``jax.checkpoint_policies.dots_with_no_batch_dims_saveable`` does. ``names=a,b``
        keeps the values that the step names by `jax.ad_checkpoint.checkpoint_name`.
    """

    starts: tuple[int, ...]
    layers: tuple[int, ...]
    level: str = FULL


def recompute_layers(
    program: Program,
    graph: OperatorGraph,
    wanted: Recomputation,
    batch: Collection[int],
) -> Program:
    """Returns the program in which chosen layers recompute their activations.

    Values and equations of the program keep their numbers; new ones get higher numbers.

    Args:
      program: a differentiated step, of the whole batch or of one microbatch.
      graph: the operator graph of the program.
      wanted: the layers to recompute.
      batch: the input values that hold the batch.

    Raises:
      RematError: there is no such layer or level, or the starts are not different
        top-level equations, or a loop cannot be rewritten.
    """
    flow = Flow(program, graph, frozenset(batch), update_equations(program, graph))
    _check(flow, wanted)
    if len(set(wanted.starts)) < len(wanted.starts):
        loops = iterations(program, wanted.starts, wanted.layers)
        backward = {k for k, role in flow.roles.items() if role is Role.BACKWARD}
        return recomputed_in_loops(program, loops, backward, wanted.level)
    return _Rewriter(flow, wanted).run()


def _check(flow: Flow, wanted: Recomputation) -> None:
    check_level(flow.program, wanted.level)
    starts = list(wanted.starts)
    if starts != [k for k in flow.equations for _ in range(starts.count(k))]:
        raise RematError(
            "layers must begin at different top-level equations, in their order; got "
            f"{starts[:8]}."
        )
    if missing := [k for k in wanted.layers if not 0 <= k < len(starts)]:
        raise RematError(f"layer {missing[0]}: there are {len(starts)} layers, from 0.")


@dataclasses.dataclass(frozen=True, slots=True)
class _LayerAgain:
    """The recomputation of one layer.

    Attributes:
      place: the position in the program where the recomputation is inserted: that of
          the first backward equation that reads a recomputed value.
      values: the recomputed values that are read.
      equations: the equations that compute them, in order.
      given: the values that these equations read.
      gates: incoming gradients that must be computed before the recomputation starts.
    """

    place: int
    values: frozenset[int]
    equations: tuple[Equation, ...]
    given: tuple[int, ...]
    gates: tuple[int, ...]


class _Rewriter:
    def __init__(self, flow: Flow, wanted: Recomputation) -> None:
        self.flow = flow
        self.wanted = wanted
        self.order = tuple(flow.equations.values())
        self.position = {eqn.index: k for k, eqn in enumerate(self.order)}
        self.owner = owners(flow, wanted.starts)
        self.crossing = crossing(flow, self.owner)
        self.numbers = Numbers(flow.program, next_index(flow.program))
        self.names = names_of(wanted.level)

    def run(self) -> Program:
        found = {k: self.again(k) for k in sorted(set(self.wanted.layers))}
        before: dict[int, list[_LayerAgain]] = {}
        for one in found.values():
            if one is not None:
                before.setdefault(one.place, []).append(one)
        renamed: dict[int, int] = {}
        out: list[Equation] = []
        for place, eqn in enumerate(self.order):
            for one in before.get(place, ()):
                out.extend(self.copies(one, renamed))
            out.append(self.reading(eqn, renamed))
        body = self.flow.program.body
        region = Region(body.inputs, tuple(out), body.outputs)
        return Program(tuple(self.numbers.values), region, self.flow.program.constants)

    def backward(self, eqn: Equation) -> bool:
        return self.flow.roles[eqn.index] is Role.BACKWARD

    def keeps_value(self, value: int) -> bool:
        """Whether the backward pass reads the forward pass's own result for a value."""
        maker = self.flow.maker.get(value, -1)
        if self.owner.get(maker) not in self.wanted.layers:
            return True
        if value in self.crossing or self.flow.small(value):
            return True
        eqn, name = self.flow.equations[maker], self.flow.value(value).name
        return keeps(self.wanted.level, eqn, name, self.names)

    def again(self, layer: int) -> _LayerAgain | None:
        """The recomputation of a layer; None if its backward pass needs none."""
        made = {
            v
            for index, own in self.owner.items()
            if own == layer
            for v in self.flow.equations[index].outputs
            if not self.keeps_value(v)
        }
        users = [
            eqn
            for eqn in self.order
            if self.backward(eqn) and not made.isdisjoint(reads(eqn))
        ]
        if not users:
            return None
        place = self.position[users[0].index]
        # Values of a second forward pass, later in the program, are not available at
        # this place.
        wanted = {
            v
            for eqn in users
            for v in reads(eqn)
            if v in made and self.made_at(v) < place
        }
        equations, given = needed_equations(
            self.order[:place], wanted, self.keeps_value
        )
        return _LayerAgain(
            place, frozenset(wanted), equations, given, self.gates(users, place)
        )

    def made_at(self, value: int) -> int:
        """Position of the equation that makes a value; -1 for inputs."""
        return self.position.get(self.flow.maker.get(value, -1), -1)

    def gates(self, users: Sequence[Equation], place: int) -> tuple[int, ...]:
        """The incoming gradients that a recomputation waits for.

        These are gradients made before ``place``: those that the first of ``users``
        with any such operand reads.

        Args:
          users: equations of the backward pass that read a recomputed value, in order.
          place: a position in the program.
        """
        for eqn in users:
            found = [
                v
                for v in reads(eqn)
                if (maker := self.flow.maker.get(v)) is not None
                and self.backward(self.flow.equations[maker])
                and self.made_at(v) < place
            ]
            if found:
                return tuple(dict.fromkeys(found))
        return ()

    def copies(self, one: _LayerAgain, renamed: dict[int, int]) -> list[Equation]:
        """Returns the barrier and the copied equations after the barrier.

        Args:
          one: the recomputation of one layer.
          renamed: value -> the value that later backward equations read instead;
            extended by this call.
        """
        through = [*one.given, *(v for v in one.gates if v not in one.given)]
        actual = [renamed.get(v, v) if v in one.gates else v for v in through]
        types = [self.flow.value(v) for v in through]
        inside = {v: self.numbers.new(t) for v, t in zip(through, types, strict=True)}
        barrier = Equation(
            self.numbers.index(),
            barrier_equation(types),
            tuple(actual),
            tuple(inside.values()),
            self.order[one.place].name_stack,
        )
        made, copy = self.numbers.copies(one.equations, inside)
        renamed.update({v: copy(v) for v in one.values})
        renamed.update({v: inside[v] for v in one.gates})
        return [barrier, *made]

    def reading(self, eqn: Equation, renamed: dict[int, int]) -> Equation:
        """Returns an equation; in the backward pass it reads the recomputed values."""
        if not self.backward(eqn) or renamed.keys().isdisjoint(reads(eqn)):
            return eqn
        return renumber_equation(eqn, lambda v: renamed.get(v, v), lambda index: index)
