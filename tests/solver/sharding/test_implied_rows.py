"""Tests which rows of memory are implied by others."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from property_tests import examples

from autopar_solver import MemoryTerm, ShardingProblem
from autopar_solver.sharding import graph as implied
from autopar_solver.sharding.graph import (
    find_rows,
    held_by_kind,
    implied_rows,
    mark_convex,
)
from autopar_solver.sharding.problem import memory_profile


def layered(
    layers: int, usages: list[np.ndarray], offsets: list[tuple[int, int]]
) -> ShardingProblem:
    """Layers forward and backward, with an array of each kept for its backward pass.

    Args:
      layers: number of them.
      usages: memory per strategy of two nodes, equal in all layers: of the kept array,
        and of the gradient that the backward pass makes.
      offsets: of each node, when a layer makes its array and how long the array lives.
    """
    kept, made = usages
    (begin, _), (start, held) = offsets
    step = 10
    end = 2 * layers * step
    terms: list[MemoryTerm] = []
    for layer in range(layers):
        back = end - (layer + 1) * step
        first = layer * step + begin
        terms.append(MemoryTerm(node=0, start=first, end=back + 5, usage=kept))
        # What the backward pass makes stays to the end: a gradient.
        terms.append(MemoryTerm(node=1, start=back + start, end=end, usage=made))
        terms.append(MemoryTerm(node=1, start=first, end=first + 1 + held, usage=made))
    costs = tuple(np.zeros(len(u)) for u in usages)
    return ShardingProblem(
        name="layers", node_costs=costs, memory=tuple(terms), memory_limit=1.0
    )


usage = st.lists(st.integers(1, 64), min_size=2, max_size=3).map(
    lambda sizes: np.array(sizes, float)
)
offset = st.tuples(st.integers(0, 4), st.integers(0, 4))


class TestImplied:
    @settings(max_examples=examples(60), deadline=None)
    @given(
        st.integers(2, 24),
        st.lists(usage, min_size=2, max_size=2),
        st.lists(offset, min_size=2, max_size=2),
        st.data(),
    )
    def test_rows_that_are_left_have_the_peak_of_every_choice(
        self,
        layers: int,
        usages: list[np.ndarray],
        offsets: list[tuple[int, int]],
        data: st.DataObject,
    ) -> None:
        problem = layered(layers, usages, offsets)
        rows, memory = find_rows(problem)
        choices = [data.draw(st.integers(0, len(u) - 1)) for u in usages]
        _, used = memory_profile(problem, choices)
        over = -rows.room
        for node, own in memory.items():
            at = own.usage[:, choices[node]]
            for start, end, amount in zip(own.starts, own.ends, at, strict=True):
                over[start:end] += amount
        assert max(over) + 1.0 == max(used)

    def test_equal_layers_leave_the_rows_of_few(self) -> None:
        sizes, few, many = [np.array([8.0, 4.0]), np.array([2.0, 1.0])], 8, 96
        rows = [
            len(find_rows(layered(n, sizes, [(0, 0), (2, 3)]))[0]) for n in (few, many)
        ]
        assert rows[1] < implied.MIN_ROWS
        # Of a model of twelve times the layers no more rows count.
        assert rows[1] <= max(rows[0], 4 * 3)

    @given(st.data())
    def test_rows_that_do_not_repeat_are_marked_only_where_ends_have_more(
        self, data: st.DataObject
    ) -> None:
        count = data.draw(st.integers(implied.MIN_ROWS, 90))
        number = data.draw(st.integers(1, 12))
        kinds = np.array(data.draw(st.lists(st.integers(0, 2), min_size=number)))
        spans = [
            sorted(data.draw(st.tuples(*[st.integers(0, count)] * 2))) for _ in kinds
        ]
        first, last = np.array(spans).T
        least = np.array([data.draw(st.integers(0, 2)) for _ in range(count)], float)
        marked = implied_rows(kinds, first, last, least)
        held = held_by_kind(kinds, first, last, count)
        sizes = np.array([data.draw(st.integers(0, 9)) for _ in range(len(held))])
        used = sizes @ held + least
        assert not marked.all()
        assert used[~marked].max() == used.max()

    def test_a_row_under_the_mean_of_its_neighbours_is_convex(self) -> None:
        held = np.array([[4, 3, 2, 2, 5], [1, 1, 1, 1, 1]])
        assert mark_convex(held, np.zeros(5), 1).tolist() == [
            False,
            True,
            True,
            True,
            False,
        ]
        least = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
        assert mark_convex(held, least, 1).tolist() == [False, False, True, True, False]
