"""The values that a ring sends, and what arithmetic coding makes of them."""

from __future__ import annotations

import importlib
from typing import Any

import checkout
import numpy as np
import pytest


@pytest.fixture
def coding(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "benchmarks"))
    return importlib.import_module("ring_coding")


def test_values_are_those_that_a_ring_sends(coding: Any) -> None:
    workers, values = 4, 10
    numbers = np.random.default_rng(0).integers(-9, 9, (workers, values))
    pieces = [np.array_split(x, workers) for x in numbers]
    held = [list(x) for x in pieces]
    sent = []
    for step in range(workers):  # in the last step, what the other half sends
        out = [held[w][(w - step) % workers] for w in range(workers)]
        sent.append(np.sort(np.concatenate(out)))
        for w, data in enumerate(out):
            chunk = (w - step) % workers
            held[(w + 1) % workers][chunk] = held[(w + 1) % workers][chunk] + data
    found = [np.sort(x) for x in coding.ring_values(numbers)]
    assert all(np.array_equal(x, y) for x, y in zip(found, sent, strict=True))


def test_bits_of_a_ring(coding: Any) -> None:
    # Three workers send a third of the values in each of two steps, twice.
    assert coding.ring_bits([3.0, 6.0, 9.0]) == pytest.approx((3 + 6 + 2 * 9) / 3)
    wire = coding.all_reduce_s([32.0] * 2, 100, None)
    assert wire == pytest.approx(32 * coding.ELEMENTS / 1e8)
    work = dict.fromkeys(("encode", "decode", "symbols", "table", "round", "add"), 1e9)
    assert coding.all_reduce_s([32.0] * 2, 100, work) > wire


def test_coded_bits_are_near_the_entropy(coding: Any) -> None:
    pytest.importorskip("constriction")
    values = np.rint(3 * np.random.default_rng(0).normal(size=20_000)).astype(np.int32)
    exact = coding.entropy(values)
    assert exact <= coding.coded_bits(values, coding.Table(values)) < 1.01 * exact
    narrow = coding.Table(values[np.abs(values) < 3])
    assert coding.coded_bits(values, narrow) > exact + 1.0  # escapes
