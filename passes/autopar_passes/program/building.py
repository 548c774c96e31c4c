"""Adds equations to a flat program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar_passes.program.equations import Atom, Equation, Program, Region, Value
from autopar_passes.program.flatten import flatten


class Builder:
    """Numbers new values and equations behind those of a program.

    Attributes:
      values: all values.
      equations: what was added, in order.
    """

    def __init__(self, values: Sequence[Value], next_index: int) -> None:
        """Has added nothing yet.

        Args:
          values: of the program.
          next_index: the first index that no equation has.
        """
        self.values = list(values)
        self.equations: list[Equation] = []
        self.next_index = next_index

    def value(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Adds a value."""
        self.values.append(Value(shape, dtype))
        return len(self.values) - 1

    def like(self, value: Value) -> int:
        """Adds a value of the shape, dtype and name of another one."""
        self.values.append(value)
        return len(self.values) - 1

    def index(self) -> int:
        """A new index of an equation."""
        self.next_index += 1
        return self.next_index - 1

    def call(
        self,
        function: Callable[..., Any],
        atoms: Sequence[int],
        stack: str = "",
        result: int | None = None,
    ) -> Atom:
        """Adds the equations of a function of arrays; returns its only result.

        Args:
          function: of arrays without constants of its own; returns an array.
          atoms: the values that it is called with.
          stack: the name stack of the equations.
          result: the value that it makes, which no equation made yet; None: a new one.
        """
        results = () if result is None else (result,)
        (found,) = self.calls(function, atoms, stack, results)
        return found

    def calls(
        self,
        function: Callable[..., Any],
        atoms: Sequence[int],
        stack: str = "",
        results: Sequence[int] = (),
    ) -> list[Any]:
        """`call`, for a function that returns one array or several."""
        made = [self.values[a] for a in atoms]
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in made]
        inner = flatten(jax.make_jaxpr(function)(*structs))
        return self.add(inner, atoms, stack, results)

    def add(
        self,
        inner: Program,
        atoms: Sequence[int],
        stack: str = "",
        results: Sequence[int] = (),
    ) -> list[Any]:
        """`calls`, for a function that is a flat program without constants."""
        assert not inner.constants
        numbers = dict(zip(inner.body.inputs, atoms, strict=True))
        named = dict(zip(inner.body.outputs, results, strict=False))
        for eqn in inner.body.equations:
            for value in eqn.outputs:
                of = inner.values[value]
                if value in named:
                    numbers[value] = named[value]
                else:
                    numbers[value] = self.value(of.shape, of.dtype)
            read = tuple(numbers[a] if isinstance(a, int) else a for a in eqn.inputs)
            outputs = tuple(numbers[v] for v in eqn.outputs)
            self.equations.append(
                Equation(self.index(), eqn.source, read, outputs, stack)
            )
        return [numbers[a] if isinstance(a, int) else a for a in inner.body.outputs]


def renumber_equation(
    eqn: Equation, value: Callable[[int], int], index: Callable[[int], int]
) -> Equation:
    """Returns an equation, with its regions, under other numbers.

    Args:
      eqn: the equation.
      value: old number of a value -> the new one.
      index: old index of an equation -> the new one.
    """

    def atoms(found: Sequence[Atom]) -> tuple[Atom, ...]:
        return tuple(value(a) if isinstance(a, int) else a for a in found)

    regions = tuple(
        Region(
            tuple(value(v) for v in region.inputs),
            tuple(renumber_equation(e, value, index) for e in region.equations),
            atoms(region.outputs),
        )
        for region in eqn.regions
    )
    outputs = tuple(value(v) for v in eqn.outputs)
    return Equation(
        index(eqn.index),
        eqn.source,
        atoms(eqn.inputs),
        outputs,
        eqn.name_stack,
        regions,
    )


def needed_equations(
    equations: Sequence[Equation], values: Sequence[int]
) -> tuple[Equation, ...]:
    """The equations that some values are made by, in their order."""
    wanted = set(values)
    kept: list[Equation] = []
    for eqn in reversed(equations):
        if not wanted.isdisjoint(eqn.outputs):
            kept.append(eqn)
            wanted.update(a for a in eqn.inputs if isinstance(a, int))
    return tuple(reversed(kept))


def next_index(program: Program) -> int:
    """The first index that no equation of a program has."""
    return 1 + max(program.by_index(), default=-1)
