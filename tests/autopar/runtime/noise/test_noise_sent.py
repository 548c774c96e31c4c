"""Tests the measured noise if codecs sum the gradients."""

from __future__ import annotations

import re
from typing import Any

import jax
import noise_cases as cases
import numpy as np
import pytest

import autopar
from autopar.goodput import NoiseOptions
from autopar.runtime.noise.norms import SCOPE

DATA: dict[str, Any] = {"axis_names": ("data",), "pins": cases.REPLICATED}
SPLIT: dict[str, Any] = {"axis_names": ("data",), "pins": cases.SPLIT}
LAYOUTS = {"replicated": DATA, "split": SPLIT}
RATE = 0.1  # of `noise_cases.step`


def excess_of(before: Any, after: Any, batch: Any) -> float:
    """The excess of a step's gradient over that of one device."""
    exact = jax.grad(cases.loss_of)(before, batch)
    return sum(
        float(np.square((w - np.asarray(after[name], np.float64)) / RATE).sum())
        - float(np.square(np.asarray(exact[name], np.float64)).sum())
        for name, w in ((k, np.asarray(x, np.float64)) for k, x in before.items())
    )


@pytest.mark.parametrize(
    ("codec", "layout", "every"),
    [
        ("int8", "replicated", 2),
        ("int8", "split", 1),
        ("sign", "replicated", 1),
        ("topk:ratio=0.1", "replicated", 2),
        ("powersgd:rank=2", "replicated", 1),
    ],
)
def test_excess_is_that_of_the_sum_of_the_codec(
    codec: str, layout: str, every: int
) -> None:
    """Whether the sum is made anew in a branch, is read, or is split."""
    run = cases.parallel(
        **LAYOUTS[layout], compression=codec, noise_scale=NoiseOptions(every=every)
    )
    before = jax.tree.map(np.asarray, cases.state())
    after, _ = run(cases.state(), cases.batch())
    found = run.noise_scale

    wanted = excess_of(before, after, cases.batch())
    # The weights are float32: their differences have about this error.
    assert found.excess == pytest.approx(wanted, rel=1e-4, abs=1e-4 * found.total)


def test_a_fallback_is_measured_as_it_is_taken() -> None:
    run = cases.parallel(
        **DATA,
        compression="topk:ratio=0.1",
        fallback="dense",
        least_gain=1.0,
        noise_scale=NoiseOptions(every=2),
    )
    run(cases.state(), cases.batch())
    found = run.noise_scale

    assert found.excess == pytest.approx(0.0, abs=1e-5 * found.total)


def test_the_branch_reads_what_is_in_memory_for_the_codec() -> None:
    """Each gradient once, as the codec reads it, and none of the decoded sums."""
    run = autopar.parallelize(
        cases.step, cluster="8:cpu", noise_scale=True, compression="int8",
        seconds=None, **DATA,
    )  # fmt: skip
    text = run.lower(cases.state(), cases.batch()).compile().as_text()
    (branch,) = [x for x in text.splitlines() if " conditional(" in x and SCOPE in x]
    names = re.findall(r"%([\w.\-]+)", branch.split(" conditional(")[1].split(")")[0])
    operands: list[str] = []
    for name in names[1:]:
        (made,) = re.findall(rf"^ *%{re.escape(name)} = .* tuple\((.*?)\)", text, re.M)
        operands += re.findall(r"%([\w.\-]+)", made)
    shapes = [
        re.search(rf"%{re.escape(x)} = (\w+)\[([\d,]*)\]", text) for x in set(operands)
    ]
    floats = [
        int(np.prod([int(n) for n in s[2].split(",") if n]))
        for s in shapes
        if s is not None and s[1] == "f32"
    ]

    matrix = cases.WIDTH**2
    assert [size for size in floats if size >= matrix] == [matrix] * 2
