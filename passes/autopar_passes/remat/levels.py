"""What is kept of a layer that is computed again.

Drops ``jax.checkpoint``: what the backward pass repeats is merged with the first.

A step is traced without the barriers that keep its checkpoints. An equation that they
repeat is then the same as an earlier one of the forward pass, which is read instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.graph.operators import PRODUCTS
from autopar_passes.graph.roles import REPEATED
from autopar_passes.program.calls import StepCall
from autopar_passes.program.equations import Equation, Program, Region, walk
from autopar_passes.program.flatten import renumber_equation
from autopar_passes.program.trace import TracedStep, trace_call
from autopar_passes.rules.book import signature

FULL, DOTS = "full", "dots"
# What may be kept, beside named values.
LEVELS = (FULL, DOTS)
# A level that keeps named values begins so; the names follow, with commas between.
NAMES = "names="


class RematError(InputError):
    """The layers of a program cannot be computed again as is asked for."""


def names_of(level: str) -> tuple[str, ...]:
    """The names of the values that a level keeps; empty for other levels.

    >>> names_of("names=attn_out,mlp_in")
    ('attn_out', 'mlp_in')
    """
    if not level.startswith(NAMES):
        return ()
    return tuple(level.removeprefix(NAMES).split(","))


def names_in(program: Program) -> tuple[str, ...]:
    """The names that `jax.ad_checkpoint.checkpoint_name` gives in a program, sorted."""
    return tuple(sorted({v.name for v in program.values} - {""}))


def is_level(level: str) -> bool:
    """Whether a text is a level, of whatever names.

    >>> [is_level(text) for text in ("dots", "names=a,b", "names=", "names=a,,b")]
    [True, True, False, False]
    """
    return level in LEVELS or (bool(names_of(level)) and all(names_of(level)))


def check_level(program: Program, level: str) -> None:
    """Checks that a program can keep what a level says.

    Raises:
      RematError: there is no such level, or no value of such a name.
    """
    if not is_level(level):
        raise RematError(
            f"level '{level}': there are {', '.join(LEVELS)} and names=NAME,NAME."
        )
    known = names_in(program)
    if missing := [name for name in names_of(level) if name not in known]:
        has = f"it has {', '.join(known)}" if known else "it names none"
        raise RematError(
            f"no value of the step is named '{missing[0]}' by "
            f"jax.ad_checkpoint.checkpoint_name; {has}."
        )


def keeps(level: str, eqn: Equation, name: str, names: Collection[str]) -> bool:
    """Whether a level keeps a result of an equation.

    Args:
      level: the level.
      eqn: the equation.
      name: of the result.
      names: those of the level.
    """
    return is_product(eqn) if level == DOTS else name in names


def is_product(eqn: Equation) -> bool:
    """Whether ``dots`` keeps the results of an equation."""
    if eqn.primitive == "dot_general":
        _, (left, right) = eqn.params["dimension_numbers"]
        return not left and not right
    return eqn.primitive in ("conv_general_dilated", "ragged_dot_general")


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
