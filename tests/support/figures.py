"""Figures of golden files: six digits, by name, and sums of whole arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


def figure(value: Any) -> str:
    """A number at six digits; anything else as it is."""
    if isinstance(value, (bool, np.bool_, str)) or value is None:
        return str(value)
    if isinstance(value, (tuple, list)):
        return "(" + " ".join(map(figure, value)) + ")"
    return f"{float(value):.6g}"


def row(title: str, figures: Mapping[str, Any] | None = None, /, **more: Any) -> str:
    """A line of names with their figures."""
    named = {**(figures or {}), **more}
    return f"{title:12} " + "  ".join(f"{k} {figure(v)}" for k, v in named.items())


def digest(values: Any) -> str:
    """The number of finite entries of an array, their sum, and the sum by position."""
    flat = np.asarray(values, dtype=float).ravel()
    finite = np.isfinite(flat)
    kept = np.where(finite, flat, 0.0)
    placed = float(kept @ (1.0 + np.arange(len(kept)) % 97))
    return f"{int(finite.sum())}/{len(flat)} {kept.sum():.6g} {placed:.6g}"


def digest_all(arrays: Any) -> str:
    """`digest` of several arrays, one behind the other."""
    parts = [np.asarray(a, dtype=float).ravel() for a in arrays]
    return digest(np.concatenate(parts) if parts else np.zeros(0))


def arrays_of(record: Any) -> dict[str, str]:
    """`digest` of each array and each number of a record, by field."""
    named = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    kinds = (float, int, np.ndarray, np.generic)
    return {k: digest(v) for k, v in named.items() if isinstance(v, kinds)}
