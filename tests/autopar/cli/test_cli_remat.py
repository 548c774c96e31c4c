"""Tests rematerialisation on the command line (``--remat``)."""

from __future__ import annotations

import pathlib

from checkout import ROOT
from command_line import Run
from golden import assert_golden

from autopar.plans import Plan

SMALL = ("layers=3", "d_model=32", "seq=32", "batch=64")
TARGET = f"{ROOT / 'examples' / 'gpt.py'}:workload"
WORDS = (TARGET, *SMALL, "--cluster", "8:cpu", "--max-axes", "1")


def test_the_plan_and_its_explanation(run: Run, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    result = run("plan", *WORDS, "--remat", "3", "--out", str(path))
    assert (result.code, result.err) == (0, "")
    assert_golden(result.out.partition("\n\n")[0], "gpt_remat_8_cpu.txt")

    assert len(Plan.load(path).remat.layers) == 3
    explained = run("explain", str(path), "--by", "layer")
    assert explained.code == 0
    assert "compute again" in explained.out


def test_what_is_wrong_is_said(run: Run) -> None:
    result = run("plan", *WORDS, "--remat", "most")

    assert result.code == 2
    assert "expected how many layers compute their activations again" in result.err
