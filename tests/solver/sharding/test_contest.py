"""Tests the contest's file format, its toy example and its public instances."""

import dataclasses
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from contest_files import EXAMPLE, changed, write_json
from sharding_problems import random_problem

from autopar_solver import MemoryTerm, ShardingProblem, Status, solve
from autopar_solver.sharding.contest import (
    read_contest_instance,
    read_contest_solution,
    write_contest_instance,
    write_contest_solution,
)
from autopar_solver.sharding.problem import check_solution, evaluate_choices

FOLDER = Path(
    os.environ.get(
        "AUTOPAR_IOPDDL_DIR",
        Path(__file__).resolve().parents[3] / ".." / "shared" / "iopddl",
    )
)


def instance(letter):
    path = FOLDER / f"asplos-2025-iopddl-{letter}.json.gz"
    if not path.exists():
        pytest.skip(f"no public instance {path.name}: set AUTOPAR_IOPDDL_DIR")
    return read_contest_instance(path)


def test_example(tmp_path):
    problem = read_contest_instance(write_json(tmp_path / "example.json", EXAMPLE))
    solution = solve(problem, gap=0.0)
    check_solution(problem, solution)
    assert (problem.name, solution.cost, solution.status) == (
        "example",
        445.0,
        Status.OPTIMAL,
    )


def test_gzip_and_forbidden(tmp_path):
    data = changed("nodes", "costs", 1, to=[10**18, 65])
    path = tmp_path / "example.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    assert read_contest_instance(path).node_costs[1].tolist() == [np.inf, 65.0]


@pytest.mark.parametrize("seed", range(20))
def test_round_trip(seed, tmp_path):
    """Everything but fixed memory and second terms survives."""
    problem = random_problem(seed, memory=False)
    path = tmp_path / "problem.json"
    write_contest_instance(path, problem)
    again = read_contest_instance(path)
    assert again.name == problem.name
    assert again.edges == problem.edges
    for mine, other in [
        (problem.node_costs, again.node_costs),
        (problem.edge_costs, again.edge_costs),
    ]:
        for a, b in zip(mine, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_memory_round_trip(tmp_path):
    problem = read_contest_instance(write_json(tmp_path / "example.json", EXAMPLE))
    write_contest_instance(tmp_path / "again.json", problem)
    again = read_contest_instance(tmp_path / "again.json")
    assert again.memory_limit == 50.0
    assert evaluate_choices(again, (0, 0, 1, 1, 0)) == evaluate_choices(
        problem, (0, 0, 1, 1, 0)
    )


def test_write_refuses_what_the_format_cannot_hold(tmp_path):
    with pytest.raises(ValueError, match="fixed memory"):
        write_contest_instance(tmp_path / "problem.json", random_problem(1))


def test_solution_round_trip(tmp_path):
    path = tmp_path / "solution.json"
    write_contest_solution(path, np.array([3, 0, 2]))
    assert json.loads(path.read_text()) == [3, 0, 2]
    assert read_contest_solution(path) == (3, 0, 2)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a contest solution"):
        read_contest_solution(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"problem": 3}, "not a contest instance"),
        (changed("nodes", "intervals", to=[]), "0 intervals, 5 costs"),
        (changed("edges", "costs", to=[]), "5 edges but 0 edge costs"),
        (changed("edges", "nodes", 0, to=[0]), "edge 0 joins 1 nodes"),
        (changed("edges", "nodes", 0, to=[0, 9]), "edge 0 .*only 5 nodes"),
        (changed("edges", "costs", 2, to=[1, 2, 3]), "edge 2 .*3 costs for 2 x 2"),
        (changed("nodes", "usages", 1, to=[1]), r"node 1: usage must have shape \(2,"),
        (changed("nodes", "usages", 1, to=[1, -1]), "node 1: .*not negative"),
        (changed("nodes", "costs", 0, to=[10**18]), "node 0: no feasible choice"),
        (changed("nodes", "costs", 0, to=[]), "edge 0 .*2 costs for 0 x 2"),
        (changed("nodes", "costs", 0, to=["x"]), "costs of node 0: "),
    ],
)
def test_invalid(data, message, tmp_path):
    path = write_json(tmp_path / "bad.json", data)
    with pytest.raises(ValueError, match=message):
        read_contest_instance(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8bxx", b"\xff\xfe"])
def test_garbage(content, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a contest instance"):
        read_contest_instance(path)


def test_public_instance_g():
    problem = instance("G")
    solution = solve(problem, seconds=60, gap=1e-6)
    check_solution(problem, solution)
    assert (solution.cost, solution.status) == (217039.0, Status.OPTIMAL)


def test_public_instance_a():
    """Folding leaves under a hundredth of it; the best team found 6,548,641,531."""
    problem = instance("A")
    solution = solve(problem, seconds=30, gap=1e-4)
    check_solution(problem, solution)
    assert solution.cost <= 1.01 * 6_548_641_531
    folded = {report.name: report.nodes for report in solution.reductions}
    assert folded["followers"] > 20_000


@pytest.mark.parametrize("seed", range(12))
def test_one_term_for_each_node_survives(seed, tmp_path):
    """What is read again costs and occupies the same for any choices."""
    random = np.random.default_rng(seed)
    free = random_problem(seed, memory=False)
    terms = tuple(
        MemoryTerm(node=i, start=int(start), end=int(start + 3), usage=usage)
        for i, size in enumerate(free.num_strategies)
        for start, usage in [(random.integers(9), random.integers(0, 9, size) * 1.0)]
    )
    problem = dataclasses.replace(free, memory=terms, memory_limit=12.0)
    write_contest_instance(tmp_path / "problem.json", problem)
    again = read_contest_instance(tmp_path / "problem.json")
    assert again.memory_limit == 12.0
    for _ in range(5):
        choices = [int(random.integers(size)) for size in problem.num_strategies]
        assert evaluate_choices(again, choices) == evaluate_choices(problem, choices)


def test_several_terms_of_a_node_are_refused(tmp_path):
    usage = np.array([1.0])
    problem = ShardingProblem(
        name="twice",
        node_costs=(np.zeros(1),),
        memory=tuple(
            MemoryTerm(node=0, start=t, end=t + 1, usage=usage) for t in (0, 1)
        ),
    )
    with pytest.raises(ValueError, match="twice: node 0 has several terms"):
        write_contest_instance(tmp_path / "problem.json", problem)


def test_equal_tables_are_read_once(tmp_path):
    """Instances repeat few tables many times; the solver compares them by identity."""
    path = tmp_path / "twice.json"
    twice = changed("nodes", "usages", 1, to=[10, 10])
    path.write_text(json.dumps(twice))
    usages = read_contest_instance(path).memory
    assert usages[1].usage is usages[3].usage


def test_without_a_name_the_file_gives_it(tmp_path):
    path = write_json(tmp_path / "unnamed.json", changed("name", to=None))
    assert read_contest_instance(path).name == "unnamed.json"


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_contest_instance(tmp_path / "missing.json")
    with pytest.raises(FileNotFoundError):
        read_contest_solution(tmp_path / "missing.json")


@pytest.mark.parametrize("text", ["[1.5]", '["a"]', "[1, null]", "", "3"])
def test_solutions_that_are_no_list_of_numbers(text, tmp_path):
    path = tmp_path / "solution.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a contest solution"):
        read_contest_solution(path)
