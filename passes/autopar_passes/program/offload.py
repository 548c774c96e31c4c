"""Moves state of a step to host memory.

The program takes the state from host memory, copies it to device memory where it is
read first, and copies its next value back where that value is computed. A step that a
user writes with ``jax.device_put`` and `jax.memory.Space` gives the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from autopar_passes.program.equations import Equation, Program, Region, Value
from autopar_passes.program.flatten import Builder, next_index, renumber_equation


def offload_state(program: Program, carried: Mapping[int, int]) -> Program:
    """Returns a program that keeps state in host memory between steps.

    Args:
      program: the step.
      carried: flat argument to move to the host -> the flat output that is its value in
        the next step.
    """
    builder = Builder(program.values, next_index(program))
    body = program.body
    fetched: dict[int, int] = {}
    stored = {
        body.outputs[k]: builder.like(_on_host(program.values[body.inputs[a]]))
        for a, k in carried.items()
        if body.outputs[k] != body.inputs[a]
    }
    for argument in carried:
        value = body.inputs[argument]
        builder.values[value] = _on_host(program.values[value])
    hosted = {body.inputs[a]: program.values[body.inputs[a]] for a in carried}

    def number(value: int) -> int:
        if value not in hosted:
            return value
        if value not in fetched:
            fetched[value] = builder.like(hosted[value])
            builder.equations.append(_copy(builder, value, fetched[value]))
        return fetched[value]

    for eqn in body.equations:
        new = renumber_equation(eqn, number, lambda index: index)
        builder.equations.append(new)
        for value in eqn.outputs:
            if value in stored:
                builder.equations.append(_copy(builder, value, stored[value]))
    ends = {k: stored.get(body.outputs[k], body.outputs[k]) for k in carried.values()}
    outputs = tuple(ends.get(k, a) for k, a in enumerate(body.outputs))
    region = Region(body.inputs, tuple(builder.equations), outputs)
    return Program(tuple(builder.values), region, program.constants)


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
