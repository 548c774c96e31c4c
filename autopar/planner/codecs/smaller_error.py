"""Of choices of codecs that cost the same, the one with the smaller errors."""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar_solver import CodecSelection, SelectionResult, fits_budgets, recompute

# Costs that differ by less, as a share of the backward pass and the cost together, are
# the same: the solver proves no more, and the smaller error is taken.
GAP = 1e-4


def with_less_error(
    problem: CodecSelection, answer: SelectionResult
) -> SelectionResult:
    """The choices with less error that cost the same, as far as the solver can tell.

    Gradient by gradient the option of least error is taken that costs no more by itself
    nor, with all others as they are, in the step.
    """
    most = answer.cost_s + GAP * (problem.backward_s + answer.cost_s)
    chosen, spent = list(answer.choices), answer.cost_s
    for site, errors in enumerate(problem.error):
        now, local, wire = chosen[site], problem.local_s[site], problem.wire_s[site]
        # Work that cannot hide behind the backward pass costs all of its time.
        own = local if problem.backward_s else local + wire
        for k in np.argsort(errors, kind="stable").tolist():
            if errors[k] >= errors[now]:
                break
            if own[k] - own[now] > most - spent:
                continue
            trial = [*chosen[:site], k, *chosen[site + 1 :]]
            cost = recompute(problem, trial)
            if cost.cost_s <= most and fits_budgets(problem, cost):
                chosen, spent = trial, cost.cost_s
                break
    cost = recompute(problem, chosen)
    fields = {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost)}
    return dataclasses.replace(answer, choices=tuple(chosen), **fields)
