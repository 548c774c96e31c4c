"""Keeps the results of attention kernels that ``jax.checkpoint`` would compute again.

The backward pass of attention reads the queries, keys and values, the output, and
statistics of each row. Queries, keys and values are cheap to recompute from the input
of a layer, but the output and the statistics need the whole kernel, which may pass
blocks of a sequence around a ring of devices. This module lets the backward pass read
the output and the statistics of the forward pass, and removes the repeated kernel.

A repeated kernel is replaced if it is proved equal to a kernel of the forward pass:
both have equal parameters, and equal operands by value numbering (Alpern, Wegman,
Zadeck, "Detecting equality of variables in programs", 1988). An optimization barrier
returns its operands. In a loop, a slice of a stacked result is equal to the value that
the forward loop stacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from autopar_passes.program.calls import StepCall
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Value,
    needed_equations,
    reads,
)
from autopar_passes.program.flatten import (
    Builder,
    next_index,
    renumber_atoms,
    renumber_equation,
)
from autopar_passes.program.trace import TracedStep, trace_call
from autopar_passes.remat.copies import NEVER, attends, is_repeated
from autopar_passes.rules.book import signature

_BARRIER = "optimization_barrier"


def trace_keeping_kernels(step: Callable[..., Any], call: StepCall) -> TracedStep:
    """Traces a step whose ``jax.checkpoint``s keep the results of attention kernels.

    Args:
      step: the step.
      call: a call of the step.

    Raises:
      TraceError: JAX cannot trace the step.
    """
    traced = trace_call(step, call)
    return dataclasses.replace(traced, program=keep_kernels(traced.program))


def keep_kernels(program: Program) -> Program:
    """Returns the program without attention kernels that repeat an earlier one.

    Values and equations of the program keep their numbers; new ones get higher numbers.

    Args:
      program: a differentiated step, traced with the barriers of its checkpoints.

    Returns:
      The same object if the program repeats no attention kernel. A kernel that is
      repeated in a branch stays.
    """
    found = _Numbering(program)
    pairs = [
        (eqn, known)
        for eqn, known in found.twins
        if is_repeated(eqn) and not is_repeated(known) and attends(eqn, program.values)
    ]
    by_homes: dict[tuple[int | None, int | None], dict[int, Equation]] = {}
    for eqn, known in pairs:
        homes = found.home[known.index], found.home[eqn.index]
        by_homes.setdefault(homes, {})[eqn.index] = known
    builder = Builder(program.values, next_index(program))
    body = _keep(program, builder, program.body, None, by_homes)
    if body is program.body:
        return program
    return dataclasses.replace(program, values=tuple(builder.values), body=body)


def _keep(
    program: Program,
    builder: Builder,
    body: Region,
    home: int | None,
    by_homes: dict[tuple[int | None, int | None], dict[int, Equation]],
) -> Region:
    """Removes repeated kernels of a region, and of the loops in it.

    Args:
      program: the program.
      builder: gives new values and equations their numbers.
      body: the region.
      home: index of the loop whose body it is; None for the whole program.
      by_homes: the loops of a kernel and of its repetition -> index of the repeated
        kernel -> the kernel.
    """
    before = body
    loops = [eqn.index for eqn in body.equations if eqn.primitive == "scan"]
    for (source, target), kernels in by_homes.items():
        if source == target == home:
            body = _in_line(program, builder, body, kernels)
        elif source in loops and target in loops and source != target:
            body = _in_loops(program, builder, body, (source, target), kernels)
    changed: dict[int, Equation] = {}
    for eqn in body.equations:
        if eqn.index in loops:
            (inner,) = eqn.regions
            made = _keep(program, builder, inner, eqn.index, by_homes)
            if made is not inner:
                changed[eqn.index] = dataclasses.replace(eqn, regions=(made,))
    if changed:
        equations = tuple(changed.get(eqn.index, eqn) for eqn in body.equations)
        body = dataclasses.replace(body, equations=equations)
    if body is before:
        return body
    live = needed_equations(body.equations, body.outputs, effects=True)
    return dataclasses.replace(body, equations=live)


class _Numbering:
    """Value numbers of a program.

    Attributes:
      twins: pairs of an equation and an earlier equation with equal results.
      home: index of an equation -> index of the innermost loop that contains it; None
        for equations outside of loops.
    """

    def __init__(self, program: Program) -> None:
        self.values = program.values
        self.twins: list[tuple[Equation, Equation]] = []
        self.home: dict[int, int | None] = {}
        self._same: dict[int, int] = {}
        self._first: dict[object, Equation] = {}
        # Stacked operand -> the value that stands for its slices.
        self._slices: dict[int, int] = {}
        # Stacked result of a loop -> the value of one iteration.
        self._stacked: dict[int, int] = {}
        self._visit(program.body.equations, None)

    def of(self, atom: Atom) -> int | None:
        """Returns the number of a value; None for scalars, which signatures hold."""
        return self._same.get(atom, atom) if isinstance(atom, int) else None

    def _visit(self, equations: Sequence[Equation], home: int | None) -> None:
        for eqn in equations:
            self.home[eqn.index] = home
            if eqn.primitive == _BARRIER:
                self._equate(eqn.outputs, eqn.inputs)
            elif eqn.primitive == "scan":
                self._visit_loop(eqn)
            elif not (eqn.regions or eqn.source.effects or eqn.primitive in NEVER):
                operands = tuple(map(self.of, eqn.inputs))
                key = signature(eqn, self.values), operands
                known = self._first.setdefault(key, eqn)
                if known is not eqn:
                    self.twins.append((eqn, known))
                    self._equate(eqn.outputs, known.outputs)

    def _equate(self, values: Sequence[int], others: Sequence[Atom]) -> None:
        for value, other in zip(values, others, strict=True):
            number = self.of(other)
            if number is not None:
                self._same[value] = number

    def _visit_loop(self, eqn: Equation) -> None:
        """Numbers the values of one iteration of a loop.

        The number of a value of an iteration stands for the values of all iterations,
        by the index of the iteration. Two loops over the same stack have the same
        number of iterations.
        """
        (body,) = eqn.regions
        consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
        self._equate(body.inputs[:consts], eqn.inputs[:consts])
        first = consts + carries
        for inner, operand in zip(body.inputs[first:], eqn.inputs[first:], strict=True):
            stack = self.of(operand)
            if stack in self._stacked:
                self._same[inner] = self._stacked[stack]
            elif stack is not None:
                self._same[inner] = self._slices.setdefault(stack, inner)
        self._visit(body.equations, eqn.index)
        made = zip(eqn.outputs[carries:], body.outputs[carries:], strict=True)
        for stack, one in made:
            number = self.of(one)
            if number is not None:
                self._stacked[stack] = number


class _Kept:
    """The results of repeated equations that the forward pass computes instead.

    Attributes:
      instead: result of a repeated equation -> the equal value of the forward pass.
      after: index of a kernel of the forward pass -> equations to add after it.
    """

    def __init__(
        self,
        program: Program,
        builder: Builder,
        equations: Sequence[Equation],
        kernels: dict[int, Equation],
    ) -> None:
        """Finds the repeated equations that depend on no other values.

        An equation that makes a smaller array from results of a kernel, such as a slice
        of its statistics, is computed after the kernel, so that only the smaller array
        is kept.

        Args:
          program: the program.
          builder: gives new values and equations their numbers.
          equations: the equations with the repeated kernels.
          kernels: index of a repeated kernel -> the equal kernel.
        """
        self.instead: dict[int, int] = {}
        self.after: dict[int, list[Equation]] = {}
        self.left: list[Equation] = []
        source: dict[int, Equation] = {}
        for eqn in equations:
            known = kernels.get(eqn.index)
            if known is not None:
                self.instead.update(zip(eqn.outputs, known.outputs, strict=True))
                source.update(dict.fromkeys(eqn.outputs, known))
                continue
            makers = {source[a].index: source[a] for a in eqn.arrays if a in source}
            only = len(makers) == 1 and all(a in source for a in eqn.arrays)
            values = program.values
            if not (only and is_repeated(eqn) and _is_smaller(eqn, values)):
                self.left.append(eqn)
                continue
            (maker,) = makers.values()
            self.instead.update((v, builder.like(values[v])) for v in eqn.outputs)
            source.update(dict.fromkeys(eqn.outputs, maker))
            made = renumber_equation(
                eqn, lambda v: self.instead.get(v, v), lambda _: builder.index()
            )
            made = dataclasses.replace(made, name_stack=maker.name_stack)
            self.after.setdefault(maker.index, []).append(made)

    def extended(self, equations: Sequence[Equation]) -> list[Equation]:
        """Returns equations of the forward pass with those of `after`."""
        return [e for eqn in equations for e in (eqn, *self.after.get(eqn.index, ()))]


def _is_smaller(eqn: Equation, values: Sequence[Value]) -> bool:
    """Whether the results of an equation are smaller than its operands."""
    if eqn.regions or eqn.source.effects or eqn.primitive in (*NEVER, _BARRIER):
        return False
    sizes = [sum(values[v].nbytes for v in x) for x in (eqn.outputs, eqn.arrays)]
    return sizes[0] < sizes[1]


def _in_line(
    program: Program, builder: Builder, body: Region, kernels: dict[int, Equation]
) -> Region:
    """Removes kernels that a region repeats, outside of loops in it."""
    kept = _Kept(program, builder, body.equations, kernels)

    def read(value: int) -> int:
        return kept.instead.get(value, value)

    equations = [renumber_equation(e, read) for e in kept.extended(kept.left)]
    outputs = renumber_atoms(body.outputs, read)
    return Region(body.inputs, tuple(equations), outputs)


def _in_loops(
    program: Program,
    builder: Builder,
    body: Region,
    loops: tuple[int, int],
    kernels: dict[int, Equation],
) -> Region:
    """Removes kernels of a backward loop that repeat those of a forward loop.

    The forward loop stacks the results of its kernels, and the backward loop reads the
    stacks.
    """
    by_index = {eqn.index: eqn for eqn in body.equations}
    forward, backward = (by_index[k] for k in loops)
    (inner,) = backward.regions
    kept = _Kept(program, builder, inner.equations, kernels)
    used = {v for eqn in kept.left for v in reads(eqn)}
    used.update(v for v in inner.outputs if isinstance(v, int))
    read = {v: kept.instead[v] for v in kept.instead if v in used}
    forward, stacks = _stacking(forward, kept, [*read.values()], builder)
    inputs = (*inner.inputs, *read)
    live = needed_equations(kept.left, inner.outputs, effects=True)
    backward = dataclasses.replace(
        backward,
        inputs=(*backward.inputs, *(stacks[v] for v in read.values())),
        regions=(Region(inputs, live, inner.outputs),),
    )
    changed = {forward.index: forward, backward.index: backward}
    equations = tuple(changed.get(e.index, e) for e in body.equations)
    return dataclasses.replace(body, equations=equations)


def _stacking(
    loop: Equation, kept: _Kept, values: Sequence[int], builder: Builder
) -> tuple[Equation, dict[int, int]]:
    """Returns a loop that stacks values of its body, and the stack of each value."""
    (body,) = loop.regions
    carries = loop.params["num_carry"]
    known = zip(body.outputs[carries:], loop.outputs[carries:], strict=True)
    stacks = {v: stack for v, stack in known if isinstance(v, int)}
    new = [v for v in dict.fromkeys(values) if v not in stacks]
    for value in new:
        like = builder.values[value]
        shape = (loop.params["length"], *like.shape)
        stacks[value] = builder.like(dataclasses.replace(like, shape=shape))
    equations = tuple(kept.extended(body.equations))
    region = Region(body.inputs, equations, (*body.outputs, *new))
    outputs = (*loop.outputs, *(stacks[v] for v in new))
    return dataclasses.replace(loop, outputs=outputs, regions=(region,)), stacks
