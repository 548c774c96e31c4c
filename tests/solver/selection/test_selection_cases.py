"""Tests codec selections that were solved by hand, and invalid problems."""

import dataclasses
import math

import numpy as np
import pytest
from selection_problems import all_costs, best, random_problem, realistic

import autopar_solver.selection.solve as selection_solve
from autopar_solver import (
    CodecSelection,
    Status,
    recompute,
    solve_relaxation,
    solve_selection,
    wire_weights,
)
from autopar_solver.ilp.highs import ProgramAnswer
from autopar_solver.selection.problem import check_selection, options_of
from autopar_solver.selection.program import blocks_of, build_program


def test_dominated_options_go_and_the_first_of_equals_stays():
    problem = CodecSelection(
        # Of 0 and 1, equal, the first stays; 2 is slower; 3 saves half a second of
        # local time for a second on the link, which may be hidden; 4 is 3 with less
        # than that saved; 5 is wrong only where the budget is finite.
        wire_s=(np.array([1.0, 1.0, 2.0, 2.0, 3.0, 1.0]),),
        local_s=(np.array([1.0, 1.0, 1.0, 0.5, 0.5, 1.0]),),
        error=(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),),
        ready_s=(0.0,),
        backward_s=1.0,
        error_budget=1.0,
    )
    options = options_of(problem)
    assert options is not None
    # With a budget 5 is as fast as 0 and has no error.
    assert options.codec.tolist() == [3, 5]
    free = options_of(dataclasses.replace(problem, error_budget=math.inf))
    assert free is not None
    assert free.codec.tolist() == [0, 3]


def test_a_link_that_never_idles_is_one_block():
    """Then the program has one row of the link; a fast link has one per gradient."""
    slow = CodecSelection(
        wire_s=(np.array([9.0, 5.0]),) * 3,
        local_s=(np.array([0.0, 1.0]),) * 3,
        error=(np.zeros(2),) * 3,
        ready_s=(3.0, 2.0, 1.0),
        backward_s=4.0,
    )
    options = options_of(slow)
    assert options is not None
    assert blocks_of(slow, options).block.tolist() == [0, 0, 0]
    assert build_program(slow, options).program.names == ("start_0", "exposed")
    fast = dataclasses.replace(
        slow,
        wire_s=(np.array([0.9, 0.5]),) * 3,
        local_s=(np.array([0.0, 0.1]),) * 3,
    )
    options = options_of(fast)
    assert options is not None
    assert blocks_of(fast, options).block.tolist() == [0, 1, 2]


def test_worked_example():
    """Two gradients, dense 4 s or compressed 1 s at 0.5 s of work.

    The link is free from 0 on; the backward pass ends at 5. Dense ends at 8: 3 s
    exposed. Compressing the first ends at 5 (0 + 1, then 4 + 4 = 8: still 3 s);
    compressing the second ends at max(4, 4) + 1 = 5: nothing exposed for 0.5 s.
    """
    pair = (np.array([4.0, 1.0]),) * 2
    problem = CodecSelection(
        wire_s=pair,
        local_s=(np.array([0.0, 0.5]),) * 2,
        error=(np.array([0.0, 1.0]),) * 2,
        ready_s=(0.0, 4.0),
        backward_s=5.0,
    )
    costs = dict(all_costs(problem))
    assert costs == {(0, 0): 3.0, (1, 0): 3.5, (0, 1): 0.5, (1, 1): 1.0}
    result = solve_selection(problem)
    assert result.choices == (0, 1)
    # At 5 the link is done just in time: any further second is exposed, and since
    # the first ends exactly when the second is ready, so is one of the first.
    assert wire_weights(problem, (0, 1)) == (1.0, 1.0)
    assert wire_weights(problem, (1, 1)) == (0.0, 1.0)


def test_fast_link_sends_everything_as_it_is():
    """Where nothing is exposed, no codec is worth its work."""
    problem = realistic(0, 40)
    fast = dataclasses.replace(
        problem, wire_s=tuple(wire / 1e4 for wire in problem.wire_s)
    )
    result = solve_selection(fast)
    check_selection(fast, result)
    # Only the last gradient's own time is exposed: 4 MB at 250 GB/s, 64 us at most.
    assert result.error == 0.0
    assert result.choices == (0,) * 40


def test_slow_link_compresses_everything():
    """Without a budget, where the link is the time, every gradient is sent in signs."""
    problem = realistic(0, 40, error_budget=math.inf)
    slow = dataclasses.replace(
        problem, wire_s=tuple(wire * 1e4 for wire in problem.wire_s)
    )
    assert solve_selection(slow).choices == (3,) * 40


def test_late_gradients_are_compressed_first():
    """Equal gradients, room for half: those sent last are what is exposed."""
    count = 10
    problem = CodecSelection(
        wire_s=(np.array([1.0, 0.5]),) * count,
        local_s=(np.array([0.0, 0.01]),) * count,
        error=(np.array([0.0, 1.0]),) * count,
        ready_s=tuple(float(count - i) for i in range(count)),
        backward_s=float(count),
        error_budget=5.0,
    )
    result = solve_selection(problem, gap=0.0)
    check_selection(problem, result)
    # Gradients arrive one a second and take one: only the last, index 0, is exposed.
    assert result.choices == (1, *(0,) * (count - 1))
    assert result.exposed_s == 0.5


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e6])
def test_any_scale(scale):
    """Nanoseconds and weeks, and errors of any unit, are chosen alike."""
    for seed in range(15):
        problem = random_problem(seed)
        other = dataclasses.replace(
            problem,
            wire_s=tuple(row * scale for row in problem.wire_s),
            local_s=tuple(row * scale for row in problem.local_s),
            ready_s=tuple(ready * scale for ready in problem.ready_s),
            backward_s=problem.backward_s * scale,
            error=tuple(row / scale for row in problem.error),
            error_budget=problem.error_budget / scale,
        )
        result = solve_selection(other, gap=0.0)
        check_selection(other, result)
        least = best(problem) * scale
        assert math.isclose(result.cost_s, least, rel_tol=1e-8, abs_tol=1e-9 * scale)


def test_fifty_gradients_within_the_gap():
    problem = realistic(1, 50)
    result = solve_selection(problem, gap=1e-3)
    check_selection(problem, result)
    assert result.status is Status.OPTIMAL
    assert result.cost_s - result.bound_s <= 1e-3 * (problem.backward_s + result.cost_s)
    dense = recompute(problem, (0,) * 50)
    assert result.cost_s < 0.5 * dense.cost_s


def test_same_input_same_answer():
    problem = realistic(2, 30)
    first = solve_selection(problem)
    again = solve_selection(problem)
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(
        again, seconds=0.0
    )


def test_numbering_does_not_matter():
    """The link's order is that of readiness, however gradients are numbered."""
    problem = realistic(3, 12)
    back = list(reversed(range(12)))
    turned = dataclasses.replace(
        problem,
        wire_s=tuple(problem.wire_s[i] for i in back),
        local_s=tuple(problem.local_s[i] for i in back),
        error=tuple(problem.error[i] for i in back),
        ready_s=tuple(problem.ready_s[i] for i in back),
    )
    result, other = (solve_selection(p, gap=0.0) for p in (problem, turned))
    check_selection(turned, other)
    assert result.cost_s == pytest.approx(other.cost_s, rel=1e-9)
    weights = solve_relaxation(problem).wire_weights
    assert solve_relaxation(turned).wire_weights == pytest.approx(weights[::-1])


def test_time_limit_keeps_what_is_known():
    """Out of time, the rounded choice of the relaxation comes back with its bound."""
    problem = realistic(4, 60)
    result = solve_selection(problem, seconds=0.0, gap=0.0)
    check_selection(problem, result)
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert 0 < result.bound_s <= result.cost_s


def test_infeasible_together_is_a_status():
    """Each option fits alone, no choice fits both budgets."""
    problem = CodecSelection(
        wire_s=(np.array([1.0, 1.0]),) * 2,
        local_s=(np.array([0.0, 0.0]),) * 2,
        error=(np.array([0.0, 1.0]),) * 2,
        ready_s=(0.0, 0.0),
        backward_s=1.0,
        error_budget=1.0,
        memory_bytes=(np.array([2.0, 0.0]),) * 2,
        memory_budget_bytes=1.0,
    )
    result = solve_selection(problem)
    check_selection(problem, result)
    assert result.status is Status.INFEASIBLE
    assert (result.choices, result.cost_s, result.gap) == ((), math.inf, 0.0)
    looser = dataclasses.replace(problem, memory_budget_bytes=2.0)
    assert solve_selection(looser).status is Status.OPTIMAL


def tenths(**options) -> CodecSelection:
    """Four gradients: to save a second on the link costs an error of 0.1 for each."""
    return CodecSelection(
        wire_s=(np.array([2.0, 1.0]),) * 4,
        local_s=(np.zeros(2),) * 4,
        error=(np.array([0.0, 0.1]),) * 4,
        ready_s=(0.0,) * 4,
        backward_s=0.0,
        **options,
    )


def test_budgets_may_be_reached_but_not_passed():
    """Three tenths are not over a budget of 0.3, whatever their floating sum is."""
    problem = tenths(error_budget=0.3)
    result = solve_selection(problem, gap=0.0)
    check_selection(problem, result)
    assert sorted(result.choices) == [0, 1, 1, 1]


def test_a_choice_over_a_budget_by_tolerance_is_excluded(monkeypatch):
    """A backend that breaks a budget is asked again, without that choice."""
    problem = tenths(error_budget=0.25)
    honest = selection_solve.backend_of("highs")
    asked = []

    def sloppy(program, limits, start):
        asked.append(program)
        if len(asked) > 1:
            return honest(program, limits, start)
        values = np.zeros(len(program.costs))
        values[1:8:2] = 1.0  # Option 1 four times: an error of 0.4.
        return ProgramAnswer(values, -math.inf, True)

    monkeypatch.setattr(selection_solve, "backend_of", lambda _: sloppy)
    nothing = selection_solve.SelectionIncumbent(None, math.inf, 0.0)
    monkeypatch.setattr(selection_solve, "_round", lambda *_: nothing)
    result = solve_selection(problem, gap=0.0, widths=())
    check_selection(problem, result)
    assert sorted(result.choices) == [0, 0, 1, 1]
    assert [program.names[-1] for program in asked] == ["error", "exclusion_7"]
    assert asked[1].upper[-1] == 3.0


def test_nothing_to_choose():
    problem = CodecSelection(
        wire_s=(), local_s=(), error=(), ready_s=(), backward_s=1.0
    )
    result = solve_selection(problem)
    check_selection(problem, result)
    assert (result.status, result.cost_s) == (Status.OPTIMAL, 0.0)
    assert result.bound_s == 0.0
    relaxed = solve_relaxation(problem)
    assert relaxed.wire_weights == ()
    prices = (relaxed.seconds_per_error, relaxed.seconds_per_byte, relaxed.bound_s)
    assert (*prices, relaxed.status) == (0.0, 0.0, 0.0, Status.OPTIMAL)


# PuLP 3.3 warns of its own way to start CBC, which `autopar_solver.ilp.backends` uses.
@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
def test_cbc_agrees():
    problem = realistic(6, 8)
    highs = solve_selection(problem, gap=0.0)
    cbc = solve_selection(problem, gap=0.0, backend="cbc", widths=())
    check_selection(problem, cbc)
    assert math.isclose(highs.cost_s, cbc.cost_s, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost_s": 0.0}, "cost_s is"),
        ({"error": 1.0}, "error is"),
        ({"bound_s": 1e9}, "bound 1000000000.0 above cost"),
        ({"choices": (9, 0, 0)}, "gradient 0 has no option 9"),
        ({"choices": (0,)}, "1 choices for 3 gradients"),
        ({"status": Status.INFEASIBLE}, "but has choices"),
    ],
)
def test_checker_believes_nothing(change, message):
    problem = realistic(0, 3)
    result = solve_selection(problem)
    with pytest.raises(ValueError, match=message):
        check_selection(problem, dataclasses.replace(result, **change))


def test_checker_names_budgets_and_forbidden_options():
    problem = realistic(0, 3, error_budget=math.inf)
    result = solve_selection(problem)
    tight = dataclasses.replace(problem, error_budget=0.0)
    if result.error:
        with pytest.raises(ValueError, match="over a budget"):
            check_selection(tight, result)
    forbidden = dataclasses.replace(
        problem, error=(np.array([math.inf, *(math.inf,) * 2, 0.0]), *problem.error[1:])
    )
    choices = (0, *result.choices[1:])
    cost = dataclasses.asdict(recompute(forbidden, choices))
    with pytest.raises(ValueError, match="forbidden option"):
        check_selection(forbidden, dataclasses.replace(result, choices=choices, **cost))


GOOD = {
    "wire_s": (np.array([1.0, 0.0]),),
    "local_s": (np.array([0.0, 1.0]),),
    "error": (np.array([0.0, 1.0]),),
    "ready_s": (0.0,),
    "backward_s": 1.0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_s": ()}, "local_s has 0 gradients, wire_s 1"),
        ({"error": (np.zeros(3),)}, r"gradient 0: error .* got shape \(3,\)"),
        ({"error": (np.array([0.0, -1.0]),)}, "gradient 0: error must be numbers"),
        ({"wire_s": (np.array([0.0, math.nan]),)}, "gradient 0: wire_s"),
        ({"memory_bytes": (np.array([1.0, -1.0]),)}, "gradient 0: memory_bytes"),
        ({"error": (np.full(2, math.inf),)}, "gradient 0: no option is possible"),
        ({"ready_s": ()}, "ready_s has 0 gradients, wire_s 1"),
        ({"ready_s": (math.inf,)}, "ready_s and backward_s must be finite"),
        ({"backward_s": -1.0}, "backward_s must be finite and not negative, got -1.0"),
        ({"error_budget": -1.0}, "error_budget must not be negative, got -1.0"),
        ({"error_budget": math.nan}, "error_budget"),
        ({"memory_budget_bytes": -2.0}, "memory_budget_bytes must not be negative"),
    ],
)
def test_bad_problems_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        CodecSelection(**{**GOOD, **change})


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend 'glop'"):
        solve_selection(CodecSelection(**GOOD), backend="glop")
