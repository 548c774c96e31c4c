"""Tests that the examples with fused attention are planned without their devices."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from checkout import ROOT

from autopar.cli.target import load
from autopar.cluster import Cluster
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import analyse

SIZES = {"layers": "1", "d_model": "512", "heads": "4", "seq": "256"}


@pytest.mark.parametrize(
    ("example", "attention", "cluster"),
    [
        ("gpt", "cudnn", "2:h100"),
        ("gpt", "splash", "2:v5p"),
        ("llama", "pallas", "2:h100"),
        ("llama", "pallas_tpu", "2:v5p"),
    ],
)
def test_plan(example: str, attention: str, cluster: str) -> None:
    options = {**SIZES, "attention": attention, "dtype": "bfloat16"}
    if example == "llama":
        options["kv_heads"] = "2"
    workload = load(f"{ROOT / 'examples' / example}.py:workload", options)

    analysis = analyse(workload.step, workload.args)
    plan = plan_analysis(
        analysis, Cluster.parse(cluster), PlanOptions(stages=1, microbatches=1, remat=0)
    )

    assert any(op.kernel is not None for op in analysis.graph.operators)
    assert plan.unsupported_ops == ()


def test_an_attention_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    gpt: Any = importlib.import_module("gpt")

    with pytest.raises(ValueError, match="attention must be one of plain, cudnn"):
        gpt.workload(attention="flash")
