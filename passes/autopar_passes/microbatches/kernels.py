"""Decides from a kernel's body whether the kernel keeps rows of a batch independent.

A kernel runs in a microbatch as it was traced: its body cannot be edited. The analysis
follows the body like a step, with the arrays that each point of the grid sees. It finds
the same facts as for a step: which results have rows, which results are sums over the
batch, and whether a row depends on another row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.build import build_graph
from autopar_passes.graph.operators import Operator
from autopar_passes.microbatches.facts import (
    SAME,
    Edits,
    Facts,
    Kind,
    MicrobatchError,
    Pair,
    Split,
    join_splits,
    pair_programs,
    place_of,
)
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    walk,
)
from autopar_passes.program.flatten import flatten
from autopar_passes.rules import manual, pallas_grid

T = TypeVar("T")

PARTITIONED = "custom_partitioning"
# Primitives that, if the analysis refuses them, may make a row depend on other rows.
_OPAQUE = frozenset({PARTITIONED, manual.PRIMITIVE, pallas_grid.PRIMITIVE, "ffi_call"})
# Primitives that only change the type that a value has inside a ``shard_map``.
_SAME_IN_SHARDS = frozenset({"pvary", "pbroadcast", "pcast"})
# A function from the classes of a body's inputs to the classes of its results.
Follow = Callable[[Pair, Facts, Sequence[Split]], tuple[list[Split], Edits]]


class CoupledError(MicrobatchError):
    """The loss of one row of the batch depends, or may depend, on other rows.

    Attributes:
      why: the operator that couples the rows, and how.
    """

    def __init__(
        self, eqn: Equation, why: str, module: str, others: Equation | None
    ) -> None:
        """Describes the coupling, and the option that helps or why none does."""
        self.why = f"{place_of(eqn)} {why}"
        if others is not None:
            super().__init__(
                f"{place_of(others)} takes rows by numbers of the whole batch. A "
                "microbatch does not have all of them, and no option helps: plan with "
                "microbatches=1."
            )
            return
        where = f", in {module}" if module else ""
        if eqn.primitive in _OPAQUE:
            said = f"{self.why}{where}: its rows may depend on each other. "
            how = (
                "runs it on each; what it makes of all of its rows is averaged, and "
                "adds up in the backward pass."
            )
        else:
            said = (
                f"{self.why} before the backward pass{where}: the loss of one row "
                "depends on the others. "
            )
            how = "takes each microbatch for the batch there."
        super().__init__(f'{said}coupled="microbatch" {how}')


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """The computation of a kernel at each point of its grid.

    Attributes:
      program: computes the final contents of the kernel's arrays from the initial
        contents.
      results: which results of the program are results of the kernel.
      state: the number of inputs, after the operands, that hold data of an earlier
        point; the last results are the new data.
      added: values that are summed over shards of rows, and therefore must have no
        rows.
    """

    program: Program
    results: slice
    state: int = 0
    added: tuple[int, ...] = ()


def is_followed(pair: Pair, eqn: Equation) -> bool:
    """Whether a kernel's body has to be followed to find how it treats rows.

    If not, the kernel's grid shows this: a Pallas kernel has the same body for a
    microbatch as for the whole batch.
    """
    if eqn.primitive != pallas_grid.PRIMITIVE:
        return eqn.primitive in (PARTITIONED, manual.PRIMITIVE)
    whole = pair.sources[eqn.index].params
    bodies = (str(params["jaxpr"]) for params in (whole, eqn.params))
    return len(set(bodies)) > 1


def classes(
    pair: Pair, eqn: Equation, given: Sequence[Split], inner: int, follow: Follow
) -> list[Split] | str:
    """Returns the classes of a kernel's results, or why its rows may be coupled.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      eqn: the equation of the kernel, in the program of a microbatch.
      given: the classes of the operands, none of which is a sum.
      inner: the `Split.inner` of the rows that the kernel reads.
      follow: follows a program.
    """
    try:
        made = _classes(pair, eqn, given, inner, follow)
    except MicrobatchError as error:
        why = error.why if isinstance(error, CoupledError) else str(error).rstrip(".")
        return f"is a kernel in which {why}"
    for value, split in zip(eqn.outputs, made, strict=True):
        if pair.has_rows(value) != (split.kind is Kind.ROWS):
            return "is a kernel whose results have other rows than its operands"
    return made


def _classes(
    pair: Pair, eqn: Equation, given: Sequence[Split], inner: int, follow: Follow
) -> list[Split]:
    sources = pair.sources[eqn.index], eqn
    if eqn.primitive == PARTITIONED:
        bodies = [_Body(flatten(e.params["call"]), slice(None)) for e in sources]
    elif eqn.primitive == manual.PRIMITIVE:
        bodies = [_of_shards(pair, e, inner) for e in sources]
    else:
        _check_grids(pair, eqn, inner)
        bodies = [_of_points(e) for e in sources]
    whole, micro = bodies
    own = pair_programs(
        whole.program, micro.program, _ratio(whole.program, micro.program)
    )
    if any(own.has_rows(v) for v in micro.added):
        raise MicrobatchError("rows of several shards are added up")
    more = micro.program.body.inputs[len(given) : own.micro.num_arguments]
    held = [Split(Kind.ROWS, inner) if own.has_rows(v) else SAME for v in more]
    facts = _try(lambda: _facts(own.whole))
    while True:
        found, edits = follow(own, facts, [*given, *held])
        _check_kept(own, edits)
        left = [*found[len(found) - micro.state :], *held[micro.state :]]
        after = [join_splits(a, b) for a, b in zip(held, left, strict=True)]
        if after == held:
            return found[micro.results]
        if None in after:
            raise MicrobatchError("one point of the grid reads what another left")
        held = [split for split in after if split is not None]


def _try(follow: Callable[[], T]) -> T:
    try:
        return follow()
    except Exception as error:  # Tracing a kernel may raise any exception.
        raise MicrobatchError("something is done that cannot be followed") from error


def _ratio(whole: Program, micro: Program) -> int:
    """Returns the ratio of the rows that a body sees for batch and microbatch."""
    pairs = zip(whole.body.inputs, micro.body.inputs, strict=False)
    shapes = [(whole.values[a].shape, micro.values[b].shape) for a, b in pairs]
    sizes = (x for a, b in shapes for x in zip(a, b, strict=False))
    return next((m // n for m, n in sizes if m != n), 1)


def _of_points(eqn: Equation) -> _Body:
    """Returns the computation of a Pallas kernel at a point of its grid."""
    body = eqn.params["jaxpr"]
    program = _try(lambda: flatten(jax_compat.without_refs(body)))
    count = len(eqn.inputs)
    region = program.body
    if region.outputs[:count] != region.inputs[:count]:
        raise MicrobatchError("operands are carried or changed")
    made = slice(count, count + len(eqn.outputs))
    return _Body(program, made, len(region.outputs) - count)


def _check_grids(pair: Pair, eqn: Equation, inner: int) -> None:
    """Checks that each point of the grid sees all rows, or independent blocks of rows.

    Raises:
      MicrobatchError: the rows that a point sees are unknown.
    """
    arrays = (*eqn.inputs, *eqn.outputs)
    at = [pair.dims[a] if isinstance(a, int) else -1 for a in arrays]
    grids: list[tuple[int, ...]] = []
    split = set[int]()
    for source in (pair.sources[eqn.index], eqn):
        seen = pallas_grid.dims_seen(source.params)
        if seen is None:
            raise MicrobatchError("the grid is of a kind that cannot be followed")
        rows = {dims[d] for dims, d in zip(seen, at, strict=True) if d >= 0}
        rows -= {pallas_grid.WHOLE}
        others = {
            dims[k]
            for dims, d in zip(seen, at, strict=True)
            for k in range(len(dims))
            if k != d
        }
        if pallas_grid.UNKNOWN in rows or rows & others or (rows and inner > 1):
            raise MicrobatchError("blocks grow with the rows")
        split |= rows
        grids.append(source.params["grid_mapping"].grid)
    same = {tuple(n for g, n in enumerate(grid) if g not in split) for grid in grids}
    maps = {_index_maps(e) for e in (pair.sources[eqn.index], eqn)}
    if len(same) > 1 or len(maps) > 1:
        raise MicrobatchError("the grid depends on the number of rows")


def _index_maps(eqn: Equation) -> tuple[str, ...]:
    mappings = eqn.params["grid_mapping"].block_mappings
    return tuple(str(m.index_map_jaxpr) for m in mappings)


def _of_shards(pair: Pair, eqn: Equation, inner: int) -> _Body:
    """The computation of a `jax.shard_map` on shards, some of which may be rows.

    Microbatches take their rows from all along the batch, so a shard of a microbatch's
    rows is a part of the same shard of the batch's rows. A value that differs between
    shards is therefore the same for each row as in the whole batch. If rows are dealt
    out in groups, a shard could end inside a group.
    """
    params = eqn.params
    arrays = (*eqn.inputs, *eqn.outputs)
    rows = set[str]()
    for atom, spec in zip(
        arrays, (*params["in_specs"], *params["out_specs"]), strict=True
    ):
        at = pair.dims[atom] if isinstance(atom, int) else -1
        entry = spec[at] if 0 <= at < len(spec) else None
        names = entry if isinstance(entry, tuple) else (entry,)
        rows.update(n for n in names if n is not None)
    if rows and inner > 1:
        raise MicrobatchError("a shard may have a part of the rows that go together")
    program = flatten(jax_compat.ClosedJaxpr(params["jaxpr"], ()))
    same: dict[int, Atom] = {}
    added: list[int] = []
    for told in walk(program.body):
        axes = _axes_of(told)
        if not axes:
            continue
        sums = told.primitive.startswith("psum")
        if told.params.get("axis_index_groups") or not (
            sums or told.primitive in _SAME_IN_SHARDS
        ):
            raise MicrobatchError(
                f"{place_of(told)} is about the shards of all devices"
            )
        for value, atom in zip(told.outputs, told.inputs, strict=True):
            same[value] = same.get(atom, atom) if isinstance(atom, int) else atom
            if sums and not rows.isdisjoint(axes) and isinstance(atom, int):
                added.append(atom)
    return _Body(_replace(program, same), slice(None), added=tuple(added))


def _axes_of(eqn: Equation) -> set[str]:
    """Returns the device axes that an equation in a shard's program refers to."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, tuple) else (named,)
    return {name for name in named if isinstance(name, str)}


def _replace(program: Program, same: Mapping[int, Atom]) -> Program:
    """Returns a program in which given atoms replace values without an equation."""

    def atoms(found: Sequence[Atom]) -> tuple[Atom, ...]:
        return tuple(same.get(a, a) if isinstance(a, int) else a for a in found)

    def region(found: Region) -> Region:
        equations = tuple(
            dataclasses.replace(
                e, inputs=atoms(e.inputs), regions=tuple(map(region, e.regions))
            )
            for e in found.equations
            if same.keys().isdisjoint(e.outputs)
        )
        return Region(found.inputs, equations, atoms(found.outputs))

    return dataclasses.replace(program, body=region(program.body))


def _facts(program: Program) -> Facts:
    """Returns the facts of a body, in which no equation can wait or run ahead."""
    paths = [str(k) for k in range(program.num_arguments)]
    graph = build_graph(
        program, input_paths=paths, carried={}, like=(), share_repeated=False
    )
    operators: dict[int, Operator] = {
        op.equation: op for op in graph.operators if op.equation >= 0
    }
    indices = [e.index for e in program.body.equations]
    none = frozenset[int]()
    return Facts(operators, {}, frozenset(indices), none, none, none)


def _check_kept(pair: Pair, edits: Edits) -> None:
    """Checks that a body needs no edits to be a part of the whole batch's body."""
    changed = (edits.scaled, edits.first, edits.ahead, edits.folded, edits.drawn)
    if any(changed) or edits.replaced:
        raise MicrobatchError("a microbatch has no part of what the whole batch has")
    for a, b in zip(walk(pair.whole.body), walk(pair.micro.body), strict=True):
        if b.index not in edits.kept and not _alike(a.inputs, b.inputs):
            raise MicrobatchError(f"{place_of(b)} reads the number of rows")
    constants = zip(pair.whole.constants, pair.micro.constants, strict=True)
    if not all(np.array_equal(a, b) for a, b in constants):
        raise MicrobatchError("a constant depends on the number of rows")


def _alike(whole: Sequence[Any], micro: Sequence[Any]) -> bool:
    """Whether the scalar constants of two lists of atoms are equal."""
    pairs = [(a, b) for a, b in zip(whole, micro, strict=True) if isinstance(a, Scalar)]
    return all(np.array_equal(a.value, b.value, equal_nan=True) for a, b in pairs)
