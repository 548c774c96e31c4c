"""Golden plans of every example on two clusters, as text to review like code.

Planning has no time limit, so a plan depends only on its step and cluster. Only layouts
are planned, so that the search ends soon. The text comes from formulas, not from
measurements.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from checkout import GOLDEN, ROOT
from golden import assert_golden

from autopar.cluster import Cluster
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import Analysis, analyse

CLUSTERS = ("2x4:cpu", "4x8:h100")
# The structure is that of the whole example. Few layers, and a batch at which the
# fastest plan on CPUs is clear: at the examples' own batch its proof takes ten times
# as long.
BATCH = 256
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2},
    "gpt-scan": {"layers": 2},
    "gpt-nnx": {"layers": 2},
    "llama": {"layers": 2},
    "vit": {"layers": 2},
    "resnet": {"stages": 2, "blocks": 1},
    "moe": {"layers": 2},
    "lstm": {"layers": 1},
    "recommendation": {"tables": 4},
}


@functools.lru_cache(maxsize=1)  # the clusters of an example follow one another
def analysis_of(example: str) -> Analysis:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import workloads

        step, args = workloads.arguments(example, batch=BATCH, **OPTIONS[example])
        return analyse(step, args)


def file_name(example: str, cluster: str) -> str:
    return f"plans/{example}-{cluster.replace(':', '_')}.txt"


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("example", OPTIONS)
def test_plan(example: str, cluster: str) -> None:
    options = PlanOptions(seconds=None, stages=1, microbatches=1, remat=0)

    found = plan_analysis(analysis_of(example), Cluster.parse(cluster), options)

    assert_golden(str(found), file_name(example, cluster))


def test_every_example_has_its_files_and_no_others() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import workloads

        assert set(OPTIONS) == set(workloads.EXAMPLES)
    expected = {file_name(e, c) for e in OPTIONS for c in CLUSTERS}
    kept = (GOLDEN / "plans").iterdir()
    assert {f"plans/{path.name}" for path in kept} == expected
