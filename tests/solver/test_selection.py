"""Codec selections equal brute force, and prices never claim more than the best."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar_solver import (
    CodecSelection,
    Status,
    recompute,
    selection_ilp,
    solve_relaxation,
    solve_selection,
    wire_weights,
)
from autopar_solver.ilp.backend import Answer
from autopar_solver.incumbent import Clock
from autopar_solver.selection import check_selection, fits
from autopar_solver.selection_descent import descend
from autopar_solver.selection_labels import search_labels
from autopar_solver.selection_program import blocks_of, build, options_of
from autopar_solver.selection_relaxation import relax


def random_problem(seed: int) -> CodecSelection:
    """Small whole numbers: ties in time, readiness and error; every feature at times.

    At most five gradients of at most four options; some share their options.
    """
    random = np.random.default_rng(seed)
    widths = random.integers(1, 5, random.integers(1, 6))
    if random.random() < 0.3:
        widths[:] = widths[0]
    sampled = [_columns(random, widths) for _ in range(4)]
    if random.random() < 0.3:
        for columns in sampled:
            for index in np.flatnonzero(widths == widths[0]):
                columns[index] = columns[0]
    wire, local, error, memory = (tuple(columns) for columns in sampled)
    limited = random.random() < 0.5
    return CodecSelection(
        name=f"random-{seed}",
        wire_s=wire,
        local_s=local,
        error=error,
        ready_s=tuple(random.integers(0, 12, len(widths)).astype(float)),
        backward_s=float(random.integers(5, 20)),
        error_budget=float(random.choice([math.inf, *range(14)])),
        memory_bytes=memory if limited else None,
        memory_budget_bytes=float(random.integers(0, 14)) if limited else None,
    )


def _columns(random, widths):
    columns = [random.integers(0, 7, width).astype(float) for width in widths]
    for row in columns:
        row[1:][random.random(len(row) - 1) < 0.05] = math.inf
    return columns


def realistic(seed: int, gradients: int, **options) -> CodecSelection:
    """Dense, bytes, nibbles, signs: times of a link of 25 MB/s."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(np.log(1e4), np.log(4e6), gradients)).round()
    bits, lost = np.array([32.0, 8, 4, 1]), np.array([0.0, 1e-4, 0.02, 0.4])
    encode = np.array([0.0, 0.4e-9, 0.6e-9, 0.3e-9])
    energy = random.lognormal(size=gradients)
    backward = sizes.sum() * 2e-8
    fields = {
        "wire_s": tuple(bits * size / 8 / 25e6 for size in sizes),
        "local_s": tuple(encode * size for size in sizes),
        "error": tuple(lost * part for part in energy),
        "ready_s": tuple(np.cumsum(sizes[::-1])[::-1] / sizes.sum() * backward),
        "backward_s": backward,
        "error_budget": 0.05 * energy.sum(),
    }
    return CodecSelection(**{**fields, **options})


problems = st.integers(0, 10**6).map(random_problem)


def all_costs(problem):
    """Every combination that is possible and within the budgets, with its cost."""
    for choices in itertools.product(*map(range, problem.num_options)):
        cost = recompute(problem, choices)
        total = cost.cost_s + cost.error + cost.memory_bytes
        if math.isfinite(total) and fits(problem, cost):
            yield choices, cost.cost_s


def best(problem):
    return min((cost for _, cost in all_costs(problem)), default=math.inf)


def exposed_by_definition(problem, choices):
    """The largest of ``ready_l`` plus the wire of everything from ``l`` on."""
    order = sorted(range(len(choices)), key=lambda i: (problem.ready_s[i], i))
    wire = [float(problem.wire_s[i][choices[i]]) for i in order]
    ends = [problem.ready_s[i] + sum(wire[at:]) for at, i in enumerate(order)]
    return max(0.0, max(ends) - problem.backward_s)


def assert_best(problem, result):
    check_selection(problem, result)
    least = best(problem)
    if math.isinf(least):
        assert result.status is Status.INFEASIBLE
        assert result.bound_s == math.inf
    else:
        assert result.status is Status.OPTIMAL
        assert math.isclose(result.cost_s, least, rel_tol=1e-9, abs_tol=1e-9)
        assert result.bound_s <= least + 1e-9


@settings(max_examples=200, deadline=None)
@given(problems)
def test_matches_brute_force(problem):
    assert_best(problem, solve_selection(problem, gap=0.0))


@settings(max_examples=200, deadline=None)
@given(problems)
def test_integer_program_alone_matches_brute_force(problem):
    assert_best(problem, solve_selection(problem, gap=0.0, widths=()))


@settings(max_examples=200, deadline=None)
@given(problems)
def test_labels_alone_match_brute_force(problem):
    """As many labels as there are: nothing is left for the integer program."""

    def unused(*_):
        raise AssertionError("the integer program was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection_ilp, "backend_of", lambda _: unused)
        assert_best(problem, solve_selection(problem, gap=0.0, widths=(1024,)))


@settings(max_examples=200, deadline=None)
@given(problems, st.integers(1, 3))
def test_few_labels_prove_a_true_bound(problem, width):
    """What was cut for the width is not better than the bound."""
    options = options_of(problem)
    if options is None:
        return
    relaxed = relax(problem, build(problem, options))
    if relaxed is None:
        return
    clock = Clock(0.0, None)
    answer = search_labels(
        problem, options, relaxed, cutoff_s=math.inf, width=width, clock=clock
    )
    assert answer is not None
    least = best(problem)
    assert answer.bound_s <= least + 1e-9
    if answer.chosen is not None:
        cost = recompute(problem, in_numbering(problem, options, answer.chosen))
        assert fits(problem, cost)
        assert least <= cost.cost_s + 1e-9


@settings(max_examples=200, deadline=None)
@given(problems)
def test_descent_stays_within_the_budgets_and_improves(problem):
    """From any choice that fits to one that no single change improves."""
    options = options_of(problem)
    possible = [choices for choices, _ in all_costs(problem)]
    if options is None or not possible:
        return
    kept = {
        in_numbering(problem, options, chosen): chosen
        for chosen in map(np.array, itertools.product(*parts(options)))
    }
    begin = next((choices for choices in possible if choices in kept), None)
    assert begin is not None
    chosen = descend(problem, options, kept[begin])
    reached = recompute(problem, in_numbering(problem, options, chosen))
    assert fits(problem, reached)
    assert reached.cost_s <= recompute(problem, begin).cost_s + 1e-9
    for place, own in enumerate(parts(options)):
        for option in own:
            other = chosen.copy()
            other[place] = option
            cost = recompute(problem, in_numbering(problem, options, other))
            assert not fits(problem, cost) or cost.cost_s >= reached.cost_s - 1e-9


def test_descent_exchanges_two():
    """Neither change alone helps: one breaks the budget, the other costs time."""
    problem = CodecSelection(
        wire_s=(np.array([1.0, 2.0]), np.array([5.0, 2.0])),
        local_s=(np.zeros(2),) * 2,
        error=(np.array([1.0, 0.0]), np.array([0.0, 1.0])),
        ready_s=(0.0, 0.0),
        backward_s=0.0,
        error_budget=1.0,
    )
    options = options_of(problem)
    assert options is not None
    assert descend(problem, options, np.array([0, 2])).tolist() == [1, 3]


def parts(options):
    """By gradient in the link's order, its options."""
    return np.split(np.arange(len(options.gradient)), options.starts[1:-1])


def in_numbering(problem, options, chosen):
    """Choices by gradient, from options by the link's order."""
    codecs = dict(zip(problem.order, options.codec[chosen], strict=True))
    return tuple(int(codecs[index]) for index in range(len(codecs)))


@settings(max_examples=100, deadline=None)
@given(problems)
def test_default_gap(problem):
    """Within 1e-4 of the step, and never a bound above the best."""
    result = solve_selection(problem)
    check_selection(problem, result)
    least = best(problem)
    assert math.isinf(least) == (result.status is Status.INFEASIBLE)
    if not math.isinf(least):
        step = problem.backward_s + least
        assert least <= result.cost_s + 1e-9 <= least + 1e-4 * step + 2e-9
        assert result.bound_s <= least + 1e-9


@settings(max_examples=200, deadline=None)
@given(problems)
def test_prices_prove_their_bound(problem):
    """The bound is the formula at the prices, and below the best."""
    relaxation = solve_relaxation(problem)
    least = best(problem)
    if relaxation.status is Status.INFEASIBLE:
        assert math.isinf(least)
        assert relaxation.wire_weights == ()
        return
    assert relaxation.bound_s <= least + 1e-9
    in_order = [relaxation.wire_weights[i] for i in problem.order]
    assert in_order == sorted(in_order)
    assert all(0.0 <= weight <= 1.0 for weight in in_order)
    assert min(relaxation.seconds_per_error, relaxation.seconds_per_byte) >= 0
    for choices, cost in all_costs(problem):
        assert lagrangian(problem, relaxation, choices) <= cost + 1e-7


def lagrangian(problem, relaxation, choices):
    """What the prices charge for choices, budgets and readiness refunded."""
    priced = relaxation.priced(problem)
    total = sum(float(row[k]) for row, k in zip(priced, choices, strict=True))
    before = 0.0
    for index in problem.order:
        weight = relaxation.wire_weights[index]
        total += (weight - before) * (problem.ready_s[index] - problem.backward_s)
        before = weight
    if relaxation.seconds_per_error:
        total -= relaxation.seconds_per_error * problem.error_budget
    if relaxation.seconds_per_byte:
        total -= relaxation.seconds_per_byte * problem.memory_budget_bytes
    return total


@settings(max_examples=200, deadline=None)
@given(problems)
def test_exposed_time_is_the_definition(problem):
    """Running the link gives what the unrolled formula gives."""
    choices = tuple(size - 1 for size in problem.num_options)
    if not math.isfinite(recompute(problem, choices).wire_s):
        return
    exposed = exposed_by_definition(problem, choices)
    assert recompute(problem, choices).exposed_s == exposed


@settings(max_examples=200, deadline=None)
@given(problems)
def test_weights_are_derivatives(problem):
    """One more second of a gradient adds its weight, if a second passes no kink.

    Whole numbers have no kink within half a second above.
    """
    choices = (0,) * len(problem.wire_s)
    exposed = recompute(problem, choices).exposed_s
    for index, weight in enumerate(wire_weights(problem, choices)):
        slower = list(problem.wire_s)
        slower[index] = slower[index] + 0.5
        later = dataclasses.replace(problem, wire_s=tuple(slower))
        assert recompute(later, choices).exposed_s == exposed + 0.5 * weight


@settings(max_examples=200, deadline=None)
@given(problems)
def test_reductions_keep_a_best_choice(problem):
    """Among the options that stay is one choice as good as any."""
    options = options_of(problem)
    least = best(problem)
    if options is None:
        assert math.isinf(least)
        return
    kept = [set[int]() for _ in problem.wire_s]
    for place, codec in zip(options.gradient, options.codec, strict=True):
        kept[problem.order[place]].add(int(codec))
    remaining = (
        cost
        for choices, cost in all_costs(problem)
        if all(choice in own for choice, own in zip(choices, kept, strict=True))
    )
    assert min(remaining, default=math.inf) == least


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
    assert build(slow, options).program.names == ("start_0", "exposed")
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
    """Four gradients; each second on the link costs an error of a tenth to save."""
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
    honest = selection_ilp.backend_of("highs")
    asked = []

    def sloppy(program, limits, start):
        asked.append(program)
        if len(asked) > 1:
            return honest(program, limits, start)
        values = np.zeros(len(program.costs))
        values[1:8:2] = 1.0  # Option 1 four times: an error of 0.4.
        return Answer(values, -math.inf, True)

    monkeypatch.setattr(selection_ilp, "backend_of", lambda _: sloppy)
    nothing = selection_ilp.Found(None, math.inf, 0.0)
    monkeypatch.setattr(selection_ilp, "_rounded", lambda *_: nothing)
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
    assert solve_relaxation(problem).wire_weights == ()


# PuLP 3.3 warns of its own way to start CBC, which `autopar_solver.ilp.cbc` uses.
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
