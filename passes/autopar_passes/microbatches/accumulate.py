"""Writes a step over microbatches as one program: a loop that sums, then the update.

The program has the inputs and outputs of the step on the whole batch. The loop carries
the sums over microbatches, in single precision for values of half precision. Values
with rows are stacked by microbatch. Equations that run once, such as the update, stay
unchanged.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes.microbatches.facts import (
    Combine,
    Crossing,
    Microbatched,
    Rows,
    join_microbatches,
    take_microbatch,
)
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    needed_equations,
)
from autopar_passes.program.flatten import (
    Builder,
    next_index,
    renumber_equation,
)
from autopar_passes.program.trace import TracedStep

_ADDED = (Combine.SUM, Combine.MEAN)


def accumulate_step(whole: TracedStep, found: Microbatched) -> TracedStep:
    """Returns the step that runs its microbatches and then updates its state.

    Args:
      whole: the step on the whole batch.
      found: the split of the step into microbatches.
    """
    joiner = _Joiner(whole.program, found)
    return dataclasses.replace(whole, program=joiner.run(), loop=joiner.loop_index)


class _Joiner:
    def __init__(self, whole: Program, found: Microbatched) -> None:
        self.whole = whole
        self.found = found
        self.micro = found.traced.program
        self.builder = Builder(whole.values, next_index(whole))
        # In the new program, the loop's body has its own values and equations. Their
        # numbers come after those of the whole step.
        self.first_value = len(whole.values)
        self.builder.values.extend(self.micro.values)
        self.first_index = self.builder.next_index
        self.builder.next_index += next_index(self.micro)
        self.loop_index = -1

    def run(self) -> Program:
        before = self.before()
        self.builder.equations.extend(before)
        self.loop()
        once = {*self.found.once} - {e.index for e in before}
        self.builder.equations.extend(
            e for e in self.whole.body.equations if e.index in once
        )
        body = self.whole.body
        region = Region(body.inputs, tuple(self.builder.equations), body.outputs)
        return Program(tuple(self.builder.values), region, self.whole.constants)

    def before(self) -> tuple[Equation, ...]:
        """Equations of values that all microbatches share, or of the whole batch."""
        same = [c.value for c in self.found.crossings if c.combine is Combine.SAME]
        return needed_equations(self.whole.body.equations, [*same, *self.ahead()])

    def ahead(self) -> list[int]:
        program = self.found.ahead
        return (
            []
            if program is None
            else [v for v in program.body.outputs if isinstance(v, int)]
        )

    def number(self, value: int) -> int:
        """Returns the program's number of a value of the microbatch's program."""
        return self.first_value + value

    def loop(self) -> None:
        """Adds the loop over the microbatches, and the equations directly after it."""
        added = [c for c in self.found.crossings if c.combine in _ADDED]
        stacked = [c for c in self.found.crossings if c.combine is Combine.ROWS]
        repeated = self.body([*added, *stacked])
        carries = [self.zero(c) for c in added]
        count = self.found.microbatches
        numbers = self.builder.call(lambda: jax.lax.iota(jnp.int32, count), [])
        inner, number = self.sums(added), self.number_inside()
        outer, self.builder.equations = self.builder.equations, []
        consts = self.inputs(repeated, number)
        self.builder.equations.extend(repeated)
        ends = [self.add(c, v) for c, v in zip(added, inner, strict=True)]
        body = tuple(self.builder.equations)
        self.builder.equations = outer
        region = Region(
            (*consts.values(), *inner, number),
            body,
            (*ends, *(self.number(c.value) for c in stacked)),
        )
        self.close(region, consts, carries, numbers, added, stacked)

    def close(
        self,
        region: Region,
        consts: dict[int, int],
        carries: list[Atom],
        numbers: Atom,
        added: list[Crossing],
        stacked: list[Crossing],
    ) -> None:
        """Adds the loop itself, and converts its results."""
        count = self.found.microbatches
        ends = self.sums(added)
        rows = [self.micro.values[c.value] for c in stacked]
        stacks = [self.builder.value((count, *v.shape), v.dtype) for v in rows]
        source = scan_source(count, len(consts), len(carries))
        self.loop_index = self.builder.index()
        self.builder.equations.append(
            Equation(
                self.loop_index,
                source,
                (*consts, *carries, numbers),
                (*ends, *stacks),
                "",
                (region,),
            )
        )
        for crossing, value in zip(added, ends, strict=True):
            self.hand_on(crossing, value)
        for crossing, value in zip(stacked, stacks, strict=True):
            self.hand_on(crossing, value)

    def sums(self, added: list[Crossing]) -> list[int]:
        """Adds a value to the program for each sum."""
        like = [self.micro.values[c.value] for c in added]
        return [self.builder.value(v.shape, wide_dtype(v.dtype)) for v in like]

    def hand_on(self, crossing: Crossing, value: int) -> None:
        """Makes the value of the whole batch from a result of the loop."""
        dtype = self.whole.values[crossing.value].dtype
        count, rows = self.found.microbatches, crossing.rows

        def whole(x: Any) -> Any:
            if crossing.combine is Combine.ROWS:
                assert rows is not None
                return join_microbatches(x, rows)
            if crossing.combine is Combine.MEAN:
                x = x * (1 / count)
            return x.astype(dtype)

        last = self.builder.call(whole, [value])
        assert isinstance(last, int)
        self.rename(last, crossing.value)

    def rename(self, value: int, to: int) -> None:
        """Makes the last equation that computed a value compute another value."""
        for k in range(len(self.builder.equations) - 1, -1, -1):
            eqn = self.builder.equations[k]
            if value in eqn.outputs:
                outputs = tuple(to if v == value else v for v in eqn.outputs)
                self.builder.equations[k] = dataclasses.replace(eqn, outputs=outputs)
                return

    def body(self, crossings: list[Crossing]) -> tuple[Equation, ...]:
        """Returns the equations of one microbatch, numbered for the new program."""
        repeated = [
            e for e in self.micro.body.equations if e.index not in self.found.once
        ]
        kept = needed_equations(repeated, [c.value for c in crossings], effects=True)
        return tuple(
            renumber_equation(e, self.number, lambda k: self.first_index + k)
            for e in kept
        )

    def inputs(self, body: tuple[Equation, ...], number: int) -> dict[int, int]:
        """Returns the outer values that the body reads -> the body's inputs for them.

        Also adds the equations that take the microbatch's rows out of the batch.

        Args:
          body: the equations.
          number: the value inside the body that is the number of the microbatch.
        """
        read = _read(body)
        consts: dict[int, int] = {}
        for position, (value, source) in enumerate(self.sources()):
            inner = self.number(value)
            rows = self.found.batch.get(position)
            if inner not in read or position == self.found.number:
                continue
            if rows is None:
                consts[source] = inner
            else:
                of = self.builder.values[source]
                consts[source] = self.builder.value(of.shape, of.dtype)
                self.take(rows, [consts[source], number], inner)
        return consts

    def number_inside(self) -> int:
        """Returns the value of the loop's body that is the number of the microbatch."""
        if self.found.number is None:
            return self.builder.value((), jnp.dtype("int32"))
        return self.number(self.micro.body.inputs[self.found.number])

    def take(self, rows: Rows, values: list[int], inner: int) -> None:
        """Takes the rows of a microbatch out of an array of the batch."""
        count = self.found.microbatches
        last = self.builder.call(
            lambda x, n: take_microbatch(x, rows, count, n), values
        )
        assert isinstance(last, int)
        self.rename(last, inner)

    def sources(self) -> list[tuple[int, int]]:
        """The inputs of the microbatch's program, with the values they come from."""
        own = self.whole.body.inputs
        arguments = list(own[: self.whole.num_arguments])
        number = [] if self.found.number is None else [-1]
        once = [-1] * len(self.found.gathered)
        given = [*arguments, *number, *self.ahead(), *once, *self.whole.constant_arrays]
        return list(zip(self.micro.body.inputs, given, strict=True))

    def zero(self, crossing: Crossing) -> Atom:
        """Returns the initial value of a sum: zeros."""
        value = self.micro.values[crossing.value]
        dtype = wide_dtype(value.dtype)
        return self.builder.call(lambda: jax.lax.full(value.shape, 0, dtype), [])

    def add(self, crossing: Crossing, carry: int) -> Atom:
        """Adds a microbatch's value to a sum, within the loop's body."""
        dtype = self.builder.values[carry].dtype
        stack = _stack_of(self.builder.equations, self.number(crossing.value))
        return self.builder.call(
            lambda total, x: jax.lax.add(total, x.astype(dtype)),
            [carry, self.number(crossing.value)],
            stack,
        )


def _stack_of(equations: list[Equation], value: int) -> str:
    return next((e.name_stack for e in reversed(equations) if value in e.outputs), "")


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype of a sum: half precision would lose small summands."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype("float32") if half else dtype


def _read(equations: tuple[Equation, ...]) -> set[int]:
    """Returns the values that equations read as operands."""
    return {a for e in equations for a in e.arrays}


def scan_source(length: int, consts: int, carries: int) -> Any:
    """JAX's equation of a scan, of which only the parameters are used."""

    def run(start: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c, None), start, None, length=length)

    (eqn,) = jax.make_jaxpr(run)(0).jaxpr.eqns
    return eqn.replace(
        params={**eqn.params, "num_consts": consts, "num_carry": carries}
    )
