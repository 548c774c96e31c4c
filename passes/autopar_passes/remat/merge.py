"""Drops ``jax.checkpoint``: what the backward pass repeats is merged with the first.

A step is traced without the barriers that keep its checkpoints. An equation that they
repeat is then the same as an earlier one of the forward pass, which is read instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from autopar_passes import jax_compat
from autopar_passes.graph.operators import PRODUCTS
from autopar_passes.graph.roles import REPEATED
from autopar_passes.program.building import renumber_equation
from autopar_passes.program.calls import StepCall
from autopar_passes.program.equations import Equation, Program, Region, walk
from autopar_passes.program.trace import TracedStep, trace_call
from autopar_passes.remat.levels import RematError
from autopar_passes.rules.book import signature


def trace_without_checkpoints(step: Callable[..., Any], call: StepCall) -> TracedStep:
    """Traces a step as if it had no ``jax.checkpoint``.

    Args:
      step: the step.
      call: a call of it.

    Raises:
      TraceError: JAX cannot trace the step.
      RematError: a checkpoint cannot be dropped, with the place.
    """
    traced = trace_call(step, call, checkpoints=False)
    return replace(traced, program=merge_repeats(traced.program))


def merge_repeats(program: Program) -> Program:
    """Returns the program in which nothing is repeated that is there already.

    Args:
      program: traced without the barriers of its checkpoints.

    Raises:
      RematError: a product or a loop is repeated that the forward pass has not.
    """
    first: dict[Any, Equation] = {}
    # Value -> the one that is read instead, and -> the first one that is equal.
    instead: dict[int, int] = {}
    equal: dict[int, int] = {}
    out: list[Equation] = []
    for given in program.body.equations:
        eqn = renumber_equation(given, lambda v: instead.get(v, v), lambda index: index)
        key = (signature(eqn, program.values), _read(eqn, equal))
        known = (
            None if eqn.regions or eqn.source.effects else first.setdefault(key, eqn)
        )
        if known is None or known is eqn:
            out.append(eqn)
            continue
        same = dict(zip(eqn.outputs, known.outputs, strict=True))
        equal.update(same)
        if _repeats(eqn):
            instead.update(same)
        else:
            out.append(eqn)
    _check_dropped(out)
    outputs = tuple(
        instead.get(a, a) if isinstance(a, int) else a for a in program.body.outputs
    )
    return replace(program, body=Region(program.body.inputs, tuple(out), outputs))


def _read(eqn: Equation, equal: Mapping[int, int]) -> tuple[int | None, ...]:
    """The values among the operands; the signature has the scalars."""
    return tuple(equal.get(a, a) if isinstance(a, int) else None for a in eqn.inputs)


def _repeats(eqn: Equation) -> bool:
    return REPEATED in eqn.name_stack.split("/")


def _check_dropped(equations: Iterable[Equation]) -> None:
    """Raises `RematError` where work is left that a checkpoint repeats."""
    for eqn in equations:
        for one in (eqn, *(e for r in eqn.regions for e in walk(r))):
            if _repeats(one) and (one.primitive in PRODUCTS or one.regions):
                raise RematError(
                    "a jax.checkpoint cannot be dropped: what it repeats at "
                    f"{jax_compat.source_line(one.source)} is within a loop, or "
                    "differs from the forward pass. Take it out of the step."
                )
