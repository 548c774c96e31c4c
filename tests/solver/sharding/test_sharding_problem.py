"""Tests the checks that constructors of sharding problems make."""

import numpy as np
import pytest

from autopar_solver import MemoryTerm, ShardingProblem


def pair(**changes):
    fields = {
        "name": "pair",
        "node_costs": (np.array([1.0, 2.0]), np.array([0.0])),
        "edges": ((0, 1),),
        "edge_costs": (np.array([[5.0], [1.0]]),),
    }
    return ShardingProblem(**(fields | changes))


def test_num_strategies():
    assert pair().num_strategies == (2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_costs": (np.array([]), np.array([0.0]))}, "node 0: costs must be one"),
        ({"node_costs": (np.array([np.nan, 1.0]), np.zeros(1))}, "node 0: .*nan"),
        (
            {"node_costs": (np.array([np.inf, np.inf]), np.zeros(1))},
            "node 0: no feasible choice",
        ),
        ({"edges": ((0, 2),)}, r"edge 0 \(0, 2\): there are only 2 nodes"),
        ({"edges": ()}, "0 edges but 1 edge cost"),
        (
            {"edge_costs": (np.zeros((1, 2)),)},
            r"edge 0 \(0, 1\): costs must have shape \(2, 1\), got \(1, 2\)",
        ),
        ({"edge_costs": (np.full((2, 1), np.inf),)}, "edge 0 .*no feasible choice"),
        ({"edge_costs": (np.array([[-np.inf], [0.0]]),)}, "edge 0 .*-inf"),
        ({"memory_limit": float("nan")}, "limit is not a number"),
        ({"fixed_memory": ((0, 3, -1.0),)}, r"fixed \[0, 3\).*not negative"),
    ],
)
def test_rejects(changes, message):
    with pytest.raises(ValueError, match=message):
        pair(**changes)


@pytest.mark.parametrize(
    ("node", "usage", "message"),
    [
        (2, [0.0, 0.0], "memory term 0 of node 2: there are only 2 nodes"),
        (0, [0.0], r"memory term 0 of node 0: usage must have shape \(2,\)"),
        (0, [0.0, -1.0], "memory term 0 of node 0: usage must be finite"),
        (0, [0.0, np.inf], "memory term 0 of node 0: usage must be finite"),
    ],
)
def test_rejects_memory(node, usage, message):
    term = MemoryTerm(node=node, start=0, end=1, usage=np.array(usage))
    with pytest.raises(ValueError, match=message):
        pair(memory=(term,), memory_limit=1.0)
