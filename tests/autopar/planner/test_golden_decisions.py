"""Golden decisions of the planner for many steps on many clusters.

The problems are so small that they are solved without a time limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import golden_steps
import numpy as np
import planner_cases
import pytest
import step_forms
from checkout import GOLDEN
from figures import digest, digest_all, row
from golden import assert_golden
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner import solving
from autopar.planner.codecs import choose
from autopar.planner.experts import expert_plans
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.proposals import Proposal, recorded_proposals
from autopar.planner.stages import plan as stages
from autopar.plans import Plan
from autopar.steps.analysis import Analysis, analyse

AS_WRITTEN = {"stages": 1, "microbatches": 1, "remat": 0}
WHOLE = {
    "compression": "int8",
    "axis_names": ("rows",),
    "pins": {"params/*": PartitionSpec(), "batch/*": PartitionSpec("rows")},
}
# Name of the file: step, cluster, options.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mlp": ("mlp_adam", "2x4:cpu", AS_WRITTEN),
    "mlp_codecs": (
        "mlp_adam",
        "2x2:h100,network=1Gb/s",
        {**AS_WRITTEN, "compression": "auto"},
    ),
    "convolutions_int8": (
        "convolutions",
        "1x2:a100",
        {**AS_WRITTEN, "compression": "int8"},
    ),
    "mlp_staged": ("mlp_adam", "2x2:cpu", {"stages": 2, "microbatches": 4}),
    "mlp_auto": (
        "mlp_adam",
        "2x2:cpu,network=30Mb/s",
        {"stages": "auto", "microbatches": 4},
    ),
    "muon": ("muon_step", "2x2:v5e", AS_WRITTEN),
    "adafactor": ("adafactor", "2x4:cpu", AS_WRITTEN),
    "experts": ("experts", "1x4:a100", AS_WRITTEN),
    "convolutions": ("convolutions", "1x4:a100", AS_WRITTEN),
    "recurrent": ("recurrent", "2x2:v5e", AS_WRITTEN),
    "tables": ("tables", "8:h100", AS_WRITTEN),
    "attention": ("fused_attention", "1x8:h100", AS_WRITTEN),
    "branches": ("branches", "2x4:cpu", AS_WRITTEN),
    "blocks": ("blocks", "1x4:a100", AS_WRITTEN),
    "small_auto": ("scan_layers", "2x2:cpu", {"stages": "auto", "remat": "auto"}),
    "convolutions_staged": (
        "convolutions",
        "2x2:a100,network=1Gb/s",
        {"stages": 2, "microbatches": 2, "coupled": "microbatch", **WHOLE},
    ),
    "small_replicas": ("mlp_sgd", "1x2:cpu+1x2:cpu,efficiency=0.4", {}),
}


def analysis_of(name: str) -> Analysis:
    if name in planner_cases.names():
        return analyse(*planner_cases.workload(name))
    return golden_steps.analysis_of(name)


def cluster_of(text: str) -> Cluster:
    """A cluster by its text; after ``cheap``, its links cost almost nothing."""
    cheap, _, rest = text.rpartition(" ")
    return step_forms.cheap(rest) if cheap else Cluster.parse(rest)


def proposal_line(proposal: Proposal) -> str:
    return row(
        "proposal",
        program=proposal.program,
        mesh=proposal.mesh,
        by=proposal.proposer,
        step=proposal.step_s,
        peak=proposal.peak_bytes,
        note=proposal.note,
        timed=proposal.cpu_s > 0,
    )


def plan_lines(plan: Plan) -> Iterator[str]:
    yield str(plan)
    for stage in plan.stages:
        yield row(
            "decisions",
            nodes=len(stage.nodes),
            axes=digest([len(names) for n in stage.nodes for names in n.axes]),
            copies=len(stage.copies),
        )


class Problems:
    """Records the problems that the planner passes to solvers, and their solutions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, list[dict[str, list[float]]]] = {}
        patch.setattr(solving, "solve", self.noted(solving.solve))
        patch.setattr(stages, "solve_stages", self.noted(stages.solve_stages))
        patch.setattr(choose, "solve_selection", self.noted(choose.solve_selection))

    def noted(self, solve: Callable[..., Any]) -> Callable[..., Any]:
        rows = self.found[solve.__name__] = []

        def run(problem: Any, **options: Any) -> Any:
            answer = solve(problem, **options)
            given = {k: _numbers(options[k]) for k in ("gap", "below") if k in options}
            # What is found within a time limit depends on the machine.
            found = {} if options.get("seconds") else _fields(answer)
            rows.append({**_fields(problem), **given, **found})
            return answer

        return run

    def lines(self) -> Iterator[str]:
        for name, rows in self.found.items():
            if rows:
                yield row(name, problems=len(rows))
            for field in dict.fromkeys(f for each in rows for f in each):
                numbers = [each.get(field, []) for each in rows]
                yield row(f"  {field}", numbers=digest_all(numbers))


def _fields(record: Any, owner: str = "") -> dict[str, list[float]]:
    """The numbers in each field of a record, also in nested records.

    Measured times are left out, and which of several choices with equal costs is made:
    it depends on how a processor rounds.
    """
    found: dict[str, list[float]] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            named = {f"{owner}{field.name}": _numbers(part)}
            if dataclasses.is_dataclass(part):
                named = _fields(part, f"{owner}{field.name}.")
            for name, numbers in named.items():
                found[name] = [*found.get(name, []), *numbers]
    return {k: v for k, v in found.items() if v and k not in ("seconds", "choices")}


def _numbers(value: Any) -> list[float]:
    """The numbers of a value; for an array its sum, and its sum weighted by index."""
    if isinstance(value, (bool, int, float)):
        return [float(value)]
    if isinstance(value, np.ndarray):
        kept = value[np.isfinite(value)].ravel()
        return [float(kept.sum()), float(kept @ np.arange(1.0, len(kept) + 1.0))]
    if isinstance(value, (tuple, list)):
        return [x for one in value for x in _numbers(one)]
    return []


def lines_of(name: str) -> Iterator[str]:
    step, cluster, given = CASES[name]
    options = PlanOptions(**{"seconds": None, **given})
    with pytest.MonkeyPatch.context() as patch, recorded_proposals() as proposals:
        problems = Problems(patch)
        try:
            plan = plan_analysis(analysis_of(step), cluster_of(cluster), options)
        except PlanError as error:
            yield str(error)
        else:
            yield from plan_lines(plan)
    yield from map(proposal_line, proposals)
    yield from problems.lines()


@pytest.mark.parametrize("name", CASES)
def test_decisions(name: str) -> None:
    assert_golden("\n".join(lines_of(name)), f"decisions/{name}.txt")


def test_every_case_has_its_file_and_no_others() -> None:
    kept = {path.stem for path in (GOLDEN / "decisions").iterdir()}
    assert kept == set(CASES)


def test_plans_of_experts() -> None:
    """By the rules of people, each on the mesh and for the seconds that it takes."""
    lines: list[str] = []
    for step, cluster in (("attention", "2x2:cpu"), ("mlp_sgd", "cheap 2x2:cpu")):
        found = expert_plans(analysis_of(step), cluster_of(cluster), seconds=None)
        for one in found:
            made = one.candidate
            lines.append(
                row(
                    one.name,
                    mesh=one.mesh,
                    step=made.step_s if made else None,
                    peak=made.peak_memory_bytes if made else None,
                    reason=one.reason,
                )
            )

    assert_golden("\n".join(lines), "experts.txt")
