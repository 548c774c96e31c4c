"""Writes the program of one row from the programs of two and of more rows.

JAX writes some operators in another way if a dimension has size one. It leaves the
dimension out of the indices of `jnp.take_along_axis`, for example, and broadcasts
where it would pass an array on. The program that is traced on one row can then not be
compared with the program of the whole batch. Programs of two and of more rows have the
same operators, and differ only in sizes. All sizes that grow with the rows are
multiples of the rows, so the sizes for one row are half of those for two rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar_passes import jax_compat
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    Value,
)

# Parameters that are sizes, or tuples of sizes.
_SIZES = frozenset(
    {
        "shape", "new_sizes", "sizes", "slice_sizes", "limit_indices", "start_indices",
        "operand_shape", "updates_shape", "length",
    }
)  # fmt: skip
# Parameters that hold bodies, which are regions of the flat program.
_BODIES = frozenset({"jaxpr", "cond_jaxpr", "body_jaxpr", "branches"})
# Two scalars count as equal if they differ by less than this fraction.
_EQUAL = 1e-6


class _Different(Exception):
    """The programs differ in more than sizes."""


def of_one_row(more: Program, two: Program, rows: int) -> Program | None:
    """Returns the program of one row; None if it does not follow from the others.

    Args:
      more: the program of ``rows`` rows.
      two: the program of two rows.
      rows: a number of rows, three at least.
    """
    if len(more.values) != len(two.values):
        return None
    writer = _Writer(more, two, rows)
    try:
        values = tuple(map(writer.value, more.values, two.values))
        body = writer.region(more.body, two.body)
        constants = tuple(map(writer.constant, more.constants, two.constants))
    except _Different:
        return None
    return Program(values, body, constants)


class _Writer:
    def __init__(self, more: Program, two: Program, rows: int) -> None:
        self.more, self.two, self.rows = more, two, rows

    def size(self, more: int, two: int) -> int:
        """Returns a size for one row."""
        if more == two:
            return two
        if two % 2 or more * 2 != two * self.rows:
            raise _Different
        return two // 2

    def sizes(self, more: Sequence[int], two: Sequence[int]) -> tuple[int, ...]:
        if len(more) != len(two):
            raise _Different
        return tuple(map(self.size, more, two))

    def value(self, more: Value, two: Value) -> Value:
        if more.dtype != two.dtype:
            raise _Different
        return dataclasses.replace(two, shape=self.sizes(more.shape, two.shape))

    def constant(self, more: Any, two: Any) -> Any:
        """Returns the first part of a constant with rows; other constants unchanged."""
        shape = self.sizes(np.shape(more), np.shape(two))
        if shape == np.shape(two):
            return two
        return two[tuple(slice(size) for size in shape)]

    def atom(self, more: Atom, two: Atom) -> Atom:
        """Returns an operand: a value, or a constant that may depend on the rows."""
        if not isinstance(more, Scalar) or not isinstance(two, Scalar):
            if more != two:
                raise _Different
            return two
        a, b = more.value, two.value
        if np.array_equal(a, b, equal_nan=np.asarray(b).dtype.kind in "fc"):
            return two
        if np.asarray(b).dtype.kind not in "iuf":
            raise _Different
        part = self.rows / 2
        for factor in (part, 1 / part):
            if abs(float(a) - factor * float(b)) <= _EQUAL * abs(float(a)):
                one = float(b) * (0.5 if factor == part else 2.0)
                return Scalar(np.asarray(one, two.aval.dtype)[()], two.aval)
        raise _Different

    def atoms(self, more: Sequence[Atom], two: Sequence[Atom]) -> tuple[Atom, ...]:
        if len(more) != len(two):
            raise _Different
        return tuple(map(self.atom, more, two))

    def region(self, more: Region, two: Region) -> Region:
        same = len(more.equations) == len(two.equations)
        if not same or more.inputs != two.inputs:
            raise _Different
        return Region(
            two.inputs,
            tuple(map(self.equation, more.equations, two.equations)),
            self.atoms(more.outputs, two.outputs),
        )

    def equation(self, more: Equation, two: Equation) -> Equation:
        if more.primitive != two.primitive or more.outputs != two.outputs:
            raise _Different
        if more.params.keys() != two.params.keys():
            raise _Different
        if len(more.regions) != len(two.regions):
            raise _Different
        params = {
            key: self.parameter(two, key, more.params[key], value)
            for key, value in two.params.items()
        }
        return dataclasses.replace(
            two,
            source=two.source.replace(params=params),
            inputs=self.atoms(more.inputs, two.inputs),
            regions=tuple(map(self.region, more.regions, two.regions)),
        )

    def parameter(self, eqn: Equation, key: str, more: Any, two: Any) -> Any:
        """Returns a parameter for one row."""
        if key in _SIZES:
            if isinstance(two, (tuple, list)) and isinstance(more, (tuple, list)):
                if all(isinstance(n, int) for n in (*more, *two)):
                    return self.sizes(more, two)
            elif isinstance(two, int) and isinstance(more, int):
                return self.size(more, two)
        if key in _BODIES and eqn.regions:
            return two
        if isinstance(two, jax_compat.Jaxpr):  # such as how a scatter adds up
            equal = str(more) == str(two)
        else:
            try:
                equal = more is two or bool(np.all(more == two))
            except (TypeError, ValueError):
                equal = False
        if not equal:
            raise _Different
        return two
