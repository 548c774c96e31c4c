"""Tests parts of the solver: recomputation, intervals, paths and the programme."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from stage_problems import problems

from autopar_solver.stages import relaxation
from autopar_solver.stages.entries import build_entries, kept_microbatches
from autopar_solver.stages.relaxation import (
    StageTerms,
    best_prices,
    chain_of,
    cheapest,
    choose_recomputed,
    crossings_of,
    device_table,
    fits_devices,
    least_recompute_s,
    recompute_prices,
    through,
)
from autopar_solver.stages.schedules.play import Schedule, ScheduleKind
from autopar_solver.stages.search import (
    Answer,
    budgets_of,
    cut_intervals,
    num_states,
    solve_tables,
)

seeds = st.integers(0, 10**6)


@settings(max_examples=examples(80), deadline=None)
@given(problems, st.integers(1, 4), st.integers(0, 3))
def test_least_layers_are_computed_again(problem, held, pending):
    """As trying every set does; the bound by prices is never above."""
    costs = problem.costs[0]
    entries = build_entries(problem, costs)
    kept = [(held, pending), (held - 1, pending + 1)]
    bounds = least_recompute_s(entries, recompute_prices(costs), kept)
    for entry, bound in enumerate(bounds.tolist()):
        layers = range(int(entries.first[entry]), int(entries.end[entry]))
        option = int(entries.option[entry])
        resident = float(entries.resident_bytes[entry])
        wait = float(entries.pending_bytes[entry])
        fixed = [(resident + p * wait, float(h)) for h, p in kept]
        found = choose_recomputed(problem, costs, layers, option, fixed)
        best = tried(problem, costs, layers, option, fixed)
        assert (math.inf if found is None else found.seconds) == best
        assert bound <= best * (1 + 1e-9)
        assert found is None or found.least_s == best


def tried(problem, costs, layers, option, fixed) -> float:
    best = math.inf
    for size in range(len(layers) + 1):
        for again in itertools.combinations(layers, size):
            seconds = sum(costs.recompute_s[n, option] for n in again)
            act, small = costs.activation_bytes, costs.boundary_bytes
            held = sum((small if n in again else act)[n, option] for n in layers)
            running = max(
                costs.transient_bytes[n, option] + (n in again) * act[n, option]
                for n in layers
            )
            most = max(kept + times * held for kept, times in fixed) + running
            if most <= problem.limit_bytes(option):
                best = min(best, float(seconds))
    return best


def test_many_kinds_of_layers_are_chosen_among():
    """Thirty layers, all different: the choice is proved, and fits."""
    random = np.random.default_rng(0)
    saving = random.uniform(1, 2, 30)
    seconds = random.uniform(1, 2, 30)
    found = relaxation._cover(saving, seconds, 20.0, math.inf)
    assert found is not None
    chosen, least = found
    assert saving[chosen].sum() >= 20.0
    assert math.isclose(seconds[chosen].sum(), least)


@settings(max_examples=examples(200), deadline=None)
@given(seeds)
def test_intervals_find_the_least_sum_and_maximum(seed):
    """Against trying every choice; with a cutoff, the bound is the lesser of both."""
    random = np.random.default_rng(seed)
    values, peaks = random.integers(0, 30, (2, 12)).astype(float)

    def least(peak: float) -> Answer:
        allowed = np.flatnonzero(peaks <= peak)
        if not len(allowed):
            return Answer(math.inf, peak)
        best = allowed[np.argmin(values[allowed])]
        return Answer(float(values[best]), float(peaks[best]))

    cutoff = float(random.integers(1, 60))
    low = float(peaks.min())
    bound, left = cut_intervals(least, low, 40.0, lambda: cutoff, 200)
    assert bound <= min(cutoff, (values + peaks).min()) + 1e-9
    assert bound >= min(cutoff, (values + peaks).min()) - 1e-6
    if left:
        assert bound < cutoff


@settings(max_examples=examples(50), deadline=None)
@given(problems)
def test_programme_finds_the_cheapest_chain(problem):
    """Against trying every chain of stages; prices on devices never claim more."""
    costs = problem.costs[0]
    entries = build_entries(problem, costs)
    if not len(entries):
        return
    crossings = crossings_of(problem, costs, problem.schedules[0])
    taken = device_table(problem, range(len(problem.options)))
    devices = np.array([group.devices for group in problem.groups])
    chain = chain_of(entries, taken, devices, crossings.cross)
    random = np.random.default_rng(len(entries))
    layers = problem.num_layers
    terms = [
        StageTerms(
            add=random.integers(0, 20, len(entries)).astype(float),
            peak=random.integers(0, 20, len(entries)).astype(float),
        )
        for _ in range(layers)
    ]
    budgets = budgets_of(chain)
    room = np.full(len(entries), math.inf)
    tables = solve_tables(
        chain, budgets, terms, np.zeros_like(crossings.link), 15.0, room
    )
    assert num_states(chain) == budgets.size
    found = dict(enumerate(tables.values, start=1))
    for count in range(1, layers + 1):
        best = min(
            (value for value, _ in chains(chain, terms[:count], 15.0)),
            default=math.inf,
        )
        assert found.get(count, math.inf) == best
        if math.isfinite(best):
            walked = tables.walk(count)
            assert value_of(chain, terms[:count], walked) == best
    same = [terms[0]] * layers
    add = np.where(terms[0].peak <= 15.0, terms[0].add, np.inf)
    plain = min(
        (
            value
            for count in range(1, layers + 1)
            for value, _ in chains(chain, same[:count], 15.0)
        ),
        default=math.inf,
    )
    bound, _ = best_prices(chain, add, np.ones(len(devices)), 5)
    assert bound <= plain + 1e-9
    paths = cheapest(chain, add)
    least = through(chain, add, paths)
    for count in range(1, layers + 1):
        for value, chosen in chains(chain, same[:count], 15.0):
            assert fits_devices(chain, np.isin(np.arange(len(entries)), chosen))
            assert (least[list(chosen)] <= value + 1e-9).all()


def chains(chain, terms, peak):
    """Yields all feasible chains of ``len(terms)`` stages, with their values."""
    numbers = range(len(chain.first))
    for chosen in itertools.product(numbers, repeat=len(terms)):
        value = value_of(chain, terms, chosen)
        peaks = [
            at.peak[entry] for at, entry in zip(terms, reversed(chosen), strict=True)
        ]
        if math.isfinite(value) and max(peaks) <= peak:
            yield value, chosen


def value_of(chain, terms, chosen) -> float:
    ends = [0, *(int(chain.end[entry]) for entry in chosen)]
    if ends[-1] != chain.layers or any(
        chain.first[entry] != begin
        for entry, begin in zip(chosen, ends[:-1], strict=True)
    ):
        return math.inf
    if (chain.taken[list(chosen)].sum(axis=0) > chain.devices).any():
        return math.inf
    value = sum(at.add[e] for at, e in zip(terms, reversed(chosen), strict=True))
    for a, b in itertools.pairwise(chosen):
        value += chain.cross[chain.end[a], chain.link[a], chain.link[b]]
    return float(value)


def test_zero_bubble_keeps_weights_pending_at_the_end():
    schedule = Schedule(ScheduleKind.ZERO_BUBBLE)
    assert kept_microbatches(schedule, 8, 1, 4) == [(1, 3), (0, 4)]
    assert kept_microbatches(schedule, 8, 4, 4) == [(4, 0), (3, 1)]
