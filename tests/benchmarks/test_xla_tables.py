"""Tests the benchmark of rates: how it reads tables, what it holds out, and its bars.

The measurements are read from the file that AUTOPAR_XLA_TABLES names, or else from
../shared next to the checkout.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEFAULT = ROOT.parent / "shared" / "published" / "xla_tables.json"
TABLES = pathlib.Path(os.environ.get("AUTOPAR_XLA_TABLES", DEFAULT))

measured = pytest.mark.skipif(
    not TABLES.is_file(), reason=f"no measurements: there is no {TABLES.name}"
)


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def load() -> Any:
    return importlib.import_module("xla_tables")


COLLECTIVES = {
    "columns": [
        "device", "collective", "group_size", "groups", "tensor_bytes", "seconds",
        "permute_pairs",
    ],
    "rows": [
        ["H100", "all-gather", 4, 2, 1 << 20, 2e-5, None],
        ["H100", "collective-permute", None, None, 1 << 21, 3e-5, 4],
        ["GB200", "all-to-all", 18, 4, 4608, 1e-5, None],
    ],
}  # fmt: skip
PRODUCTS = {
    "columns": ["device", "batch", "m", "n", "k", "TFLOP/s by types"],
    "rows": [["B200", 2, 256, 512, 1024, {"bf16xbf16->bf16": 100.0}]],
}


def test_rows_are_read_by_the_model_s_conventions() -> None:
    tables = load()
    gather, permute, exchange = tables.transfers({"collectives": COLLECTIVES})
    (product,) = tables.products({"matmuls": PRODUCTS})

    assert (gather.device, gather.kind, gather.group_size) == ("h100", "all_gather", 4)
    assert (permute.group_size, permute.one_way) == (8, True)
    assert (exchange.devices, exchange.held_out) == (72, True)
    assert product.seconds == pytest.approx(2 * 2 * 256 * 512 * 1024 / 100e12)
    assert product.held_out


def shares(rows: Iterable[Any], predict: Callable[[Any], float]) -> list[float]:
    """The errors of predictions for held-out rows, in ascending order."""
    return sorted(abs(predict(r) / r.seconds - 1) for r in rows if r.held_out)


@measured
@pytest.mark.parametrize(
    ("large", "median", "bound", "share"),
    [(True, 0.1, 0.4, 0.9), (False, 0.2, 0.4, 0.9)],
)
def test_collectives_that_no_fit_has_seen(
    large: bool, median: float, bound: float, share: float
) -> None:
    tables = load()
    rows = [
        row
        for row in tables.transfers(json.loads(TABLES.read_text()))
        if (row.nbytes >= tables.SMALL_BYTES) == large
    ]
    found = shares(rows, tables.predicted_transfer_s)

    assert found[len(found) // 2] <= median
    assert sum(d <= bound for d in found) >= share * len(found)


@measured
def test_products_that_no_fit_has_seen() -> None:
    tables = load()
    rows = tables.products(json.loads(TABLES.read_text()))
    found = shares(rows, tables.predicted_product_s)

    assert found[len(found) // 2] <= 0.05
    assert sum(d <= 0.15 for d in found) >= 0.85 * len(found)
