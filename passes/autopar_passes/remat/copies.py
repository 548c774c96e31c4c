"""Copies of equations that compute a forward pass again.

What is kept of a layer that is computed again.

Drops ``jax.checkpoint``: what the backward pass repeats is merged with the first.

A step is traced without the barriers that keep its checkpoints. An equation that they
repeat is then the same as an earlier one of the forward pass, which is read instead.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.graph.operators import PRODUCTS
from autopar_passes.graph.roles import REPEATED, Role
from autopar_passes.program.calls import StepCall
from autopar_passes.program.equations import Equation, Program, Region, Value, walk
from autopar_passes.program.flatten import renumber_equation
from autopar_passes.program.trace import TracedStep, trace_call
from autopar_passes.rules.book import signature
from autopar_passes.stages.flow import Flow, reads

# JAX's name for the part of a backward pass that repeats a forward pass.
_STACK = "transpose(rematted_computation)"


def needed_equations(
    equations: Sequence[Equation],
    values: Collection[int],
    kept: Callable[[int], bool],
) -> tuple[tuple[Equation, ...], tuple[int, ...]]:
    """The equations that make values, and the kept values that they start from.

    Args:
      equations: in program order.
      values: to be made.
      kept: whether a value is there already.
    """
    wanted, given = set(values), dict[int, None]()
    found: list[Equation] = []
    for eqn in reversed(equations):
        if wanted.isdisjoint(eqn.outputs):
            continue
        found.append(eqn)
        for value in reads(eqn):
            if kept(value):
                given[value] = None
            else:
                wanted.add(value)
    return tuple(reversed(found)), tuple(sorted(given))


class Numbers:
    """Gives numbers to new values and equations of a program.

    Attributes:
      values: all values.
    """

    def __init__(self, program: Program, next_index: int) -> None:
        """Has given none yet.

        Args:
          program: whose numbers are taken.
          next_index: the first index that no equation has.
        """
        self.values = list(program.values)
        self.next_index = next_index

    def new(self, like: Value) -> int:
        """A value of the shape, dtype and name of another one."""
        self.values.append(like)
        return len(self.values) - 1

    def index(self) -> int:
        """An index of an equation."""
        self.next_index += 1
        return self.next_index - 1

    def copies(
        self, equations: Sequence[Equation], known: dict[int, int]
    ) -> tuple[list[Equation], Callable[[int], int]]:
        """Equations that compute the same from other values, named as repeated.

        Args:
          equations: what is copied, in order.
          known: value -> what the copies read instead.

        Returns:
          The copies, and a function from a value to its copy.
        """
        numbers = dict(known)
        for eqn in equations:
            for value in _made_values(eqn):
                numbers[value] = self.new(self.values[value])

        def copy(value: int) -> int:
            return numbers.get(value, value)

        made = [
            _copy_named(renumber_equation(eqn, copy, lambda _: self.index()))
            for eqn in equations
        ]
        return made, copy


def _made_values(eqn: Equation) -> list[int]:
    """The values that an equation makes, also within its regions."""
    found = list(eqn.outputs)
    for region in eqn.regions:
        found.extend(region.inputs)
        found.extend(v for inner in walk(region) for v in inner.outputs)
        found.extend(
            v for inner in walk(region) for deep in inner.regions for v in deep.inputs
        )
    return found


def _copy_named(eqn: Equation) -> Equation:
    """A copy under the name that JAX gives to what a backward pass computes again."""
    stack = f"{eqn.name_stack}/{_STACK}" if eqn.name_stack else _STACK
    regions = tuple(
        dataclasses.replace(r, equations=tuple(_copy_named(e) for e in r.equations))
        for r in eqn.regions
    )
    return dataclasses.replace(eqn, name_stack=stack, regions=regions)


# Draws other numbers each time it runs; what has keys draws the same ones.
NEVER = frozenset({"rng_uniform"})


def owners(flow: Flow, starts: Sequence[int]) -> dict[int, int]:
    """The layer of each forward equation that may be computed again.

    An equation that depends on the state and on the batch belongs to the layer in which
    it stands. Another one, such as the cast of a weight, belongs to the layer that
    alone reads it; what several layers read, such as a mask, belongs to none. What has
    an effect belongs to none.

    Args:
      flow: what equations depend on.
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
    """The forward equations that read what an equation makes."""
    found = (r for v in eqn.outputs for r in flow.readers.get(v, ()))
    return [r for r in found if flow.roles[r] is Role.FORWARD]


def crossing(flow: Flow, owner: dict[int, int]) -> frozenset[int]:
    """The values that one layer makes and another one reads in the forward pass."""
    out: set[int] = set()
    for index, eqn in flow.equations.items():
        layer = owner.get(index)
        if layer is None:
            continue
        out.update(
            v for v in reads(eqn) if owner.get(flow.maker.get(v, -1), layer) != layer
        )
    return frozenset(out)


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
