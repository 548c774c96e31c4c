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
from collections.abc import Callable, Collection, Sequence

from autopar_passes.graph.operators import OperatorGraph, update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.program.building import next_index, renumbered
from autopar_passes.program.equations import Equation, Program, Region, Value, walk
from autopar_passes.program.flatten import barrier_equation
from autopar_passes.remat.owners import crossing, owners
from autopar_passes.stages.flow import Flow, reads

FULL, DOTS = "full", "dots"
# What may be kept of a layer that is computed again.
LEVELS = (FULL, DOTS)
# JAX's name for the part of a backward pass that repeats a forward pass.
_STACK = "transpose(rematted_computation)"


class RematError(ValueError):
    """The layers of a program cannot be computed again as is asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """Which layers of a program the backward pass computes again, and what it keeps.

    Attributes:
      starts: the forward equation at which each layer begins, ascending
        (`autopar_passes.stages.layers.cluster_layers`).
      layers: numbers of the layers whose activations are computed again.
      level: ``full`` keeps nothing of such a layer but what other layers read; ``dots``
        also keeps the results of convolutions, and of matrix products without batch
        dimensions, as ``jax.checkpoint_policies.dots_with_no_batch_dims_saveable``
        does.
    """

    starts: tuple[int, ...]
    layers: tuple[int, ...]
    level: str = FULL


def recomputed(
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
        different top-level equations.
    """
    flow = Flow(program, graph, frozenset(batch), update_equations(program, graph))
    _check(flow, wanted)
    return _Rewriter(flow, wanted).run()


def _check(flow: Flow, wanted: Recomputation) -> None:
    starts = list(wanted.starts)
    if wanted.level not in LEVELS:
        raise RematError(f"level '{wanted.level}': there are {' and '.join(LEVELS)}.")
    known = [k for k in flow.equations if k in set(starts)]
    if starts != known:
        raise RematError(
            "layers must begin at different top-level equations, in their order; got "
            f"{starts[:8]}."
        )
    if missing := [k for k in wanted.layers if not 0 <= k < len(starts)]:
        raise RematError(f"layer {missing[0]}: there are {len(starts)} layers, from 0.")


@dataclasses.dataclass(frozen=True, slots=True)
class _Again:
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
        self.values = list(flow.program.values)
        self.next_index = next_index(flow.program)

    def run(self) -> Program:
        found = {k: self.again(k) for k in sorted(set(self.wanted.layers))}
        before: dict[int, list[_Again]] = {}
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
        return Program(tuple(self.values), region, self.flow.program.constants)

    def backward(self, eqn: Equation) -> bool:
        return self.flow.roles[eqn.index] is Role.BACKWARD

    def kept(self, value: int) -> bool:
        """Whether the backward pass reads a value as the forward pass has made it."""
        maker = self.flow.maker.get(value, -1)
        if self.owner.get(maker) not in self.wanted.layers:
            return True
        if value in self.crossing or self.flow.small(value):
            return True
        return self.wanted.level == DOTS and is_product(self.flow.equations[maker])

    def again(self, layer: int) -> _Again | None:
        """What is computed again of a layer; None: its backward pass needs nothing."""
        made = {
            v
            for index, own in self.owner.items()
            if own == layer
            for v in self.flow.equations[index].outputs
            if not self.kept(v)
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
        needed = {
            v
            for eqn in users
            for v in reads(eqn)
            if v in made and self.made_at(v) < place
        }
        equations, given = self.needed(needed, place)
        return _Again(
            place, frozenset(needed), equations, given, self.gates(users, place)
        )

    def made_at(self, value: int) -> int:
        """Position of the equation that makes a value; -1 for inputs."""
        return self.position.get(self.flow.maker.get(value, -1), -1)

    def needed(
        self, values: Collection[int], place: int
    ) -> tuple[tuple[Equation, ...], tuple[int, ...]]:
        """The equations that make values, and the kept values that they start from."""
        wanted, given = set(values), dict[int, None]()
        found: list[Equation] = []
        for eqn in reversed(self.order[:place]):
            if wanted.isdisjoint(eqn.outputs):
                continue
            found.append(eqn)
            for value in reads(eqn):
                if self.kept(value):
                    given[value] = None
                else:
                    wanted.add(value)
        return tuple(reversed(found)), tuple(sorted(given))

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

    def copies(self, one: _Again, renamed: dict[int, int]) -> list[Equation]:
        """The barrier and the equations behind it.

        Args:
          one: what is computed again.
          renamed: value -> what later backward equations read instead; grows.
        """
        through = [*one.given, *(v for v in one.gates if v not in one.given)]
        actual = [renamed.get(v, v) if v in one.gates else v for v in through]
        inside = {v: self.new(self.values[v]) for v in through}
        barrier = Equation(
            self.index(),
            barrier_equation([self.values[v] for v in through]),
            tuple(actual),
            tuple(inside.values()),
            self.order[one.place].name_stack,
        )
        copy = self.numbering(one.equations, inside)
        made = [
            _named(renumbered(eqn, copy, lambda _: self.index()))
            for eqn in one.equations
        ]
        renamed.update({v: copy(v) for v in one.values})
        renamed.update({v: inside[v] for v in one.gates})
        return [barrier, *made]

    def numbering(
        self, equations: Sequence[Equation], known: dict[int, int]
    ) -> Callable[[int], int]:
        """The number of each value's copy: a known one, or a new one."""
        numbers = dict(known)
        for eqn in equations:
            for value in _made(eqn):
                numbers[value] = self.new(self.values[value])
        return lambda value: numbers.get(value, value)

    def new(self, like: Value) -> int:
        self.values.append(like)
        return len(self.values) - 1

    def index(self) -> int:
        self.next_index += 1
        return self.next_index - 1

    def reading(self, eqn: Equation, renamed: dict[int, int]) -> Equation:
        """An equation; of the backward pass, it reads what is computed again."""
        if not self.backward(eqn) or renamed.keys().isdisjoint(reads(eqn)):
            return eqn
        return renumbered(eqn, lambda v: renamed.get(v, v), lambda index: index)


def _made(eqn: Equation) -> list[int]:
    """The values that an equation makes, also within its regions."""
    found = list(eqn.outputs)
    for region in eqn.regions:
        found.extend(region.inputs)
        found.extend(v for inner in walk(region) for v in inner.outputs)
        found.extend(
            v for inner in walk(region) for deep in inner.regions for v in deep.inputs
        )
    return found


def _named(eqn: Equation) -> Equation:
    """A copy under the name that JAX gives to what a backward pass computes again."""
    stack = f"{eqn.name_stack}/{_STACK}" if eqn.name_stack else _STACK
    regions = tuple(
        dataclasses.replace(r, equations=tuple(_named(e) for e in r.equations))
        for r in eqn.regions
    )
    return dataclasses.replace(eqn, name_stack=stack, regions=regions)


def is_product(eqn: Equation) -> bool:
    """Whether ``dots`` keeps the results of an equation."""
    if eqn.primitive == "dot_general":
        _, (left, right) = eqn.params["dimension_numbers"]
        return not left and not right
    return eqn.primitive in ("conv_general_dilated", "ragged_dot_general")
