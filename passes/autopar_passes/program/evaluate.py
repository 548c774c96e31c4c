"""Runs a flat program as it is, without layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar_passes import jax_compat
from autopar_passes.program.equations import Atom, Equation, Program, Region, Scalar


def evaluate(program: Program, *arguments: Any) -> list[Any]:
    """Runs the equations of a program one by one.

    Args:
      program: the flat program.
      arguments: its flat arguments.
    """
    return _region(program.body, (*arguments, *program.constants), {})


def _region(region: Region, given: Sequence[Any], outer: Mapping[int, Any]) -> Any:
    arrays = {**outer, **dict(zip(region.inputs, given, strict=True))}
    for eqn in region.equations:
        with jax_compat.source_of(eqn.source):
            made = _equation(eqn, arrays)
        arrays.update(zip(eqn.outputs, made, strict=True))
    return [_read(arrays, a) for a in region.outputs]


def _read(arrays: Mapping[int, Any], atom: Atom) -> Any:
    return atom.value if isinstance(atom, Scalar) else arrays[atom]


def _equation(eqn: Equation, arrays: Mapping[int, Any]) -> Sequence[Any]:
    given = [_read(arrays, a) for a in eqn.inputs]
    if eqn.primitive != "scan":
        return jax_compat.bind(eqn.source, *given)
    params, (body,) = eqn.params, eqn.regions
    consts, carry = params["num_consts"], params["num_carry"]

    def step(carried: Any, sliced: Any) -> Any:
        made = _region(body, (*given[:consts], *carried, *sliced), arrays)
        ends = [
            jax.numpy.asarray(x, like.dtype)
            for x, like in zip(made[:carry], carried, strict=True)
        ]
        return ends, made[carry:]

    first = [jax.numpy.asarray(x) for x in given[consts : consts + carry]]
    ends, stacked = jax.lax.scan(
        step,
        first,
        given[consts + carry :],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*ends, *stacked]
