"""Pallas kernels: the dimensions that their grid proves to be independent.

A kernel runs once for each point of a grid. Index maps state which block of each array
a point reads or writes. A dimension of the grid may be sharded over devices if the
kernel's results cannot depend on this sharding. The conditions are:

* Each index map either ignores the dimension or returns it unchanged. It may also
  return the index divided by an integer and rounded down. Key heads that several query
  heads share need such a map.
* The blocks tile the arrays, and every result that is read has a separate block for
  each point.
* The kernel reads neither the index of the point nor the size of the dimension.
* Nothing is carried from one point to the next: the kernel has no scratch memory, or
  the dimension is declared parallel, or ``jax.vmap`` added the dimension.

A shard consists of whole blocks: blocks are never divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.rules.factor_rule import Dims, FactorKind, FactorRule

PRIMITIVE = "pallas_call"
# Kernels that are known to initialise their scratch memory for each attention head.
_FRESH_SCRATCH = ("splash_mha", "splash_mqa")


@dataclasses.dataclass(frozen=True, slots=True)
class _Index:
    """The value of an index map for one dimension of an array.

    Attributes:
      reads: the dimensions of the grid that the value depends on.
      along: g if the value is the index in grid dimension g, divided by ``repeat`` and
          rounded down; -1 if there is no such dimension.
      repeat: the number of consecutive points of the grid dimension that use the same
        block.
    """

    reads: frozenset[int] = frozenset()
    along: int = -1
    repeat: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """One array of a kernel: its shape, block sizes, and an index per dimension."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    indices: tuple[_Index, ...]

    def along(self, dim: int) -> list[int]:
        """Returns the dimensions of the array whose blocks a grid dimension selects."""
        return [d for d, i in enumerate(self.indices) if i.along == dim]

    def covers_exactly(self, d: int, grid: Sequence[int]) -> bool:
        """Whether the blocks of the grid cover a dimension of the array exactly."""
        index = self.indices[d]
        points, rest = divmod(grid[index.along], index.repeat)
        return rest == 0 and points * self.sizes[d] == self.shape[d]


def kernel_name(params: dict[str, Any]) -> str:
    """Returns the given name of a kernel, or else the name of its function."""
    info = getattr(params["jaxpr"], "debug_info", None)
    return params.get("name") or getattr(info, "func_name", "") or "pallas kernel"


def grid_rule(params: dict[str, Any], read: Sequence[bool]) -> FactorRule | None:
    """Returns the rule that the grid of a kernel proves.

    Args:
      params: parameters of the ``pallas_call``.
      read: for each result, whether anything reads it.

    Returns:
      The rule, or None if the grid proves nothing.
    """
    found = _blocks(params)
    if found is None:
        return None
    free = [g for g in range(len(found.grid)) if found.independent(g, read)]
    return found.rule(free) if free else None


# `WHOLE` marks a dimension that each point of a grid reads as a whole. `UNKNOWN` marks
# a dimension with unknown access.
WHOLE, UNKNOWN = -1, -2


def dims_seen(params: dict[str, Any]) -> list[tuple[int, ...]] | None:
    """Returns how the points of a kernel's grid divide each dimension of its arrays.

    Args:
      params: parameters of the ``pallas_call``.

    Returns:
      For each operand and result, one entry per dimension: the grid dimension that
      selects its blocks, if the points along this grid dimension are independent; else
      `WHOLE` or `UNKNOWN`. None if the kind of grid is unknown.
    """
    found = _blocks(params)
    if found is None:
        return None
    read = [True] * len(found.results)
    free = {g for g in range(len(found.grid)) if found.independent(g, read)}

    def grid_dim_of(size: int, block: int, index: _Index) -> int:
        if size == block:
            return WHOLE
        return index.along if index.along in free and index.repeat == 1 else UNKNOWN

    return [
        tuple(map(grid_dim_of, block.shape, block.sizes, block.indices))
        for block in (*found.operands, *found.results)
    ]


def check_rule(params: dict[str, Any], rule: FactorRule, name: str) -> FactorRule:
    """Returns a registered rule after checking that its shards can run.

    Raises:
      InputError: the rule shards a dimension of an array that follows no dimension of
        the grid.
    """
    found = _blocks(params)
    blocks = () if found is None else (*found.operands, *found.results)
    whole = tuple(() for _ in (*rule.operands, *rule.results))
    for number, dims in enumerate((*rule.operands, *rule.results)):
        for d, factors in enumerate(dims):
            block = blocks[number] if found is not None else None
            tiled = (
                block is not None
                and block.indices[d].along >= 0
                and block.covers_exactly(d, found.grid if found else ())
            )
            if not tiled and set(factors) & rule.free:
                raise InputError(
                    f"the rule registered for the kernel '{name}' splits dimension "
                    f"{d} of array {number} of {len(whole)}, which no dimension of "
                    "its grid follows block by block. Make its factors BLOCKED."
                )
    return rule


def localise_params(
    params: dict[str, Any], operands: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Returns the parameters of a kernel for the shards of its operands.

    Args:
      params: the parameters for the whole operands.
      operands: shape of each operand's shard.
    """
    found = _blocks(params)
    assert found is not None
    parts = found.parts(operands)
    if set(parts) <= {1}:
        return params
    mapping = params["grid_mapping"]
    grid = tuple(n // p for n, p in zip(found.grid, parts, strict=True))
    blocks = (*found.operands[mapping.num_index_operands :], *found.results)
    mapped = tuple(
        dataclasses.replace(m, array_aval=m.array_aval.update(shape=_part(b, parts)))
        for m, b in zip(mapping.block_mappings, blocks, strict=True)
    )
    avals = tuple(
        a.update(shape=_part(b, parts))
        for a, b in zip(params["out_avals"], found.results, strict=True)
    )
    local = dict(params)
    local["grid_mapping"] = mapping.replace(grid=grid, block_mappings=mapped)
    local["out_avals"] = avals
    local["cost_estimate"] = _part_of_cost(params["cost_estimate"], int(np.prod(parts)))
    return local


def _part(block: _Block, parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        size // (parts[i.along] if i.along >= 0 else 1)
        for size, i in zip(block.shape, block.indices, strict=True)
    )


def _part_of_cost(cost: Any, parts: int) -> Any:
    if cost is None:
        return None
    values = {
        f.name: getattr(cost, f.name) // parts
        for f in dataclasses.fields(cost)
        if isinstance(getattr(cost, f.name), int)
    }
    return dataclasses.replace(cost, **values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Grid:
    """The grid of a kernel, its arrays, and the kernel's use of grid indices."""

    name: str
    grid: tuple[int, ...]
    operands: tuple[_Block, ...]
    results: tuple[_Block, ...]
    aliases: tuple[tuple[int, int], ...]
    asked: frozenset[int]
    vmapped: frozenset[int]
    parallel: frozenset[int]
    scratch: bool

    def independent(self, g: int, read: Sequence[bool]) -> bool:
        """Whether the points along one grid dimension may run on different devices."""
        arrays = (*self.operands, *self.results)
        for block in arrays:
            along = block.along(g)
            mixed = any(g in i.reads and i.along != g for i in block.indices)
            if mixed or len(along) > 1:
                return False
            if along and not block.covers_exactly(along[0], self.grid):
                return False
        for block, wanted in zip(self.results, read, strict=True):
            own = [d for d in block.along(g) if block.indices[d].repeat == 1]
            if wanted and not own:
                return False
        for i, o in self.aliases:
            if self.operands[i].along(g) != self.results[o].along(g):
                return False
        repeats = {b.indices[d].repeat for b in arrays for d in b.along(g)} - {1}
        if g in self.asked or len(repeats) > 1 or self.grid[g] < 2:
            return False
        return self.starts_anew(g)

    def starts_anew(self, g: int) -> bool:
        """Whether no point along a grid dimension reads what an earlier point left."""
        if g in self.vmapped or g in self.parallel:
            return True
        kept = self.scratch or any(not block.along(g) for block in self.results)
        return not kept or self.name.startswith(_FRESH_SCRATCH)

    def parts(self, operands: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the number of parts into which shards divide each grid dimension."""
        parts = [1] * len(self.grid)
        for block, shape in zip(self.operands, operands, strict=True):
            for size, local, index in zip(
                block.shape, shape, block.indices, strict=True
            ):
                if index.along >= 0 and local != size:
                    parts[index.along] = size // local
        return tuple(parts)

    def rule(self, free: Sequence[int]) -> FactorRule:
        """Returns the rule in which the given dimensions of the grid may be sharded."""
        sizes: list[int] = []
        kinds: list[FactorKind] = []

        def new(size: int, kind: FactorKind) -> tuple[int, ...]:
            if size < 2:
                return ()
            sizes.append(size)
            kinds.append(kind)
            return (len(sizes) - 1,)

        arrays = (*self.operands, *self.results)
        major: dict[int, tuple[int, ...]] = {}
        minor: dict[int, tuple[int, ...]] = {}
        for g in free:
            # If all points along a grid dimension read the same blocks, sharding this
            # dimension would shard no array.
            repeats = (b.indices[d].repeat for b in arrays for d in b.along(g))
            repeat = max(repeats, default=self.grid[g])
            major[g] = new(self.grid[g] // repeat, FactorKind.PASS)
            minor[g] = new(repeat, FactorKind.BLOCKED)

        def dims(block: _Block) -> Dims:
            out: list[tuple[int, ...]] = []
            for size, index, shape in zip(
                block.sizes, block.indices, block.shape, strict=True
            ):
                if index.along not in major:
                    out.append(new(shape, FactorKind.BLOCKED))
                    continue
                own = minor[index.along] if index.repeat == 1 else ()
                inner = new(size, FactorKind.BLOCKED)
                out.append((*major[index.along], *own, *inner))
            return tuple(out)

        given, made = [dims(b) for b in self.operands], [dims(b) for b in self.results]
        for i, o in self.aliases:
            given[i] = made[o]
        return FactorRule(tuple(sizes), tuple(kinds), tuple(given), tuple(made))


def _blocks(params: dict[str, Any]) -> _Grid | None:
    """Reads the grid of a kernel; None if the kind of grid is unknown."""
    mapping, jaxpr = params["grid_mapping"], params["jaxpr"]
    static = all(isinstance(n, int) for n in mapping.grid)
    # If the grid has names, the kernel can use them like names of mesh axes.
    if not static or mapping.grid_names or params.get("mesh"):
        return None
    count = len(mapping.grid)
    blocks: list[_Block] = []
    for found in mapping.block_mappings:
        sizes = [_block_size(d) for d in found.block_shape]
        indices = _indices(found.index_map_jaxpr.jaxpr, count)
        if None in sizes or len(indices) != len(sizes):
            return None
        shape = tuple(found.array_aval.shape)
        blocks.append(_Block(shape, tuple(s or 1 for s in sizes), indices))
    prefetched = [
        _Block(tuple(a.shape), tuple(a.shape), (_Index(),) * len(a.shape))
        for a in mapping.index_map_avals[count:]
    ]
    own = [g for g in range(count) if g not in mapping.vmapped_dims]
    return _Grid(
        name=kernel_name(params),
        grid=tuple(mapping.grid),
        operands=(*prefetched, *blocks[: mapping.num_inputs]),
        results=tuple(blocks[mapping.num_inputs :]),
        aliases=tuple(params["input_output_aliases"]),
        asked=frozenset(own[a] for a in grid_axes_asked(jaxpr)),
        vmapped=frozenset(mapping.vmapped_dims),
        parallel=_parallel_dims(params["compiler_params"], own, count),
        scratch=bool(mapping.scratch_avals),
    )


def grid_axes_asked(jaxpr: Any) -> frozenset[int]:
    """Returns the axes of the grid whose index or size a Pallas kernel reads.

    The axis numbers skip dimensions that ``jax.vmap`` has added.
    """
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            found.add(eqn.params["axis"])
        for inner in jax_compat.subjaxprs(eqn):
            found |= grid_axes_asked(inner)
    return frozenset(found)


def _block_size(dim: Any) -> int | None:
    """The block size of one dimension; None if blocks may start at any element."""
    kind = type(dim).__name__
    if kind == "Squeezed":
        return 1
    return dim.block_size if kind == "Blocked" else None


def _parallel_dims(compiler: Any, own: Sequence[int], count: int) -> frozenset[int]:
    """Returns the dimensions of the grid that a kernel declares parallel."""
    said = getattr(compiler, "dimension_semantics", None) or ()
    numbers = range(count) if len(said) == count else own
    if len(said) not in (count, len(own)):
        return frozenset()
    return frozenset(
        g
        for g, text in zip(numbers, said, strict=True)
        if str(text).lower().endswith("parallel")
    )


def _indices(jaxpr: Any, count: int) -> tuple[_Index, ...]:
    """Returns the results of an index map, as functions of the grid's dimensions."""
    env: dict[Any, _Index] = {}
    for g, var in enumerate(jaxpr.invars):
        env[var] = _Index(frozenset({g}), g) if g < count else _Index()

    def read(atom: Any) -> _Index:
        return _Index() if isinstance(atom, jax_compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        made = _result(eqn, [read(a) for a in eqn.invars])
        env.update((var, made) for var in eqn.outvars)
    return tuple(read(v) for v in jaxpr.outvars)


def _result(eqn: Any, operands: Sequence[_Index]) -> _Index:
    """Returns the result of one equation of an index map."""
    reads = frozenset[int]().union(*(o.reads for o in operands))
    first = operands[0] if operands else _Index()
    if eqn.primitive.name == "convert_element_type":
        return first
    divides = eqn.primitive.name == "div" and first.along >= 0
    if divides and isinstance(eqn.invars[1], jax_compat.Literal):
        return dataclasses.replace(first, repeat=first.repeat * int(eqn.invars[1].val))
    return _Index(reads)
