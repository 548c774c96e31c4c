"""Moves state of a step to host memory.

The program takes the state from host memory, copies it to device memory where it is
read, and copies its next value back where that value is computed. A step that a user
writes with ``jax.device_put`` and `jax.memory.Space` gives the same program.

An array is copied again after the next product, kernel or loop, so that device memory
holds a copy only while operators beside each other read it. A loop that takes one slice
of an array in each iteration copies that slice only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar_passes.program.equal_leaves import ELEMENTWISE
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Value,
    reads,
)
from autopar_passes.program.flatten import (
    Builder,
    next_index,
    renumber_atoms,
    renumber_equation,
)


def offload_state(program: Program, carried: Mapping[int, int]) -> Program:
    """Returns a program that keeps state in host memory between steps.

    Args:
      program: the step.
      carried: flat argument to move to the host -> the flat output that is its value in
        the next step.
    """
    builder = Builder(program.values, next_index(program))
    body = program.body
    stored = {
        body.outputs[k]: builder.like(_on_host(program.values[body.inputs[a]]))
        for a, k in carried.items()
        if body.outputs[k] != body.inputs[a]
    }
    made = _Fetches(builder, [body.inputs[a] for a in carried]).equations(body)
    equations: list[Equation] = []
    for eqn in made:
        equations.append(eqn)
        for value in eqn.outputs:
            if value in stored:
                equations.append(_copy(builder, value, stored[value]))
    ends = {k: stored.get(body.outputs[k], body.outputs[k]) for k in carried.values()}
    outputs = tuple(ends.get(k, a) for k, a in enumerate(body.outputs))
    region = Region(body.inputs, tuple(equations), outputs)
    return Program(tuple(builder.values), region, program.constants)


class _Fetches:
    """Copies arrays of host memory to device memory where a region reads them."""

    def __init__(self, builder: Builder, hosted: Sequence[int]) -> None:
        """Moves inputs of a region to host memory.

        Args:
          builder: holds the values of the program.
          hosted: the inputs.
        """
        self.builder = builder
        self.hosted = {v: builder.values[v] for v in hosted}
        # Host array -> its copy, and the number of long operators before the copy.
        self.fetched: dict[int, tuple[int, int]] = {}
        self.added: list[Equation] = []
        self.passed = 0
        for value in hosted:
            builder.values[value] = _on_host(builder.values[value])

    def equations(self, region: Region) -> list[Equation]:
        """The region's equations, which read copies, and the equations that copy."""
        found: list[Equation] = []
        for eqn in region.equations:
            new = self._reading_copies(eqn)
            found += [*self.added, new]
            self.added = []
            if _is_long(eqn):
                self.passed += 1
        return found

    def _reading_copies(self, eqn: Equation) -> Equation:
        begin = len(eqn.inputs) - _sliced(eqn)
        whole = {a for a in eqn.inputs[:begin] if isinstance(a, int)}
        inner = {
            v for region in eqn.regions for e in region.equations for v in reads(e)
        }
        # An array of which an equation reads more than slices is copied as a whole.
        slots = [
            k
            for k in range(begin, len(eqn.inputs))
            if isinstance(a := eqn.inputs[k], int) and a in self.hosted
            if a not in whole and a not in inner
        ]
        kept = {eqn.inputs[k] for k in slots}
        new = renumber_equation(eqn, lambda v: v if v in kept else self._number(v))
        if not slots:
            return new
        (body,) = new.regions
        fetches = _Fetches(self.builder, [body.inputs[k] for k in slots])
        body = Region(body.inputs, *fetches.ends(body))
        return dataclasses.replace(new, regions=(body,))

    def ends(self, region: Region) -> tuple[tuple[Equation, ...], tuple[Atom, ...]]:
        """The region's equations, and its outputs, which are in device memory."""
        found = self.equations(region)
        outputs = renumber_atoms(region.outputs, self._number)
        return (*found, *self.added), outputs

    def _number(self, value: int) -> int:
        if value not in self.hosted:
            return value
        copy, passed = self.fetched.get(value, (-1, -1))
        if passed != self.passed:
            copy = self.builder.like(self.hosted[value])
            self.added.append(_copy(self.builder, value, copy))
            self.fetched[value] = copy, self.passed
        return copy


def _sliced(eqn: Equation) -> int:
    """The number of the last operands of which a loop takes one slice at a time."""
    if eqn.primitive != "scan":
        return 0
    return len(eqn.inputs) - eqn.params["num_consts"] - eqn.params["num_carry"]


def _is_long(eqn: Equation) -> bool:
    """Whether an equation may take as long as the copy of an array."""
    return eqn.primitive not in ELEMENTWISE | _SHORT


_SHORT = frozenset(
    {
        "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy",
        "slice", "concatenate", "pad", "iota", "optimization_barrier", "device_put",
        "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or",
    }
)  # fmt: skip


def _on_host(value: Value) -> Value:
    return dataclasses.replace(value, on_host=True)


def _copy(builder: Builder, source: int, target: int) -> Equation:
    """The equation that copies an array between the memories of host and devices."""
    value = builder.values[source]
    host = builder.values[target].on_host
    space = jax.memory.Space.Host if host else jax.memory.Space.Device
    struct = jax.ShapeDtypeStruct(value.shape, value.dtype)

    def put(array: Any) -> Any:
        return jax.device_put(array, space)

    (eqn,) = jax.make_jaxpr(put)(struct).jaxpr.eqns
    return Equation(builder.index(), eqn, (source,), (target,), "")
