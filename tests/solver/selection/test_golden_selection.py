"""Compares intermediate figures of the codec selection with golden files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from figures import arrays_of, digest, digest_all, row
from golden import assert_golden
from selection_problems import random_problem, realistic

from autopar_solver import CodecSelection, recompute, solve_selection
from autopar_solver.clock import Clock
from autopar_solver.selection import solve as selecting
from autopar_solver.selection.lgreco import (
    LGreCoProblem,
    rounded_errors,
    solve_lgreco,
    solve_lgreco_ilp,
)
from autopar_solver.selection.problem import OptionTable, options_of, wire_weights
from autopar_solver.selection.program import (
    Relaxed,
    build_program,
    relax,
    solve_relaxation,
)
from autopar_solver.selection.solve import SelectionIncumbent, descend, search_labels


@contextlib.contextmanager
def noted(log: list[tuple[float, ...]]) -> Iterator[None]:
    """Appends every offered solution and every proved bound to the log, in order."""
    offer, prove = SelectionIncumbent.offer, SelectionIncumbent.prove

    def noted_offer(self: SelectionIncumbent, *given: Any) -> SelectionIncumbent:
        found = offer(self, *given)
        log.append((found.cost_s, *given[1]))
        return found

    def noted_proof(self: SelectionIncumbent, bound: float) -> SelectionIncumbent:
        log.append((bound,))
        return prove(self, bound)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectionIncumbent, "offer", noted_offer)
        patch.setattr(SelectionIncumbent, "prove", noted_proof)
        yield


def solution_lines(problem: CodecSelection, **options: Any) -> Iterator[str]:
    log: list[tuple[float, ...]] = []
    with noted(log):
        found = solve_selection(problem, **options)
    yield row(
        "solution",
        status=found.status.name,
        cost=found.cost_s,
        bound=found.bound_s,
        exposed=found.exposed_s,
        error=found.error,
        memory=found.memory_bytes,
        choices=found.choices,
        log=digest([seconds for seconds, *_ in log]),
        offered=digest_all(choices for _, *choices in log),
    )
    if found.choices:
        yield row("weights", weights=digest(wire_weights(problem, found.choices)))
        last = [len(row) - 1 for row in problem.wire_s]
        if all(map(math.isfinite, (problem.wire_s[i][k] for i, k in enumerate(last)))):
            yield row("last", cost=recompute(problem, last).cost_s)


def label_lines(
    problem: CodecSelection, options: OptionTable, relaxed: Relaxed
) -> Iterator[str]:
    drop = selecting._drop_dominated_labels
    for width in (2, 64):
        counts: list[tuple[int, int]] = []

        def noted(problem: Any, labels: Any, counts: Any = counts) -> np.ndarray:
            kept = drop(problem, labels)
            counts.append((len(labels.local), len(kept)))
            return kept

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selecting, "_drop_dominated_labels", noted)
            answer = search_labels(
                problem,
                options,
                relaxed,
                cutoff_s=math.inf,
                width=width,
                clock=Clock(0.0, None),
            )
        assert answer is not None
        chosen = answer.chosen
        yield row(
            "labels",
            width=width,
            labels=[n for pair in counts for n in pair],
            bound=answer.bound_s,
            chosen=digest(chosen if chosen is not None else -1),
            descended=digest(
                descend(problem, options, chosen) if chosen is not None else -1
            ),
        )


def program_lines(problem: CodecSelection) -> Iterator[str]:
    priced = solve_relaxation(problem)
    yield row(
        "prices",
        wire=digest(priced.wire_weights),
        error=priced.seconds_per_error,
        memory=priced.seconds_per_byte,
        bound=priced.bound_s,
    )
    options = options_of(problem)
    if options is None:
        yield row("options", none=True)
        return
    yield row("options", starts=digest(options.starts), codec=digest(options.codec))
    built = build_program(problem, options)
    program, blocks = built.program, built.blocks
    yield row(
        "program",
        unit=built.unit_s,
        constant=built.constant_s,
        scales=list(built.scales.values()),
        names=len(program.names),
        **arrays_of(program),
    )
    yield row("blocks", arrays_of(blocks))
    relaxed = relax(problem, built)
    if relaxed is None:
        return
    yield row(
        "relaxed",
        bound=relaxed.bound_s,
        weights=digest(relaxed.weights),
        rises=digest(relaxed.rises),
    )
    yield from label_lines(problem, options, relaxed)


def test_searches() -> None:
    lines: list[str] = []
    cases = [random_problem(seed) for seed in range(30)]
    cases += [realistic(seed, 12) for seed in range(4)]
    cases += [realistic(7, 30, error_budget=math.inf)]
    for number, problem in enumerate(cases):
        lines += ["", f"problem {number}", *solution_lines(problem)]
        lines += solution_lines(problem, widths=(), gap=1e-3)
        lines += program_lines(problem)

    assert_golden("\n".join(lines).strip(), "searches/selection.txt")


def layers(seed: int) -> LGreCoProblem:
    random = np.random.default_rng(seed)
    widths = random.integers(1, 6, random.integers(1, 7))
    return LGreCoProblem(
        error=tuple(np.sort(random.uniform(0, 9, w))[::-1].copy() for w in widths),
        size=tuple(np.sort(random.uniform(0, 9, w)) for w in widths),
        reference=tuple(int(random.integers(0, w)) for w in widths),
        alpha=float(random.choice([0.0, 0.7, 1.0, 1.6])),
        buckets=int(random.integers(4, 80)),
    )


def test_lgreco() -> None:
    lines: list[str] = []
    for seed in range(24):
        problem = layers(seed)
        lines.append(row(f"problem {seed}", budget=problem.error_budget))
        lines.append(row("rounded", errors=digest_all(rounded_errors(problem))))
        for name, found in (
            ("published", solve_lgreco(problem)),
            ("whole", solve_lgreco(problem, whole_budget=True)),
            ("exact", solve_lgreco_ilp(problem)),
            ("half", solve_lgreco_ilp(problem, error_budget=problem.error_budget / 2)),
        ):
            lines.append(
                row(
                    name,
                    status=found.status.name,
                    size=found.size,
                    error=found.error,
                    choices=found.choices,
                )
            )

    assert_golden("\n".join(lines), "searches/lgreco.txt")
