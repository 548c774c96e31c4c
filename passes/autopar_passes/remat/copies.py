"""Copies equations that recompute a forward pass, and removes ``jax.checkpoint``.

The module also defines the levels of recomputation: which values of a recomputed layer
are kept.

To remove ``jax.checkpoint``, a step is traced without the optimization barriers of its
checkpoints. An equation that a checkpoint repeats is then equal to an earlier equation
of the forward pass, and the readers of the repeated result read the earlier result
instead.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.graph.operators import PRODUCTS
from autopar_passes.graph.roles import REPEATED, Role
from autopar_passes.program.calls import StepCall
from autopar_passes.program.equations import (
    Equation,
    Program,
    Region,
    Scalar,
    Value,
    needed_equations,
    reads,
    walk,
)
from autopar_passes.program.flatten import (
    Builder,
    made_values,
    renumber_atoms,
    renumber_equation,
)
from autopar_passes.program.trace import TracedStep, trace_call
from autopar_passes.rules.book import signature
from autopar_passes.rules.kernels import is_attention, is_kernel
from autopar_passes.stages.parts import Flow

# JAX's name for the part of a backward pass that recomputes a forward pass.
_STACK = "transpose(rematted_computation)"


def recomputed_equations(
    equations: Sequence[Equation],
    values: Iterable[int],
    kept: Callable[[int], bool],
) -> tuple[tuple[Equation, ...], tuple[int, ...]]:
    """The equations that compute given values, and the kept values that they read.

    Args:
      equations: equations in program order.
      values: the values to compute.
      kept: a function that returns whether a value is kept, so that it need not be
        computed.
    """
    found = needed_equations(equations, values, kept=kept)
    given = {v for eqn in found for v in reads(eqn) if kept(v)}
    return found, tuple(sorted(given))


def add_copies(
    builder: Builder, equations: Sequence[Equation], known: dict[int, int]
) -> tuple[list[Equation], Callable[[int], int]]:
    """Copies equations onto other operands, under the name of a recomputation.

    Args:
      builder: gives the copies their numbers.
      equations: the equations to copy, in order.
      known: value -> the value that the copies read instead.

    Returns:
      The copies, and a function from a value to its copy.
    """
    numbers = dict(known)
    for value in made_values(equations):
        numbers[value] = builder.like(builder.values[value])

    def copy(value: int) -> int:
        return numbers.get(value, value)

    made = [
        _copy_named(renumber_equation(eqn, copy, lambda _: builder.index()))
        for eqn in equations
    ]
    return made, copy


def _copy_named(eqn: Equation) -> Equation:
    """Copies an equation; adds JAX's name for recomputation to its name stack."""
    stack = f"{eqn.name_stack}/{_STACK}" if eqn.name_stack else _STACK
    regions = tuple(
        dataclasses.replace(r, equations=tuple(_copy_named(e) for e in r.equations))
        for r in eqn.regions
    )
    return dataclasses.replace(eqn, name_stack=stack, regions=regions)


# Primitives that are never recomputed, because they draw different numbers each time.
# Draws from keys repeat exactly.
NEVER = frozenset({"rng_uniform"})


def owners(flow: Flow, starts: Sequence[int]) -> dict[int, int]:
    """Finds the layer of each forward equation that may be recomputed.

    An equation that depends on both state and batch belongs to the layer that contains
    it. Any other equation, such as the cast of a weight, belongs to the only layer that
    reads its result. If several layers read the result, for example a mask, the
    equation belongs to no layer. Equations with side effects belong to no layer.

    Args:
      flow: the dependencies between equations.
      starts: the forward equation at which each layer begins, ascending.

    Returns:
      Index of the equation -> number of the layer.
    """
    order = {index: place for place, index in enumerate(flow.equations)}
    begins = [order[start] for start in starts]
    found: dict[int, int] = {}
    for index, eqn in flow.equations.items():
        if _can_repeat(flow, eqn) and index not in flow.free:
            found[index] = max(0, bisect.bisect_right(begins, order[index]) - 1)
    for index in reversed(tuple(flow.equations)):
        eqn = flow.equations[index]
        if not _can_repeat(flow, eqn) or index not in flow.free:
            continue
        among = {found.get(r, -1) for r in _forward_readers(flow, eqn)}
        if len(among) == 1 and min(among) >= 0:
            found[index] = among.pop()
    return found


def _can_repeat(flow: Flow, eqn: Equation) -> bool:
    forward = flow.roles[eqn.index] is Role.FORWARD
    return forward and not eqn.source.effects and eqn.primitive not in NEVER


def _forward_readers(flow: Flow, eqn: Equation) -> list[int]:
    """Returns the forward equations that read the results of an equation."""
    found = (r for v in eqn.outputs for r in flow.readers.get(v, ()))
    return [r for r in found if flow.roles[r] is Role.FORWARD]


def crossing(flow: Flow, owner: dict[int, int]) -> frozenset[int]:
    """Returns the forward values that one layer computes and another reads."""
    out: set[int] = set()
    for index, eqn in flow.equations.items():
        layer = owner.get(index)
        if layer is None:
            continue
        out.update(
            v for v in reads(eqn) if owner.get(flow.maker.get(v, -1), layer) != layer
        )
    return frozenset(out)


FULL, DOTS, KERNELS = "full", "dots", "kernels"
# The levels besides lists of names: `FULL` keeps no value inside a recomputed layer,
# `DOTS` keeps the results of convolutions, and of matrix products without batch
# dimensions, `KERNELS` keeps the results of attention kernels.
LEVELS = (FULL, DOTS, KERNELS)
# Prefix of a level that keeps named values; the names follow, separated by commas.
NAMES = "names="


class RematError(InputError):
    """The layers of a program cannot be recomputed as requested."""


def names_of(level: str) -> tuple[str, ...]:
    """Returns the names of the values that a level keeps; empty for other levels.

    >>> names_of("names=attn_out,mlp_in")
    ('attn_out', 'mlp_in')
    """
    if not level.startswith(NAMES):
        return ()
    return tuple(level.removeprefix(NAMES).split(","))


def names_in(program: Program) -> tuple[str, ...]:
    """The sorted names that `jax.ad_checkpoint.checkpoint_name` gives in a program."""
    return tuple(sorted({v.name for v in program.values} - {""}))


def is_level(level: str) -> bool:
    """Whether a text is a valid level, for any names.

    >>> [is_level(text) for text in ("dots", "names=a,b", "names=", "names=a,,b")]
    [True, True, False, False]
    """
    return level in LEVELS or (bool(names_of(level)) and all(names_of(level)))


def check_level(program: Program, level: str) -> None:
    """Checks that a program can keep the values of a level.

    Raises:
      RematError: there is no such level, or no value of a given name.
    """
    if not is_level(level):
        raise RematError(
            f"level '{level}': there are {', '.join(LEVELS)} and names=NAME,NAME."
        )
    if level == KERNELS and not has_attention_kernel(program):
        raise RematError(
            "level 'kernels' keeps the results of attention kernels, and the step has "
            "no attention kernel. Say 'full' or 'dots'."
        )
    known = names_in(program)
    if missing := [name for name in names_of(level) if name not in known]:
        name = f"checkpoint_name(x, '{missing[0]}')"
        none = f"it names none. Name a value in the model by {name}, or say 'dots'"
        has = f"it has {', '.join(known)}" if known else none
        raise RematError(
            f"no value of the step is named '{missing[0]}' by "
            f"jax.ad_checkpoint.checkpoint_name; {has}."
        )


def keeps(level: str, eqn: Equation, value: int, values: Sequence[Value]) -> bool:
    """Whether a level keeps a result of an equation.

    Args:
      level: the level.
      eqn: the equation.
      value: the result.
      values: the values of the program.
    """
    if level == DOTS:
        return is_product(eqn)
    if level == KERNELS:
        return attends(eqn, values)
    return values[value].name in names_of(level)


def attends(eqn: Equation, values: Sequence[Value]) -> bool:
    """Whether an equation is an attention kernel of the forward pass."""
    if not is_kernel(eqn.primitive):
        return False
    operands = [a.aval if isinstance(a, Scalar) else values[a] for a in eqn.inputs]
    return is_attention(eqn, operands, [values[v] for v in eqn.outputs])


def has_attention_kernel(program: Program) -> bool:
    """Whether a program has an attention kernel, also in the body of a loop."""
    return any(attends(eqn, program.values) for eqn in walk(program.body))


def is_product(eqn: Equation) -> bool:
    """Whether the level ``dots`` keeps an equation's results."""
    if eqn.primitive == "dot_general":
        _, (left, right) = eqn.params["dimension_numbers"]
        return not left and not right
    return eqn.primitive in ("conv_general_dilated", "ragged_dot_general")


def trace_without_checkpoints(step: Callable[..., Any], call: StepCall) -> TracedStep:
    """Traces a step as if it had no ``jax.checkpoint``.

    Args:
      step: the step.
      call: a call of the step.

    Raises:
      TraceError: JAX cannot trace the step.
      RematError: a checkpoint cannot be removed; the message names its place.
    """
    traced = trace_call(step, call, checkpoints=False)
    return replace(traced, program=merge_repeats(traced.program))


def merge_repeats(program: Program) -> Program:
    """Returns the program without equations that repeat an earlier equation.

    Args:
      program: a program traced without the barriers of its checkpoints.

    Raises:
      RematError: a checkpoint repeats a product or a loop that the forward pass lacks.
    """
    first: dict[Any, Equation] = {}
    # `instead` maps a value to the equal value that is read in its place.
    instead: dict[int, int] = {}
    equal: dict[int, int] = {}
    out: list[Equation] = []
    for given in program.body.equations:
        eqn = renumber_equation(given, lambda v: instead.get(v, v))
        key = (signature(eqn, program.values), _read(eqn, equal))
        known = (
            None if eqn.regions or eqn.source.effects else first.setdefault(key, eqn)
        )
        if known is None or known is eqn:
            out.append(eqn)
            continue
        same = dict(zip(eqn.outputs, known.outputs, strict=True))
        equal.update(same)
        if is_repeated(eqn):
            instead.update(same)
        else:
            out.append(eqn)
    _check_dropped(out)
    outputs = renumber_atoms(program.body.outputs, lambda v: instead.get(v, v))
    return replace(program, body=Region(program.body.inputs, tuple(out), outputs))


def _read(eqn: Equation, equal: Mapping[int, int]) -> tuple[int | None, ...]:
    """The operands that are values; scalars are part of the equation's signature."""
    return tuple(equal.get(a, a) if isinstance(a, int) else None for a in eqn.inputs)


def is_repeated(eqn: Equation) -> bool:
    """Whether an equation recomputes a part of the forward pass."""
    return REPEATED in eqn.name_stack.split("/")


def _check_dropped(equations: Iterable[Equation]) -> None:
    """Raises `RematError` if work that a checkpoint repeats could not be merged."""
    for eqn in equations:
        for one in (eqn, *eqn.inner):
            if is_repeated(one) and (one.primitive in PRODUCTS or one.regions):
                raise RematError(
                    "a jax.checkpoint cannot be dropped: what it repeats at "
                    f"{jax_compat.source_line(one.source)} is within a loop, or "
                    "differs from the forward pass. Take it out of the step."
                )
