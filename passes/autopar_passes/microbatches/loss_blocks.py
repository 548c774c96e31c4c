"""Computes the last matrix product of a model and its loss in blocks of tokens.

A language model has an array of logits with an entry for each token and each word of
the vocabulary. The logits, their softmax and their gradients are often the largest
arrays of a step, although each token's logits matter to that token alone. This pass
puts all operators on such arrays into a loop over blocks of tokens, forward and
backward pass together. A block has logits for its own tokens only, and computes the
gradient of its hidden states. It adds its part of the gradient of the output matrix.
`autopar_passes.microbatches.losses` finds these operators.

A block takes tokens from all along a dimension, as a microbatch takes rows
(`autopar_passes.microbatches.facts.Rows`), so that the tokens of a sharded dimension
stay on their devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.microbatches.accumulate import scan_source, wide_dtype
from autopar_passes.microbatches.facts import (
    Rows,
    join_microbatches,
    take_microbatch,
)
from autopar_passes.microbatches.losses import LARGE, Loss, LossSearch, find_losses
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    reads,
)
from autopar_passes.program.flatten import Builder, barrier_equation, next_index
from autopar_passes.rules.factor_rule import FactorRule


def loss_in_blocks(
    program: Program, rules: Mapping[int, FactorRule], blocks: int
) -> Program:
    """Returns the program that computes its largest losses in blocks of tokens.

    Values and equations that stay keep their numbers. The program is unchanged if no
    loss can be computed in so many blocks.

    Args:
      program: a flat program.
      rules: the sharding rules, by equation.
      blocks: the number of blocks, a divisor of `FoundLosses.tokens`.
    """
    found = find_losses(program, rules)
    if blocks < 2 or not found.tokens or found.tokens % blocks:
        return program
    rewrite = _Rewrite(program, rules, blocks, found.elements)
    body = rewrite.region(program.body)
    values = tuple(rewrite.builder.values)
    return dataclasses.replace(program, values=values, body=body)


class _Rewrite:
    """Puts losses into loops over blocks of tokens."""

    def __init__(
        self,
        program: Program,
        rules: Mapping[int, FactorRule],
        blocks: int,
        elements: int,
    ) -> None:
        self.rules, self.blocks = rules, blocks
        self.least = LARGE * elements
        self.builder = Builder(program.values, next_index(program))

    def region(self, region: Region) -> Region:
        """The region, with loops in place of its losses."""
        inner = [
            dataclasses.replace(eqn, regions=tuple(map(self.region, eqn.regions)))
            for eqn in region.equations
        ]
        region = dataclasses.replace(region, equations=tuple(inner))
        while True:
            search = LossSearch(region, self.builder.values, self.rules)
            loss = next(search.losses(self.least), None)
            if loss is None:
                return region
            region = self.replaced(search, loss)

    def replaced(self, search: LossSearch, loss: Loss) -> Region:
        """The region of a search, with a loop in place of one loss."""
        before, after = search.around(loss.equations, loss.waiting)
        read = {v for eqn in after for v in reads(eqn)}
        read.update(v for v in search.region.outputs if isinstance(v, int))
        made = {v for eqn in loss.equations for v in eqn.outputs}
        loop = _Loop(self.builder, loss, self.blocks, sorted(made & read)).equations()
        return dataclasses.replace(search.region, equations=(*before, *loop, *after))


class _Loop:
    """Writes the loop over blocks of tokens of one loss."""

    def __init__(
        self, builder: Builder, loss: Loss, blocks: int, results: Sequence[int]
    ) -> None:
        self.builder, self.loss, self.blocks = builder, loss, blocks
        self.stacked = [v for v in results if v in loss.rows]
        self.added = [v for v in results if v in loss.sums]
        stacks = [eqn.name_stack for eqn in loss.equations]
        self.stack = next(
            (s for s in reversed(stacks) if "transpose(" in s), stacks[-1]
        )
        self.stack_of = {v: e.name_stack for e in loss.equations for v in e.outputs}
        # Value of the step -> the value in the loop's body.
        self.inner: dict[int, int] = {}

    def equations(self) -> list[Equation]:
        """The loop, and the equations before and after it."""
        builder = self.builder
        outer, builder.equations = builder.equations, []
        starts = [self._zeros(v) for v in self.added]
        numbers = builder.call(
            lambda: jax.lax.iota(jnp.int32, self.blocks), [], self.stack
        )
        before, builder.equations = builder.equations, []
        values = builder.values
        number = builder.value((), jnp.dtype("int32"))
        carries = [
            builder.value(values[v].shape, wide_dtype(values[v].dtype))
            for v in self.added
        ]
        consts = self._constants(number)
        for eqn in self.loss.equations:
            self._equation(eqn)
        ends = [self._add(v, c) for v, c in zip(self.added, carries, strict=True)]
        body = Region(
            (*consts.values(), *carries, number),
            tuple(builder.equations),
            (*ends, *(self.inner[v] for v in self.stacked)),
        )
        builder.equations = []
        # A sum that keeps its dtype leaves the loop as the value itself.
        sums = [
            v
            if values[v].dtype == values[c].dtype
            else builder.value(values[c].shape, values[c].dtype)
            for v, c in zip(self.added, carries, strict=True)
        ]
        parts = [values[self.inner[v]] for v in self.stacked]
        stacks = [builder.value((self.blocks, *x.shape), x.dtype) for x in parts]
        source = scan_source(self.blocks, len(consts), len(carries))
        inputs = (*consts, *starts, numbers)
        loop = Equation(
            builder.index(), source, inputs, (*sums, *stacks), self.stack, (body,)
        )
        for value, total in zip(self.added, sums, strict=True):
            if value != total:
                self._narrow(value, total)
        for value, stack in zip(self.stacked, stacks, strict=True):
            self._join(value, stack)
        after, builder.equations = builder.equations, outer
        return [*before, loop, *after]

    def _zeros(self, value: int) -> Atom:
        """The first value of a sum over tokens."""
        of = self.builder.values[value]
        dtype = wide_dtype(of.dtype)
        return self.builder.call(
            lambda: jax.lax.full(of.shape, 0, dtype), [], self.stack
        )

    def _constants(self, number: int) -> dict[int, int]:
        """Values that the loop reads -> the inputs of its body for them.

        Also adds the equations that take a block's tokens.
        """
        made = {v for eqn in self.loss.equations for v in eqn.outputs}
        values, consts = self.builder.values, dict[int, int]()
        for eqn in self.loss.equations:
            for value in eqn.arrays:
                if value in made or value in consts:
                    continue
                consts[value] = self.inner[value] = self.builder.like(values[value])
                rows = self.loss.rows.get(value)
                if rows is not None:
                    self.inner[value] = self._take(value, rows, number, eqn.name_stack)
        return consts

    def _take(self, value: int, rows: Rows, number: int, stack: str) -> int:
        made = self.builder.call(
            lambda x, n: take_microbatch(x, rows, self.blocks, n),
            [self.inner[value], number],
            stack,
        )
        assert isinstance(made, int)
        return made

    def _equation(self, eqn: Equation) -> None:
        """Adds an equation on the tokens of one block."""
        params = self._params(eqn)
        arrays = [self.inner[a] for a in eqn.arrays]
        shapes = [self._shape(v) for v in eqn.outputs]
        if eqn.primitive == "optimization_barrier":
            source = barrier_equation([self.builder.values[a] for a in arrays])
            outputs = tuple(self.builder.like(self.builder.values[a]) for a in arrays)
            self.builder.equations.append(
                Equation(
                    self.builder.index(), source, tuple(arrays), outputs, eqn.name_stack
                )
            )
            self.inner.update(zip(eqn.outputs, outputs, strict=True))
            return

        def run(*given: Any) -> Any:
            left = iter(given)
            operands = [
                a.value if isinstance(a, Scalar) else next(left) for a in eqn.inputs
            ]
            return jax_compat.bind(eqn.source.replace(params=params), *operands)

        found = self.builder.calls(run, arrays, eqn.name_stack)
        for value, made, shape in zip(eqn.outputs, found, shapes, strict=True):
            of = self.builder.values[made]
            assert of == dataclasses.replace(self.builder.values[value], shape=shape)
            self.inner[value] = made

    def _shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value for one block of tokens."""
        shape = self.builder.values[value].shape
        rows = self.loss.rows.get(value)
        return shape if rows is None else _with_part(shape, rows.dim, self.blocks)

    def _params(self, eqn: Equation) -> dict[str, Any]:
        """The parameters of an equation on the tokens of one block."""
        params = dict(eqn.params)
        match eqn.primitive:
            case "broadcast_in_dim" | "iota":
                params["shape"] = self._shape(eqn.outputs[0])
            case "reshape":
                params["new_sizes"] = self._shape(eqn.outputs[0])
            case "slice":
                rows = self.loss.rows[eqn.arrays[0]]
                params["limit_indices"] = _with_part(
                    params["limit_indices"], rows.dim, self.blocks
                )
            case "gather":
                operand = eqn.inputs[0]
                rows = self.loss.rows.get(operand) if isinstance(operand, int) else None
                sizes = params["slice_sizes"]
                if rows is not None and sizes[rows.dim] > 1:
                    params["slice_sizes"] = _with_part(sizes, rows.dim, self.blocks)
            case _:
                pass
        return params

    def _add(self, value: int, carry: int) -> int:
        """Adds a block's part to a sum over tokens."""
        dtype = self.builder.values[carry].dtype
        made = self.builder.call(
            lambda total, x: jax.lax.add(total, x.astype(dtype)),
            [carry, self.inner[value]],
            self.stack_of[value],
        )
        assert isinstance(made, int)
        return made

    def _narrow(self, value: int, total: int) -> None:
        """Computes a sum in its own dtype from the sum that the loop carries."""
        dtype = self.builder.values[value].dtype
        self.builder.call(
            lambda x: x.astype(dtype), [total], self.stack_of[value], value
        )

    def _join(self, value: int, stack: int) -> None:
        """Computes a value with all tokens from the parts of all blocks."""
        rows = self.loss.rows[value]
        self.builder.call(
            lambda x: join_microbatches(x, rows), [stack], self.stack_of[value], value
        )


def _with_part(shape: Sequence[int], dim: int, blocks: int) -> tuple[int, ...]:
    """A shape whose dimension has the tokens of one block."""
    return (*shape[:dim], shape[dim] // blocks, *shape[dim + 1 :])
