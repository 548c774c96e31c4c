"""Finds how a step can be split into microbatches, or why it cannot be split."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.operators import OperatorGraph, update_equations
from autopar_passes.graph.row_orders import find_row_orders
from autopar_passes.microbatches.draws import draw_rows
from autopar_passes.microbatches.facts import (
    SAME,
    Combine,
    Crossing,
    Edits,
    Facts,
    Kind,
    Microbatched,
    MicrobatchError,
    Pair,
    Rows,
    facts,
    pair_programs,
    place_of,
    take_scalars,
)
from autopar_passes.microbatches.follow import Follower
from autopar_passes.microbatches.operators import Grouped, is_float
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    needed_equations,
)
from autopar_passes.program.flatten import Builder, next_index
from autopar_passes.program.trace import TracedStep

# Writes the program of a microbatch from the classes of values and the edits (`Edits`).


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """The program of a microbatch, rewritten to compute parts of the batch's values.

    Attributes:
      program: the rewritten program. Its inputs are the step's own inputs, then the
        microbatch's number if it is needed, then the values of ``ahead`` and
        ``gathered``.
      number: whether the program takes the microbatch's number.
      ahead: values that are computed from the whole batch beforehand; the program takes
        them as inputs.
      parts: the number of values of ``ahead``, counted from the first, that are divided
        among the microbatches.
      gathered: values of microbatches whose rows the program takes for all microbatches
        together.
    """

    program: Program
    number: bool
    ahead: tuple[int, ...]
    parts: int
    gathered: tuple[int, ...]


def rewritten(pair: Pair, edits: Edits, once: Collection[int]) -> Rewritten:
    """Writes the program of a microbatch.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      edits: the changes to the program.
      once: indices of the equations that run once, with the rows of the whole batch.
    """
    return _WriterOfRows(pair, edits, once).run()


class _WriterOfRows:
    def __init__(self, pair: Pair, edits: Edits, once: Collection[int]) -> None:
        self.pair = pair
        self.edits = edits
        self.once = once
        self.builder = Builder(pair.micro.values, next_index(pair.micro))
        self.number: int | None = None
        # For each open region: value of the program -> the input of the region that
        # holds it.
        self.taken: list[dict[int, int]] = []
        self.given: dict[int, int] = {}
        # Inputs of equations that run once: inputs with all rows, and inputs that join
        # the rows of all microbatches.
        self.whole: dict[int, int] = {}
        self.gathered: dict[int, int] = {}

    def run(self) -> Rewritten:
        micro = self.pair.micro
        if self.edits.first or self.edits.folded or self.edits.drawn:
            self.number = self.builder.value((), jnp.dtype("int32"))
        region = self.region(self.pair.whole.body, micro.body)
        read = [*self.gathered, *region.outputs]
        equations = needed_equations(region.equations, read, effects=True)
        body = Region(self.inputs(), equations, region.outputs)
        # A constant with rows becomes an input, computed ahead from the constant of the
        # whole batch.
        constants = tuple(
            a if np.shape(a) == np.shape(b) else b
            for a, b in zip(self.pair.whole.constants, micro.constants, strict=True)
        )
        program = Program(tuple(self.builder.values), body, constants)
        return Rewritten(
            program,
            self.number is not None,
            (*self.given, *self.whole),
            len(self.given),
            tuple(self.gathered),
        )

    def inputs(self) -> tuple[int, ...]:
        micro = self.pair.micro
        own = micro.body.inputs[: micro.num_arguments]
        number = () if self.number is None else (self.number,)
        taken = (*self.given.values(), *self.whole.values(), *self.gathered.values())
        return (*own, *number, *taken, *micro.constant_arrays)

    def region(self, whole: Region, micro: Region) -> Region:
        outer, self.builder.equations = self.builder.equations, []
        for a, b in zip(whole.equations, micro.equations, strict=True):
            if a.index in self.once:
                self.late(a)
            else:
                self.equation(a, b)
        equations = tuple(self.builder.equations)
        self.builder.equations = outer
        outputs = take_scalars(whole.outputs, micro.outputs)
        return Region(micro.inputs, equations, tuple(map(self.read, outputs)))

    def read(self, atom: Atom) -> Atom:
        """Returns an atom, or the input that replaces it by the whole batch's value."""
        replaced = isinstance(atom, int) and atom in self.edits.replaced
        if not replaced or not isinstance(atom, int):
            return atom
        return self.take(self.ahead(atom))

    def ahead(self, value: int) -> int:
        """Returns the input that takes a value computed from the whole batch."""
        if value not in self.given:
            part = self.pair.has_rows(value)
            of = (self.pair.micro if part else self.pair.whole).values[value]
            self.given[value] = self.builder.value(of.shape, of.dtype)
        return self.given[value]

    def equation(self, whole: Equation, micro: Equation) -> None:
        inputs = list(micro.inputs)
        if micro.index not in self.edits.kept:
            inputs = take_scalars(whole.inputs, micro.inputs)
        read = [
            self.operand(micro, slot, self.read(atom))
            for slot, atom in enumerate(inputs)
        ]
        regions: list[Region] = []
        taken: list[dict[int, int]] = []
        for a, b in zip(whole.regions, micro.regions, strict=True):
            self.taken.append({})
            regions.append(self.region(a, b))
            taken.append(self.taken.pop())
        if micro.index in self.edits.drawn:
            self.draw(whole, micro, read[0])
            return
        made = dataclasses.replace(micro, inputs=tuple(read), regions=tuple(regions))
        self.builder.equations.append(self.with_taken(made, taken))

    def late(self, eqn: Equation) -> None:
        """Writes an equation that runs once, on the rows of the whole batch."""
        for inner in (eqn, *eqn.inner):
            made = (*inner.outputs, *(v for r in inner.regions for v in r.inputs))
            for value in made:
                self.builder.values[value] = self.pair.whole.values[value]
        inputs = tuple(map(self.late_operand, eqn.inputs))
        self.builder.equations.append(dataclasses.replace(eqn, inputs=inputs))

    def late_operand(self, atom: Atom) -> Atom:
        """Returns an operand, with all the batch's rows, of an equation run once."""
        if not isinstance(atom, int) or self.pair.dims[atom] == -1:
            return self.read(atom)
        maker = self.pair.made_by.get(atom)
        if maker is not None and maker.index in self.once:
            return atom
        known = maker is None or atom in self.edits.replaced | self.edits.counted
        among = self.whole if known else self.gathered
        if atom not in among:
            among[atom] = self.builder.like(self.pair.whole.values[atom])
        return among[atom]

    def draw(self, whole: Equation, micro: Equation, key: Atom) -> None:
        """Draws a microbatch's random numbers, as the whole batch draws them."""
        assert isinstance(key, int)
        assert self.number is not None
        (value,) = micro.outputs
        ahead = len(self.builder.values[key].shape)
        rows = Rows(self.pair.dims[value] - ahead, self.edits.drawn[micro.index])
        shape = tuple(whole.params["shape"])
        self.builder.call(
            lambda k, n: draw_rows(micro, k, n, shape=shape, rows=rows),
            [key, self.take(self.number)],
            micro.name_stack,
            value,
        )

    def take(self, value: int) -> int:
        """Returns the innermost region's input for a value of the program."""
        for region in self.taken:
            if value not in region:
                of = self.builder.values[value]
                region[value] = self.builder.value(of.shape, of.dtype)
        return self.taken[-1][value] if self.taken else value

    def with_taken(self, eqn: Equation, taken: Sequence[dict[int, int]]) -> Equation:
        """Returns an equation that passes outer values into its regions."""
        values = list(dict.fromkeys(v for region in taken for v in region))
        if not values:
            return eqn
        params = dict(eqn.params)
        at, handing = 0, list(range(len(eqn.regions)))
        if eqn.primitive == "scan":
            params["num_consts"] += len(values)
        elif eqn.primitive == "while":
            if taken[0]:
                raise MicrobatchError(
                    f"{place_of(eqn)} tests what is drawn or mixed for each microbatch."
                )
            at, handing = params["cond_nconsts"], [1]
            params["body_nconsts"] += len(values)
        else:
            at = 1
        regions = list(eqn.regions)
        for k in handing:
            inner = [taken[k].get(v, -1) for v in values]
            of = [self.builder.values[v] for v in values]
            inner = [
                self.builder.value(o.shape, o.dtype) if v < 0 else v
                for v, o in zip(inner, of, strict=True)
            ]
            regions[k] = dataclasses.replace(
                regions[k], inputs=(*inner, *regions[k].inputs)
            )
        given = [self.take(v) for v in values]
        return dataclasses.replace(
            eqn,
            source=eqn.source.replace(params=params),
            inputs=(*eqn.inputs[:at], *given, *eqn.inputs[at:]),
            regions=tuple(regions),
        )

    def operand(self, eqn: Equation, slot: int, atom: Atom) -> Atom:
        """Returns an operand of an equation, after applying its edits."""
        key = (eqn.index, slot)
        if key in self.edits.ahead:
            return self.take(self.ahead(self.edits.ahead[key]))
        if key in self.edits.scaled:
            factor = self.edits.scaled[key]
            if isinstance(atom, Scalar):
                scaled = np.asarray(atom.value, atom.aval.dtype) * factor
                return Scalar(scaled.astype(atom.aval.dtype)[()], atom.aval)
            number = np.asarray(factor, self.builder.values[atom].dtype)[()]
            return self.builder.call(lambda x: x * number, [atom], eqn.name_stack)
        if key in self.edits.first:
            return self.first(eqn, atom)
        if key in self.edits.folded:
            assert isinstance(atom, int)
            assert self.number is not None
            number = self.take(self.number)
            return self.builder.call(_fold_key, [atom, number], eqn.name_stack)
        return atom

    def first(self, eqn: Equation, atom: Atom) -> Atom:
        """Returns an operand that is zero in all microbatches except the first."""
        assert self.number is not None
        number = self.take(self.number)
        if isinstance(atom, Scalar):
            value = np.asarray(atom.value, atom.aval.dtype)[()]
            return self.builder.call(
                lambda n: jax.lax.select(n == 0, value, np.zeros_like(value)),
                [number],
                eqn.name_stack,
            )
        return self.builder.call(
            lambda x, n: jax.lax.mul(
                x, jax.lax.broadcast((n == 0).astype(x.dtype), x.shape)
            ),
            [atom, number],
            eqn.name_stack,
        )


def _fold_key(key: Any, number: Any) -> Any:
    """Makes random keys that differ in each microbatch.

    ``key`` may be an array of raw keys, ``(..., words)``.
    """
    if jax_compat.is_extended(key.dtype):
        fold, rank = jax.random.fold_in, key.ndim
    else:
        fold, rank = _folded_raw, key.ndim - 1
    for _ in range(rank):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, number)


def _folded_raw(key: Any, number: Any) -> Any:
    return jax.random.key_data(
        jax.random.fold_in(jax.random.wrap_key_data(key), number)
    )


_COMBINED = {
    Kind.SAME: Combine.SAME,
    Kind.LOCAL: Combine.MEAN,
    Kind.SUM: Combine.SUM,
    Kind.ROWS: Combine.ROWS,
}


def split_step(
    whole: TracedStep,
    micro: TracedStep,
    graph: OperatorGraph,
    count: int,
    *,
    couple: bool,
) -> Microbatched:
    """Splits a step into microbatches without changing its results.

    Args:
      whole: the step on the whole batch.
      micro: the same step on the rows of one microbatch.
      graph: the operator graph of the whole step.
      count: number of microbatches.
      couple: whether each microbatch may compute a value that couples the rows of a
        batch from its own rows only. Statistics of batch normalisation are always
        computed in this way.

    Raises:
      MicrobatchError: the step cannot be split.
    """
    pair = pair_programs(whole.program, micro.program, count)
    if not any(pair.has_rows(v) for v in pair.whole.body.inputs):
        raise MicrobatchError("no argument has rows of a batch.")
    known, hoisted = facts(pair, graph), frozenset[int]()
    while True:
        follower, unit = _follow(pair, known, couple=couple, hoisted=hoisted)
        made = rewritten(pair, follower.known.edits, follower.once)
        again = _made_twice(pair, follower, made)
        if not again:
            break
        hoisted |= again
    first = pair.micro.num_arguments
    behind = first + made.number + len(made.ahead)
    return Microbatched(
        microbatches=count,
        traced=_named_step(micro, made),
        once=frozenset(follower.once),
        crossings=_crossings(pair, follower),
        batch=_batch(pair, unit) | _rows_ahead(pair, follower, made),
        number=first if made.number else None,
        ahead=_ahead(pair, made),
        given=tuple(range(first + made.number, behind)),
        gathered={behind + k: v for k, v in enumerate(made.gathered)},
        local=tuple(follower.local),
    )


def unsplit(
    whole: TracedStep, graph: OperatorGraph, dims: Mapping[int, int]
) -> Microbatched:
    """Returns a step whose batch is a single microbatch.

    Args:
      whole: the step.
      graph: the operator graph of the step.
      dims: flat input of the batch -> the dimension of its rows.
    """
    body = whole.program.body
    # A callback without results may run after all microbatches, so it runs once.
    told = (e.index for e in body.equations if e.source.effects and not e.outputs)
    once = update_equations(whole.program, graph).union(told)
    made = {v for e in body.equations if e.index not in once for v in e.outputs}
    read = [*body.outputs]
    for eqn in body.equations:
        if eqn.index in once:
            read.extend(eqn.inputs)
    crossings = tuple(
        Crossing(v, Combine.SUM if whole.program.values[v].floating else Combine.SAME)
        for v in dict.fromkeys(a for a in read if isinstance(a, int) and a in made)
    )
    return Microbatched(
        microbatches=1,
        traced=whole,
        once=once,
        crossings=crossings,
        batch={k: Rows(dim) for k, dim in dims.items()},
    )


def _follow(
    pair: Pair, known: Facts, *, couple: bool, hoisted: frozenset[int]
) -> tuple[Follower, int]:
    """Follows all values; also returns the number of rows that must stay together."""
    unit = 1
    while True:
        follower = Follower(
            pair,
            known,
            unit,
            couple=couple,
            hoisted=hoisted,
            regrouped=_rows_to_group(pair, known, unit),
        )
        try:
            follower.run()
        except Grouped as grouped:
            unit *= grouped.args[0]
            _check_unit(pair, unit)
        else:
            return follower, unit


def _rows_to_group(pair: Pair, known: Facts, unit: int) -> frozenset[int]:
    """The equations on rows that each microbatch may sort alone, to group them."""
    rows = (pair.rows_of(v) for v in pair.whole.body.inputs if pair.has_rows(v))
    groups = next(rows, 1) // unit
    rules = {index: op.rule for index, op in known.operators.items()}
    whole = find_row_orders(pair.whole, rules, groups)
    if not whole or groups % pair.count:
        return frozenset()
    micro = find_row_orders(pair.micro, rules, groups // pair.count)
    return whole.inside if micro.moves == whole.moves else frozenset()


def _rows_ahead(pair: Pair, follower: Follower, made: Rewritten) -> dict[int, Rows]:
    """The rows of values computed ahead, of which each microbatch takes its part."""
    first = pair.micro.num_arguments + made.number
    return {
        first + k: Rows(pair.dims[v], max(1, follower.known.of_whole(v).inner))
        for k, v in enumerate(made.ahead[: made.parts])
        if pair.has_rows(v)
    }


def _made_twice(pair: Pair, follower: Follower, made: Rewritten) -> frozenset[int]:
    """Returns equations that run before the microbatches, and should run only there.

    If microbatches ran these equations again, they would draw different numbers, or
    compute rows again that are already known for the whole batch.
    """
    folded = {index for index, _ in follower.known.edits.folded}
    handed = set(_handed_on(pair, follower)) - follower.known.edits.replaced
    ahead = needed_equations(pair.whole.body.equations, made.ahead)
    return frozenset(
        eqn.index
        for eqn in ahead
        if eqn.index not in follower.hoisted
        and not (
            folded.isdisjoint(e.index for e in (eqn, *eqn.inner))
            and handed.isdisjoint(eqn.outputs)
        )
    )


def _check_unit(pair: Pair, unit: int) -> None:
    for value in pair.micro.body.inputs:
        rows = (
            pair.micro.values[value].shape[pair.dims[value]]
            if pair.has_rows(value)
            else 0
        )
        if rows % unit:
            raise MicrobatchError(
                f"{unit} rows belong together, and a microbatch would have {rows}."
            )


def _batch(pair: Pair, unit: int) -> dict[int, Rows]:
    return {
        k: Rows(pair.dims[v], unit)
        for k, v in enumerate(pair.micro.body.inputs[: pair.micro.num_arguments])
        if pair.has_rows(v)
    }


def _named_step(micro: TracedStep, made: Rewritten) -> TracedStep:
    """Returns the step on one microbatch, with names for the added inputs."""
    number = ("microbatch",) if made.number else ()
    given = (f"whole batch/{k}" for k in range(len(made.ahead)))
    gathered = (f"all microbatches/{k}" for k in range(len(made.gathered)))
    paths = (*micro.input_paths, *number, *given, *gathered)
    return dataclasses.replace(micro, program=made.program, input_paths=paths)


def _ahead(pair: Pair, made: Rewritten) -> Program | None:
    """The program of the values that are computed from the whole batch, or None."""
    if not made.ahead:
        return None
    whole = pair.whole
    equations = needed_equations(whole.body.equations, made.ahead)
    region = Region(whole.body.inputs, equations, made.ahead)
    return Program(whole.values, region, whole.constants)


def _handed_on(pair: Pair, follower: Follower) -> dict[int, Equation]:
    """Returns the microbatches' values that are used after the last microbatch."""
    made = {
        v: eqn
        for eqn in pair.micro.body.equations
        if eqn.index not in follower.once
        for v in eqn.outputs
    }
    read = list(pair.micro.body.outputs)
    for eqn in pair.micro.body.equations:
        if eqn.index in follower.once:
            read.extend(eqn.inputs)
    return {a: made[a] for a in read if isinstance(a, int) and a in made}


def _crossings(pair: Pair, follower: Follower) -> tuple[Crossing, ...]:
    """The crossings, each with the way in which microbatches' values are combined."""
    found: list[Crossing] = []
    for value, maker in _handed_on(pair, follower).items():
        split = follower.known.classes[value]
        if value in follower.known.edits.replaced | follower.known.edits.counted:
            # The value of the whole batch is already available, so microbatches are not
            # combined.
            split = SAME
        combine = _COMBINED.get(split.kind)
        dtype = pair.micro.values[value].dtype
        if combine is None or (combine is Combine.MEAN and not is_float(dtype)):
            raise MicrobatchError(
                f"{place_of(maker)} makes a result of each microbatch that is no "
                "part of one of the whole batch."
            )
        rows = Rows(pair.dims[value], max(1, split.inner))
        found.append(
            Crossing(value, combine, rows if combine is Combine.ROWS else None)
        )
    return tuple(found)
