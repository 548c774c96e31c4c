"""Tests that jobs are placed on nodes such that few and cheap jobs move."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autopar.scheduler.nodes import Nodes, pack

NODES = Nodes.parse("3x2")
EVERYWHERE = range(3)
# One job of one device on each node.
HELD = {name: (node,) for node, name in enumerate("abc")}
WANTED = {
    **dict.fromkeys(HELD, (1, EVERYWHERE)),
    "whole": (2, EVERYWHERE),
}


def moved(costs: dict[str, float] | None) -> list[str]:
    """The jobs that were moved for a job on a whole node."""
    chosen = pack(WANTED, HELD, NODES, costs)
    assert set(chosen) == set(WANTED)
    return [name for name, places in HELD.items() if chosen[name] != places]


def test_without_costs_the_emptiest_node_is_cleared() -> None:
    assert moved(None) == ["a"]


@given(st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3, unique=True))
def test_the_job_moves_for_which_it_costs_least(costs: list[float]) -> None:
    named = dict(zip(HELD, costs, strict=True))

    assert moved(named) == [min(named, key=named.__getitem__)]


@given(
    st.lists(st.floats(0.0, 10.0), min_size=4, max_size=4),
    st.sampled_from([("a", "b"), ("a", "b", "c"), ("b", "d")]),
)
def test_nodes_are_cleared_for_the_least_sum(
    costs: list[float], first: tuple[str, ...]
) -> None:
    """Brute force over the two nodes of four devices."""
    nodes = Nodes.parse("2x4")
    rest = tuple(n for n in "abcd" if n not in first)
    held = {n: (int(n in rest),) for n in "abcd"}
    named = dict(zip("abcd", costs, strict=True))
    wanted = {**dict.fromkeys(held, (1, range(2))), "whole": (4, range(2))}

    chosen = pack(wanted, held, nodes, named)

    gone = [name for name, places in held.items() if chosen[name] != places]
    assert sum(named[n] for n in gone) == min(
        sum(named[n] for n in names) for names in (first, rest)
    )
    assert sorted(itertools.chain(*chosen.values())) == [0] * 4 + [1] * 4
