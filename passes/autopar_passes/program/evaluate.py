"""Runs a flat program as it is, without layouts."""

from __future__ import annotations

from typing import Any

from autopar_passes import jax_compat
from autopar_passes.program.equations import Program, Scalar


def evaluate(program: Program, *arguments: Any) -> list[Any]:
    """Runs the equations of a program that came from JAX one by one.

    Args:
      program: the flat program, whose equations are as JAX traced them.
      arguments: its flat arguments.
    """
    arrays = dict(
        zip(program.body.inputs, (*arguments, *program.constants), strict=True)
    )
    for eqn in program.body.equations:
        given = [a.value if isinstance(a, Scalar) else arrays[a] for a in eqn.inputs]
        with jax_compat.source_of(eqn.source):
            made = jax_compat.bind(eqn.source, *given)
        arrays.update(zip(eqn.outputs, made, strict=True))
    return [
        a.value if isinstance(a, Scalar) else arrays[a] for a in program.body.outputs
    ]
