"""Pads the rows of a batch, so that a number of devices divides them.

The step is traced on the rows of its batch, and on more rows. Both traces must have the
same operators (`autopar_passes.microbatches.facts`). The padded program has the arrays
of the wider trace and the constants of the step itself, so a mean over 30 rows divides
by 30 also if the rows are padded to 32. The first rows of an array are the rows of the
batch. The rows behind them are *padding*: copies of the first rows of the batch, and
what the step computes from them.

An operator that works row by row leaves padding behind the rows. An operator that
reduces the rows reads an identity of the reduction in place of padding: zero for a sum.
The backward pass begins with equal gradients for all rows. These gradients are made
zero for padding where they begin. Operators that are linear in a gradient keep it zero,
so most gradients of parameters need no mask of their own.

Any other operator that combines rows is refused: a sort along the rows, a loop over
rows that hands values on, rows that an index selects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.microbatches import operators
from autopar_passes.microbatches.draws import can_draw
from autopar_passes.microbatches.facts import (
    RANDOM,
    SAME,
    Kind,
    MicrobatchError,
    Pair,
    Split,
    pair_programs,
    place_of,
    take_scalars,
)
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    needed_equations,
    walk,
)
from autopar_passes.program.flatten import Builder, next_index
from autopar_passes.program.trace import TracedStep
from autopar_passes.rules.factor_rule import FactorKind
from autopar_passes.sums.stacked import ADDITIVE, UNARY

# Running totals: entry n depends on the entries before it, or behind it in reverse.
_RUNNING = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
# Kernels and functions whose bodies are compiled as they are.
_OPAQUE = frozenset({"ffi_call", "pallas_call", "custom_partitioning", "shard_map"})
# Products, which add up over a dimension that both operands have.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# Operators whose result is zero where their first operand is zero.
_LINEAR = UNARY | {
    "broadcast_in_dim", "dynamic_slice", "gather", "reduce_precision",
    "reduce_window_sum", "cumsum", "real", "imag",
}  # fmt: skip


def pad_rows(
    step: TracedStep, wide: TracedStep, graph: OperatorGraph, rows: int, padded: int
) -> TracedStep:
    """Returns a step that computes the same on a batch padded to more rows.

    The inputs and outputs keep their rows. The program pads inputs, and cuts outputs.

    Args:
      step: the step on its batch of ``rows`` rows.
      wide: the same step on ``padded`` rows.
      graph: the operator graph of the step.
      rows: the number of rows, at least 2.
      padded: the number of rows with padding; less than ``2 * rows``.

    Raises:
      MicrobatchError: padding would change the results of the step.
    """
    if not rows < padded < 2 * rows:
        raise MicrobatchError(f"{rows} rows cannot be padded to {padded}.")
    pair = pair_programs(step.program, wide.program, Fraction(rows, padded))
    by_equation = {op.equation: op for op in graph.operators if op.equation >= 0}
    return dataclasses.replace(step, program=_Padder(pair, by_equation, rows).run())


class _Padder:
    """Writes the padded program."""

    def __init__(
        self, pair: Pair, by_equation: Mapping[int, Operator], rows: int
    ) -> None:
        self.pair = pair
        self.by_equation = by_equation
        self.rows = rows
        self.builder = Builder(pair.micro.values, next_index(pair.micro))
        # Values that hold row numbers -> their class.
        self.numbers: dict[int, Split] = {}
        # Broadcasts whose result is masked.
        self.seeds: set[int] = set()
        # Values whose padding is zero.
        self.zero: set[int] = set()
        self.flow = _LinearFlow(pair)
        # (value, number in place of padding) -> the masked value, in this region.
        self.masked: dict[tuple[int, Any], int] = {}

    def run(self) -> Program:
        """Returns the padded program."""
        whole, wide = self.pair.whole, self.pair.micro
        constants = self._constants()
        self._check_values()
        self.zero = self._zeros(wide.body, ())
        given = tuple(map(self._pad_input, wide.body.inputs[: wide.num_arguments]))
        region = self._region(whole.body, wide.body)
        self.builder.equations.extend(region.equations)
        outputs = tuple(map(self._cut_rows, region.outputs))
        needed = needed_equations(self.builder.equations, outputs, effects=True)
        body = Region((*given, *wide.constant_arrays), needed, outputs)
        return Program(tuple(self.builder.values), body, constants)

    # -- the boundary of the program ---------------------------------------------------

    def _constants(self) -> tuple[Any, ...]:
        """The constants; those with rows must begin with the constants of the step."""
        found: list[Any] = []
        wide = self.pair.micro.constant_arrays
        for (value, b), a in zip(wide.items(), self.pair.whole.constants, strict=True):
            if not self.pair.has_rows(value):
                found.append(a)
                continue
            dim = self.pair.dims[value]
            first = jax.lax.slice_in_dim(b, 0, np.shape(a)[dim], axis=dim)
            if not np.array_equal(np.asarray(first), np.asarray(a)):
                raise MicrobatchError(
                    f"a constant of shape {np.shape(a)} has other entries in a batch "
                    "of more rows."
                )
            found.append(b)
        return tuple(found)

    def _check_values(self) -> None:
        """Checks that no array has the rows in several dimensions, or some of them."""
        pair = self.pair
        for eqn in walk(pair.micro.body):
            for value in eqn.outputs:
                dim = pair.dims[value]
                if dim >= 0 and pair.rows_of(value) % self.rows == 0:
                    continue
                if dim != -1:
                    shape = "x".join(map(str, pair.whole.values[value].shape))
                    raise MicrobatchError(
                        f"{place_of(eqn)} makes an array of {shape}, which does not "
                        "have the rows of the batch in one dimension."
                    )

    def _pad_input(self, value: int) -> int:
        """Adds an input with the rows of the batch, and pads it."""
        if not self.pair.has_rows(value):
            return value
        dim, shape = self.pair.dims[value], self.pair.micro.values[value].shape
        given = self.builder.like(self.pair.whole.values[value])
        more = shape[dim] - self.pair.rows_of(value)

        def pad(x: Any) -> Any:
            first = jax.lax.slice_in_dim(x, 0, more, axis=dim)
            return jax.lax.concatenate([x, first], dim)

        self.builder.call(pad, [given], result=value)
        return given

    def _cut_rows(self, atom: Atom) -> Atom:
        """Cuts padding off a value."""
        if not isinstance(atom, int) or not self.pair.has_rows(atom):
            return atom
        dim, rows = self.pair.dims[atom], self.pair.rows_of(atom)
        return self.builder.call(
            lambda x: jax.lax.slice_in_dim(x, 0, rows, axis=dim), [atom]
        )

    # -- equations ---------------------------------------------------------------------

    def _region(self, whole: Region, wide: Region) -> Region:
        outer, self.builder.equations = self.builder.equations, []
        masked, self.masked = self.masked, {}
        for a, b in zip(whole.equations, wide.equations, strict=True):
            self._equation(a, b)
        equations = tuple(self.builder.equations)
        self.builder.equations, self.masked = outer, masked
        outputs = take_scalars(whole.outputs, wide.outputs)
        return Region(wide.inputs, equations, tuple(outputs))

    def _equation(self, whole: Equation, wide: Equation) -> None:
        inputs = take_scalars(whole.inputs, wide.inputs)
        regions: tuple[Region, ...] = ()
        made = wide
        if wide.regions:
            self._check_loop(whole, wide)
            pairs = zip(whole.regions, wide.regions, strict=True)
            regions = tuple(self._region(a, b) for a, b in pairs)
        elif wide.source.effects:
            made = self._check_call(whole)
            inputs = [self._cut_rows(a) for a in inputs]
        else:
            for slot, number in self._masks(whole, wide).items():
                inputs[slot] = self._mask(wide, slot, number)
        made = dataclasses.replace(made, inputs=tuple(inputs), regions=regions)
        if wide.index not in self.seeds:
            self.builder.equations.append(made)
            return
        (value,) = wide.outputs
        unmasked = self.builder.like(self.pair.micro.values[value])
        made = dataclasses.replace(made, outputs=(unmasked,))
        self.builder.equations.append(made)
        self._keep_rows(unmasked, value, 0, wide.name_stack, result=value)

    def _check_call(self, whole: Equation) -> Equation:
        """A call of the host, which gets the rows of the batch."""
        if any(map(self.pair.has_rows, whole.outputs)):
            raise MicrobatchError(f"{place_of(whole)} makes rows outside of JAX.")
        return whole

    def _mask(self, eqn: Equation, slot: int, number: Any) -> int:
        """An operand with a number in place of padding."""
        value = eqn.inputs[slot]
        assert isinstance(value, int)
        key = value, number
        if key not in self.masked:
            stack = eqn.name_stack
            self.masked[key] = self._keep_rows(value, value, number, stack)
        return self.masked[key]

    def _keep_rows(
        self, source: int, like: int, number: Any, stack: str, result: int | None = None
    ) -> int:
        dim, rows = self.pair.dims[like], self.pair.rows_of(like)
        made = self.builder.call(
            lambda x: keep_rows(x, dim, rows, number), [source], stack, result
        )
        assert isinstance(made, int)
        return made

    def _check_loop(self, whole: Equation, wide: Equation) -> None:
        """Checks a loop over rows: no row may hand anything to the next one."""
        if wide.primitive != "scan":
            return
        if whole.params["length"] == wide.params["length"]:
            return
        consts, carry = wide.params["num_consts"], wide.params["num_carry"]
        slices = (*wide.inputs[consts + carry :], *wide.outputs)
        mapped = all(isinstance(a, int) and self.pair.dims[a] == 0 for a in slices)
        if carry or not mapped or any(map(self._has_rows, wide.inputs[:consts])):
            raise MicrobatchError(f"{place_of(wide)} goes through the rows one by one.")

    # -- how operators treat rows ------------------------------------------------------

    def _has_rows(self, atom: Atom) -> bool:
        return isinstance(atom, int) and self.pair.has_rows(atom)

    def _class(self, atom: Atom) -> Split:
        if not isinstance(atom, int) or not self.pair.has_rows(atom):
            return SAME
        inner = self.pair.rows_of(atom) // self.rows
        return self.numbers.get(atom, Split(Kind.ROWS, inner))

    def _masks(self, whole: Equation, eqn: Equation) -> dict[int, Any]:
        """The operands that are masked, each with the number in place of padding."""
        if not any(map(self._has_rows, eqn.inputs)):
            self._check_without_rows(whole, eqn)
            return {}
        if eqn.primitive == "optimization_barrier":
            return {}
        given = [self._class(a) for a in eqn.inputs]
        if any(c.kind is Kind.POSITION for c in given):
            found = operators.positions(self.pair, eqn, given)
            if found is not None:
                if found.kind is Kind.POSITION:
                    self.numbers[eqn.outputs[0]] = found
                return {}
        why = self._combines(eqn)
        if why is None:
            why = self._by_rule(eqn)
        if isinstance(why, str):
            raise MicrobatchError(f"{place_of(eqn)} {why}.")
        return why

    def _check_without_rows(self, whole: Equation, eqn: Equation) -> None:
        """Checks an operator that reads no rows, and may make some."""
        made = [v for v in eqn.outputs if self.pair.has_rows(v)]
        if not made:
            if eqn.primitive not in _OPAQUE and _sizes(whole) != _sizes(eqn):
                raise MicrobatchError(f"{place_of(eqn)} depends on the number of rows.")
        elif eqn.primitive == "iota":
            found = operators.positions(self.pair, eqn, [])
            if found is not None and found.kind is Kind.POSITION:
                self.numbers[made[0]] = found
        elif eqn.primitive in RANDOM:
            if not self._draws_first(eqn):
                raise MicrobatchError(f"{place_of(eqn)} draws other numbers for rows.")
        elif eqn.primitive not in operators.SPREADING:
            raise MicrobatchError(f"{place_of(eqn)} makes rows that differ.")

    def _draws_first(self, eqn: Equation) -> bool:
        """Whether the first rows of more random numbers are the numbers of the batch.

        JAX derives the bits of an element from its index in the array. The first rows
        have the same indices if the rows are the first dimension.
        """
        (key,), (made,) = eqn.arrays[:1], eqn.outputs
        of = self.pair.micro.values
        first = math.prod(of[made].shape[: self.pair.dims[made]]) == 1
        return first and not of[key].shape and can_draw(eqn, of[key].dtype)

    def _combines(self, eqn: Equation) -> dict[int, Any] | str | None:
        """The masks, or why an operator needs more than its own rows.

        None: its sharding rule says so.
        """
        value = next(a for a in eqn.inputs if self._has_rows(a))
        assert isinstance(value, int)
        dim, made = self.pair.dims[value], self.pair.dims[eqn.outputs[0]]
        params, kind = eqn.params, eqn.primitive
        cut = kind in ("slice", "pad") and made == dim and not self._same_rows(eqn)
        if kind in _OPAQUE:
            return "is a kernel, which reads all rows"
        if operators.is_moved(self.pair, eqn) or cut:
            return "takes some of the rows"
        if kind == "concatenate" and params["dimension"] == dim:
            return "puts something beside the rows"
        if kind == "split" and params["axis"] == dim:
            return "takes some of the rows"
        if kind == "rev" and dim in params["dimensions"]:
            return "turns the rows around"
        if kind in _RUNNING and params["axis"] == dim:
            return "goes through the rows from behind" if params["reverse"] else {}
        if kind == "reshape":
            return {} if self._keeps_order(value, eqn.outputs[0]) else "groups rows"
        if kind in operators.KEYED:
            arrays = [v for v in (*eqn.arrays, *eqn.outputs) if self.pair.has_rows(v)]
            one = len({self.pair.dims[v] for v in arrays}) == 1
            keys = self._has_rows(eqn.inputs[0]) or kind == "random_fold_in"
            return {} if one and keys else "draws other numbers for rows"
        return (
            "picks rows by an index" if operators.indexes_rows(self.pair, eqn) else None
        )

    def _same_rows(self, eqn: Equation) -> bool:
        """Whether the result of an operator has as many rows as its operand."""
        return self.pair.rows_of(eqn.arrays[0]) == self.pair.rows_of(eqn.outputs[0])

    def _keeps_order(self, before: int, after: int) -> bool:
        """Whether a reshape keeps padding behind the rows.

        It does if the dimensions in front of the rows have as many elements as before.
        """
        if not self.pair.has_rows(after):
            return False
        one, other = (
            self.pair.micro.values[v].shape[: self.pair.dims[v]]
            for v in (before, after)
        )
        return math.prod(one) == math.prod(other)

    def _by_rule(self, eqn: Equation) -> dict[int, Any] | str:
        """The masks that follow from an operator's factor of the rows."""
        rule, combines = self.by_equation[eqn.index].rule, "brings rows together"
        of = [
            dims[self.pair.dims[atom]]
            for atom, dims in zip(
                (*eqn.inputs, *eqn.outputs),
                (*rule.operands, *rule.results),
                strict=True,
            )
            if isinstance(atom, int) and self.pair.has_rows(atom)
        ]
        if len(set(of)) != 1 or len(of[0]) != 1:
            return combines
        factor, made = of[0][0], [self.pair.has_rows(v) for v in eqn.outputs]
        if all(made):
            return {} if rule.kinds[factor] is FactorKind.PASS else combines
        if any(made) or rule.kinds[factor] is not FactorKind.REDUCE:
            return combines
        found = self._reduction(eqn)
        return combines if found is None else found

    def _reduction(self, eqn: Equation) -> dict[int, Any] | None:
        """The mask of an operator that reduces the rows; None if it is not known."""
        given = [k for k, a in enumerate(eqn.inputs) if self._has_rows(a)]
        arrays = {k: v for k in given if isinstance(v := eqn.inputs[k], int)}
        if eqn.primitive in _PRODUCTS:
            slot = min(given, key=lambda k: self.pair.micro.values[arrays[k]].size)
            zero = any(v in self.zero for v in arrays.values())
            return {} if zero else {slot: 0}
        if eqn.primitive == "scatter-add":
            return {2: 0} if 2 in given and arrays[2] not in self.zero else {}
        number = _identity(eqn.primitive, self.pair.micro.values[arrays[0]].dtype)
        if number is None or given != [0]:
            return None
        return {} if number == 0 and arrays[0] in self.zero else {0: number}

    # -- values whose padding is zero --------------------------------------------------

    def _zeros(self, region: Region, given: Iterable[int]) -> set[int]:
        """The values of a region whose padding is zero, and the broadcasts to mask.

        Args:
          region: the region, of the wide program.
          given: the inputs of the region whose padding is zero.
        """
        zero = set(given)
        for eqn in region.equations:
            if eqn.regions:
                zero |= self._zeros_of_loop(eqn, zero)
            elif any(map(self.pair.has_rows, eqn.outputs)):
                zero.update(self._zero_results(eqn, zero))
        return zero

    def _zero_results(self, eqn: Equation, zero: set[int]) -> Sequence[int]:
        given = [self._is_zero(a, zero) for a in eqn.inputs]
        kind = eqn.primitive
        if kind == "optimization_barrier":
            return [v for v, is_zero in zip(eqn.outputs, given, strict=True) if is_zero]
        if self._begins_backward(eqn) and not given[0]:
            self.seeds.add(eqn.index)
            return eqn.outputs
        if kind == "cumsum" and eqn.params["axis"] == self.pair.dims[eqn.outputs[0]]:
            return ()
        if kind in _PRODUCTS or kind == "mul":
            found = any(given)
        elif kind in ADDITIVE:
            found = all(given)
        elif kind == "select_n":
            found = all(given[1:])
        elif kind in ("pad", "dynamic_update_slice"):
            found = given[0] and given[1]
        elif kind == "scatter-add":
            found = given[0] and given[2]
        else:
            found = kind in _LINEAR and given[0]
        return eqn.outputs if found else ()

    def _is_zero(self, atom: Atom, zero: set[int]) -> bool:
        known = isinstance(atom, int) and atom in zero
        return known or operators.is_zero(self.pair.made_by, atom)

    def _begins_backward(self, eqn: Equation) -> bool:
        """Whether an operator makes equal gradients of all rows.

        The backward pass is linear in these gradients. So zeros in place of padding
        cannot become the divisor of anything.
        """
        if eqn.primitive != "broadcast_in_dim" or self._has_rows(eqn.inputs[0]):
            return False
        if self.by_equation[eqn.index].role is not Role.BACKWARD:
            return False
        return self.flow.stays_linear(eqn.outputs[0])

    def _zeros_of_loop(self, eqn: Equation, zero: set[int]) -> set[int]:
        """The values whose padding is zero in a loop or branch, and its results.

        A carried value counts as zero as long as each iteration leaves it zero.
        """
        given = [self._is_zero(a, zero) for a in eqn.inputs]
        if eqn.primitive == "cond":
            found, ends = set[int](), list[list[bool]]()
            for region in eqn.regions:
                inner = self._zeros(region, _choose_values(region.inputs, given[1:]))
                ends.append([self._is_zero(a, inner) for a in region.outputs])
                found |= inner
            return found.union(
                _choose_values(eqn.outputs, map(all, zip(*ends, strict=True)))
            )
        body, first = eqn.regions[-1], 0
        if eqn.primitive == "scan":
            first, count = eqn.params["num_consts"], eqn.params["num_carry"]
            if eqn.params["length"] != self.pair.sources[eqn.index].params["length"]:
                given = [False] * len(given)
        else:
            tests = eqn.params["cond_nconsts"]
            first, count = eqn.params["body_nconsts"], len(eqn.outputs)
            given = given[tests:]
        while True:
            inner = self._zeros(body, _choose_values(body.inputs, given))
            ends = [self._is_zero(a, inner) for a in body.outputs]
            left = [a and b for a, b in zip(given[first:], ends[:count], strict=False)]
            if left == given[first : first + count]:
                break
            given[first : first + count] = left
        ends = [*left, *ends[count:]]
        return inner.union(_choose_values(eqn.outputs, ends))


class _LinearFlow:
    """Follows values with rows through operators that are linear in them."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.readers: dict[int, list[tuple[Equation, int]]] = {}
        # Value in a region -> the values that it becomes outside, or in the next turn.
        self.becomes: dict[int, list[int]] = {}
        for eqn in walk(pair.micro.body):
            for slot, atom in enumerate(eqn.inputs):
                if isinstance(atom, int):
                    self.readers.setdefault(atom, []).append((eqn, slot))
            for a, b in _handed_out(eqn):
                if isinstance(a, int):
                    self.becomes.setdefault(a, []).append(b)

    def stays_linear(self, value: int) -> bool:
        """Whether all operators are linear in a value, until they reduce its rows."""
        left, seen = [value], {value}
        while left:
            value = left.pop()
            after = list(self.becomes.get(value, ()))
            for eqn, slot in self.readers.get(value, ()):
                if eqn.regions:
                    after += _handed_in(eqn, slot)
                elif _is_linear(eqn.primitive, slot):
                    after += [v for v in eqn.outputs if self.pair.has_rows(v)]
                else:
                    return False
            left += [v for v in after if v not in seen]
            seen.update(after)
        return True


def _is_linear(kind: str, slot: int) -> bool:
    """Whether an operator is linear in one of its operands."""
    if kind == "select_n":
        return slot > 0
    if kind in ("pad", "dynamic_update_slice"):
        return slot < 2
    if kind == "scatter-add":
        return slot != 1
    every = kind in _PRODUCTS or kind in ADDITIVE
    return (
        every
        or kind in ("mul", "optimization_barrier")
        or (kind in _LINEAR and slot == 0)
    )


def _handed_in(eqn: Equation, slot: int) -> list[int]:
    """The inputs of regions that an operand of a loop or branch becomes."""
    if eqn.primitive == "scan":
        return [eqn.regions[0].inputs[slot]]
    if eqn.primitive == "cond":
        return [region.inputs[slot - 1] for region in eqn.regions if slot]
    test, body = eqn.regions
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if slot < tests:
        return [test.inputs[slot]]
    inner = [body.inputs[slot - tests]]
    return inner + ([test.inputs[slot - bodies]] if slot >= tests + bodies else [])


def _handed_out(eqn: Equation) -> Iterator[tuple[Atom, int]]:
    """Yields each result of a region with the values that it becomes."""
    if not eqn.regions:
        return
    loops = eqn.primitive != "cond"
    for region in eqn.regions[-1:] if loops else eqn.regions:
        yield from zip(region.outputs, eqn.outputs, strict=True)
    if eqn.primitive == "scan":
        first, count = eqn.params["num_consts"], eqn.params["num_carry"]
        body = eqn.regions[0]
        yield from zip(
            body.outputs[:count], body.inputs[first : first + count], strict=True
        )
    elif loops:
        test, body = eqn.regions
        for region, first in (
            (test, eqn.params["cond_nconsts"]),
            (body, eqn.params["body_nconsts"]),
        ):
            yield from zip(body.outputs, region.inputs[first:], strict=True)


def keep_rows(x: Any, dim: int, rows: int, number: Any) -> Any:
    """An array with a number in place of the entries behind its first rows.

    Args:
      x: the array.
      dim: the dimension that has the rows.
      rows: the number of rows to keep.
      number: the number.
    """
    index = jax.lax.iota(np.int32, x.shape[dim])
    kept = jax.lax.broadcast_in_dim(jax.lax.lt(index, np.int32(rows)), x.shape, (dim,))
    return jax.lax.select(kept, x, jax.lax.full_like(x, number))


def _choose_values(values: Iterable[int], which: Iterable[bool]) -> list[int]:
    return [v for v, chosen in zip(values, which, strict=True) if chosen]


def _sizes(eqn: Equation) -> list[Any]:
    """The parameters of an operator that are sizes."""
    found = sorted(eqn.params.items())
    return [size for _, size in found if isinstance(size, (int, tuple))]


def _identity(kind: str, dtype: Any) -> Any:
    """The number that does not change a reduction; None for an unknown reduction."""
    match kind:
        case "reduce_sum" | "reduce_or":
            return 0
        case "reduce_and":
            return True if dtype.kind == "b" else -1
        case "reduce_max" | "reduce_min":
            low = kind == "reduce_max"
            if dtype.kind == "b":
                return not low
            if operators.is_float(dtype):
                return -math.inf if low else math.inf
            limits = jnp.iinfo(dtype)
            return int(limits.min if low else limits.max)
        case _:
            return None
