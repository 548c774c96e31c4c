"""Rewrites a step so that its backward pass computes activations again.

The backward pass of a chosen layer reads copies of the layer's values. They are
computed from what the layer was given, behind an optimization barrier, as the values of
``jax.checkpoint`` are: without it the compiler would merge the copies with the forward
pass. The barrier also holds a cotangent that enters the backward pass of the layer, so
that nothing is computed again before it is needed.

The forward pass stays as it is, with its effects, auxiliary results and the state that
it makes. Random numbers are drawn again from the same keys.
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
    """Which layers of a program the backward pass computes again, and what it keeps.

    Attributes:
      starts: the forward equation at which each layer begins, ascending
        (`autopar_passes.stages.layers.cluster_layers`); a loop of the forward pass, as
        often as it has iterations, where each of these is a layer.
      layers: numbers of the layers whose activations are computed again.
      level: ``full`` keeps nothing of such a layer but what other layers read; ``dots``
        also keeps the results of convolutions, and of matrix products without batch
        dimensions, as ``jax.checkpoint_policies.dots_with_no_batch_dims_saveable``
        does; ``names=a,b`` keeps the values that the step calls so by
        `jax.ad_checkpoint.checkpoint_name`.
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
    """Returns the program in which chosen layers compute their activations again.

    Values and equations of the program keep their numbers; new ones follow them.

    Args:
      program: a differentiated step, of the whole batch or of one microbatch.
      graph: its operator graph.
      wanted: what is computed again.
      batch: the input values that hold the batch.

    Raises:
      RematError: there is no such layer or level, or the starts are not those of
        different top-level equations, or a loop cannot be rewritten.
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
    """What is computed again of one layer.

    Attributes:
      place: position of the first backward equation that reads any of it.
      values: what is read of it.
      equations: those that make it, in their order.
      given: the values that they start from.
      gates: cotangents that must be there before.
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
        """Whether the backward pass reads a value as the forward pass has made it."""
        maker = self.flow.maker.get(value, -1)
        if self.owner.get(maker) not in self.wanted.layers:
            return True
        if value in self.crossing or self.flow.small(value):
            return True
        eqn, name = self.flow.equations[maker], self.flow.value(value).name
        return keeps(self.wanted.level, eqn, name, self.names)

    def again(self, layer: int) -> _LayerAgain | None:
        """What is computed again of a layer; None: its backward pass needs nothing."""
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
        # A second forward pass may come later: what it makes is not there yet.
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
        """Cotangents that the first equation reads which reads any beside the layer."""
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
        """The barrier and the equations behind it.

        Args:
          one: what is computed again.
          renamed: value -> what later backward equations read instead; grows.
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
        """An equation; of the backward pass, it reads what is computed again."""
        if not self.backward(eqn) or renamed.keys().isdisjoint(reads(eqn)):
            return eqn
        return renumber_equation(eqn, lambda v: renamed.get(v, v), lambda index: index)
