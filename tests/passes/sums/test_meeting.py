"""Tests that paths of partial sums with common values belong together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar_passes.sums.find import _meeting, _Path  # pyright: ignore[reportPrivateUsage]

members = st.lists(st.sets(st.integers(0, 20), max_size=4), max_size=14)


@given(members)
def test_groups_are_those_of_a_comparison_of_all_with_all(sets: list[set[int]]) -> None:
    paths = [_Path(number, values, set()) for number, values in enumerate(sets)]
    groups: list[list[_Path]] = []
    for path in paths:
        met = [g for g in groups if any(path.members & p.members for p in g)]
        rest = [g for g in groups if g not in met]
        groups = [*rest, [*(p for g in met for p in g), path]]
    assert _meeting(iter(paths)) == groups


def test_many_paths_that_never_meet_take_no_pairs() -> None:
    """Time grows with the number of paths, not with that of pairs."""

    class Counted(set[int]):
        crossed = 0

        def __and__(self, other: object) -> set[int]:
            type(self).crossed += 1
            return set.__and__(self, other)  # pyright: ignore

    paths = [_Path(k, Counted({k}), set()) for k in range(50)]
    assert len(_meeting(paths)) == 50
    assert Counted.crossed <= 50
