"""Tests what a grid proves, by random kernels on shards and on whole arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar_passes.rules.factor_rule import FactorKind
from autopar_passes.rules.pallas_grid import (
    _Block,  # pyright: ignore[reportPrivateUsage]
    _Grid,  # pyright: ignore[reportPrivateUsage]
    _Index,  # pyright: ignore[reportPrivateUsage]
)

PRIME = 1_000_003
# Kinds of index maps, most often the number of a point itself.
KINDS = ("alone", "alone", "alone", "repeat", "mirror", "both", "fixed")


@dataclasses.dataclass(frozen=True)
class Case:
    """A grid, and which of its results are read."""

    found: _Grid
    read: tuple[bool, ...]

    @property
    def free(self) -> list[int]:
        return [
            g
            for g in range(len(self.found.grid))
            if self.found.independent(g, self.read)
        ]


@st.composite
def blocks(draw: st.DrawFn, grid: tuple[int, ...]) -> _Block:
    shape: list[int] = []
    sizes: list[int] = []
    indices: list[_Index] = []
    for _ in range(draw(st.integers(1, 3))):
        g = draw(st.integers(0, len(grid) - 1))
        kind = draw(
            st.sampled_from(
                ["alone", "alone", "alone", "repeat", "mirror", "both", "fixed"]
            )
        )
        repeat = 2 if kind == "repeat" else 1
        size = draw(st.integers(1, 2))
        reads = {"fixed": set[int](), "both": {g, (g + 1) % len(grid)}}.get(kind, {g})
        along = g if kind in ("alone", "repeat") else -1
        indices.append(_Index(frozenset(reads), along, repeat))
        sizes.append(size)
        # At times the blocks do not cover the array.
        more = draw(st.sampled_from([0, 0, 0, 0, 1]))
        shape.append(
            size * (more + 1 + max(number(indices[-1], grid, p) for p in points(grid)))
        )
    return _Block(tuple(shape), tuple(sizes), tuple(indices))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    grid = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))
    operands = draw(st.lists(blocks(grid), min_size=1, max_size=2))
    results = draw(st.lists(blocks(grid), min_size=1, max_size=2))
    same = operands[0].shape == results[0].shape
    dims = st.frozensets(st.sampled_from(range(len(grid))), max_size=1)
    scratch = draw(st.sampled_from([False, False, True]))
    found = _Grid(
        name="kernel",
        grid=grid,
        operands=tuple(operands),
        results=tuple(results),
        aliases=((0, 0),) if same and draw(st.booleans()) else (),
        asked=draw(dims) if draw(st.booleans()) else frozenset(),
        vmapped=frozenset(),
        # What is declared parallel uses no scratch memory that others wrote.
        parallel=frozenset() if scratch else draw(dims),
        scratch=scratch,
    )
    return Case(found, tuple(draw(st.booleans()) for _ in results))


def points(grid: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, grid))


def number(index: _Index, grid: Sequence[int], point: tuple[int, ...]) -> int:
    """The number of the block that a grid point gets in one dimension."""
    if index.along >= 0:
        return point[index.along] // index.repeat
    if len(index.reads) == 1:
        (g,) = index.reads
        return grid[g] - 1 - point[g]
    return sum(point[g] for g in index.reads)


def place(
    block: _Block, grid: Sequence[int], point: tuple[int, ...]
) -> tuple[slice, ...]:
    starts = [number(i, grid, point) for i in block.indices]
    return tuple(
        slice(n * size, (n + 1) * size)
        for n, size in zip(starts, block.sizes, strict=True)
    )


def played(
    found: _Grid, grid: Sequence[int], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Runs a kernel that reads all its blocks, and adds to its results."""
    given_arrays = [a.copy() for a in arrays]
    operands, results = (
        given_arrays[: len(found.operands)],
        given_arrays[len(found.operands) :],
    )
    for i, o in found.aliases:
        operands[i] = results[o]
    kept = 0
    for point in points(grid):
        seen = sum(point[g] + 1 for g in found.asked)
        for k, (block, array) in enumerate(zip(found.operands, operands, strict=True)):
            part = array[place(block, grid, point)]
            seen += (k + 2) * int(
                (part * np.arange(1, part.size + 1).reshape(part.shape)).sum()
            )
        if found.scratch:
            kept = seen = (3 * kept + seen) % PRIME
        for block, array in zip(found.results, results, strict=True):
            where = place(block, grid, point)
            array[where] = (2 * array[where] + seen) % PRIME
    return results


def shards(case: Case, factor: int, parts: int) -> list[np.ndarray]:
    """The results assembled from shards that split one factor of the rule."""
    found, rule = case.found, case.found.rule(case.free)
    random = np.random.default_rng(0)
    whole = [
        random.integers(0, PRIME, b.shape) for b in (*found.operands, *found.results)
    ]
    for i, o in found.aliases:
        whole[len(found.operands) + o] = whole[i]
    dims = (*rule.operands, *rule.results)
    axes = [[d for d, fs in enumerate(own) if factor in fs] for own in dims]
    pieces: list[list[np.ndarray]] = []
    for part in range(parts):
        local = [
            np.split(a, parts, own[0])[part] if own else a
            for a, own in zip(whole, axes, strict=True)
        ]
        divided = found.parts([a.shape for a in local[: len(found.operands)]])
        split = {
            b.indices[own[0]].along
            for b, own in zip((*found.operands, *found.results), axes, strict=True)
            if own
        }
        grid = [n // (parts if g in split else 1) for g, n in enumerate(found.grid)]
        if any(axes[: len(found.operands)]):
            assert grid == [n // p for n, p in zip(found.grid, divided, strict=True)]
        pieces.append(played(found, grid, local))
    together = [
        np.concatenate([piece[k] for piece in pieces], own[0]) if own else pieces[0][k]
        for k, own in enumerate(axes[len(found.operands) :])
    ]
    expected = played(found, found.grid, whole)
    return [
        one == other
        for one, other, wanted in zip(together, expected, case.read, strict=True)
        if wanted
    ]


@given(cases())
def test_shards_of_free_dimensions_compute_the_same(case: Case) -> None:
    if not (free := case.free):
        return
    rule = case.found.rule(free)
    for factor, (size, kind) in enumerate(zip(rule.sizes, rule.kinds, strict=True)):
        if kind is FactorKind.PASS:
            for same in shards(case, factor, size):
                assert same.all()


@given(cases())
def test_the_factors_of_a_rule_make_up_every_array(case: Case) -> None:
    if not (free := case.free):
        return
    rule = case.found.rule(free)
    arrays = (*case.found.operands, *case.found.results)
    for block, dims in zip(arrays, (*rule.operands, *rule.results), strict=True):
        sizes = [int(np.prod([rule.sizes[f] for f in own])) for own in dims]
        assert tuple(sizes) == block.shape
