"""Formats figures of golden files with six digits, and digests of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


def figure(value: Any) -> str:
    """A number with six digits; any other value as text."""
    if isinstance(value, (bool, np.bool_, str)) or value is None:
        return str(value)
    if isinstance(value, (tuple, list)):
        return "(" + " ".join(map(figure, value)) + ")"
    return f"{float(value):.6g}"


def row(title: str, figures: Mapping[str, Any] | None = None, /, **more: Any) -> str:
    """A line with a title and figures by name."""
    named = {**(figures or {}), **more}
    return f"{title:12} " + "  ".join(f"{k} {figure(v)}" for k, v in named.items())


def digest(values: Any) -> str:
    """The number, sum and position-weighted sum of an array's finite elements.

    Sums have five digits, because the sixth depends on the processor. Many elements
    have few decimals, so that a sum may end in a five behind the fifth digit. It is
    always rounded up.
    """
    flat = np.asarray(values, dtype=float).ravel()
    finite = np.isfinite(flat)
    kept = np.where(finite, flat, 0.0)
    placed = float(kept @ (1.0 + np.arange(len(kept)) % 97))
    sums = (f"{x * (1 + 1e-9):.5g}" for x in (float(kept.sum()), placed))
    return f"{int(finite.sum())}/{len(flat)} {' '.join(sums)}"


def digest_all(arrays: Any) -> str:
    """The `digest` of several arrays that are joined."""
    parts = [np.asarray(a, dtype=float).ravel() for a in arrays]
    return digest(np.concatenate(parts) if parts else np.zeros(0))


def arrays_of(record: Any) -> dict[str, str]:
    """The `digest` of each array and number of a record, by field."""
    named = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    kinds = (float, int, np.ndarray, np.generic)
    return {k: digest(v) for k, v in named.items() if isinstance(v, kinds)}
