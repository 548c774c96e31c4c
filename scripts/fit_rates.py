"""Fits the knots of `autopar.cluster.rates` to OpenXLA's performance tables.

    python scripts/fit_rates.py --tables FILE

Writes `autopar/cluster/rates/xla.json` from the rows that `benchmarks/xla_tables.py`
does not hold out. The script needs SciPy, on which autopar does not depend.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fit_partners  # noqa: E402
import xla_tables  # noqa: E402

from autopar.cluster.presets import PRESETS  # noqa: E402

OUT = ROOT / "autopar" / "cluster" / "rates" / "xla.json"
SOURCE = (
    "Fitted by scripts/fit_rates.py to OpenXLA's performance tables (Apache-2.0; "
    "xla/service/gpu/model: collective_interpolator_data, matmul_interpolator_data), "
    "as compiled into the CUDA 12 plug-in of jax 0.10.2"
)
# log2 of the bytes at the knots. Below 1 MiB times hardly depend on the size.
KNOTS = (10, 14, 16, 17, 19, 20, 21, 22, 24, 25, 26, 27, 29, 31, 33, 35)
# Delays only lengthen small messages, so a time above the curve has less weight than a
# time below it.
SLOWER_COUNTS = 0.35
# Weight against bends of the curve's logarithm that the measurements do not require.
STIFFNESS = 0.1
# Knots of the errors of products, log2.
AREAS = (16.0, 18.0, 20.0, 22.0, 24.0, 26.0)
DEPTHS = (8.0, 9.0, 11.0, 12.0)
SIDES = (8.0, 9.0, 10.0, 11.0, 12.0)
SHRINKAGE = 0.3
ROBUST = 0.05


def curve(sizes: np.ndarray, seconds: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Seconds at the knots of the increasing curve that fits the measurements best."""
    small = sizes < xla_tables.SMALL_BYTES

    def values(steps: np.ndarray) -> np.ndarray:
        return np.exp(steps[0]) + np.concatenate([[0.0], np.cumsum(steps[1:])])

    def errors(steps: np.ndarray) -> np.ndarray:
        at = values(steps)
        slower = np.log(seconds / np.interp(sizes, knots, at))
        off = np.where(small & (slower > 0), SLOWER_COUNTS, 1.0) * slower
        bends = np.diff(np.diff(np.log(at)) / np.diff(np.log(knots)))
        return np.concatenate([off, STIFFNESS * bends])

    logs = np.interp(np.log(knots), np.log(sizes), np.log(seconds))
    start = np.maximum.accumulate(np.exp(logs))
    first = np.concatenate([[np.log(start[0])], np.maximum(np.diff(start), 1e-9)])
    scale = np.concatenate([[1.0], np.maximum(np.diff(start), 1e-6)])
    low = np.concatenate([[-np.inf], np.zeros(len(knots) - 1)])
    found = least_squares(
        errors, first, bounds=(low, np.inf), x_scale=scale, loss="soft_l1", f_scale=0.1
    )
    return values(found.x)


def collectives(rows: Sequence[xla_tables.Transfer]) -> dict[str, Any]:
    """Knots by device and kind."""
    out: dict[str, Any] = {}
    for (device, kind), group in _by(_seen(rows), "device", "kind"):
        if kind in fit_partners.KINDS:
            continue
        by_size = dict(_by(group, "group_size"))
        most = max(row.nbytes for row in group)
        knots = np.array([2.0**k for k in KNOTS if 2.0**k <= most])
        sizes = sorted(size for (size,) in by_size)
        seconds: list[list[float]] = []
        for size in sizes:
            found = sorted(by_size[size,], key=lambda row: row.nbytes)
            at = curve(
                np.array([float(row.nbytes) for row in found]),
                np.array([row.seconds for row in found]),
                knots,
            )
            seconds.append([float(f"{value:.4g}") for value in at])
        out.setdefault(device, {})[kind] = {
            "group_sizes": sizes,
            "nbytes": knots.tolist(),
            "seconds": seconds,
        }
    return out


def partners(rows: Sequence[xla_tables.Transfer]) -> dict[str, Any]:
    """Rates of messages between pairs, by device and kind."""
    out: dict[str, Any] = {}
    for (device, kind), group in _by(_seen(rows), "device", "kind"):
        if kind in fit_partners.KINDS:
            out.setdefault(device, {})[kind] = fit_partners.fitted(group)
    return out


def _seen(rows: Sequence[xla_tables.Transfer]) -> list[xla_tables.Transfer]:
    """The rows that may be used for fits."""
    return [row for row in rows if not (row.held_out or row.one_way)]


def _by(rows: Sequence[Any], *names: str) -> list[tuple[tuple[Any, ...], list[Any]]]:
    def key(row: Any) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in names)

    ordered = sorted(rows, key=key)
    return [(k, list(group)) for k, group in itertools.groupby(ordered, key=key)]


def hats(x: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """The weight of each knot in a linear interpolation, ``[points, knots]``."""
    columns = np.eye(len(knots))
    clipped = np.clip(x, knots[0], knots[-1])
    return np.stack([np.interp(clipped, knots, column) for column in columns], axis=1)


def _grid(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a[:, :, None] * b[:, None, :]).reshape(len(a), -1)


def product(rows: Sequence[xla_tables.Product]) -> dict[str, Any]:
    """The rates of one dtype on one device."""
    device = PRESETS[rows[0].device].device
    size = rows[0].itemsize
    batch, m, n, k = np.array([[r.batch, r.m, r.n, r.k] for r in rows], float).T
    seconds = np.array([r.seconds for r in rows])
    rate = device.peak(rows[0].dtype) * device.matmul_efficiency
    area = batch * m * n
    work = 2.0 * area * k / rate
    nbytes = size * batch * (m * k + k * n) + max(size, 2) * area
    traffic = nbytes / device.memory_bandwidth_bytes_per_s

    def modelled(logs: np.ndarray) -> np.ndarray:
        start, depth, part, cached, e = np.exp(logs)
        parts = [depth * k, work / part, traffic / cached]
        largest = np.max(parts, axis=0)
        return start + largest * np.sum((parts / largest) ** e, axis=0) ** (1 / e)

    low = np.log([2e-6, 1e-11, 0.4, 0.5, 1.0])
    high = np.log([9e-6, 1e-8, 1.25, 3.0, 6.0])
    found = least_squares(
        lambda logs: np.log(modelled(logs) / seconds),
        (low + high) / 2,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=ROBUST,
    )
    left = np.log(seconds / modelled(found.x))
    deep = hats(np.log2(k), DEPTHS)
    by_area = _grid(hats(np.log2(area), AREAS), deep)
    batched = np.minimum(np.log2(batch), 1.0)[:, None]
    parts = [
        by_area * (1 - batched),
        by_area * batched,
        _grid(hats(np.log2(m), SIDES), deep),
        _grid(hats(np.log2(n), SIDES), deep),
    ]
    ends = np.cumsum([part.shape[1] for part in parts])[:-1]
    tables = np.split(_smoothed(np.hstack(parts), left), ends)
    shaped = [np.round(t.reshape(-1, len(DEPTHS)), 4).tolist() for t in tables]
    names = ("start_s", "s_per_depth", "rate_part", "traffic_part", "sharpness")
    fitted = [float(f"{value:.4g}") for value in np.exp(found.x)]
    return dict(zip(names, fitted, strict=True)) | {
        "best_part": float(f"{np.max(work / seconds):.4g}"),
        "areas": AREAS,
        "depths": DEPTHS,
        "sides": SIDES,
        "by_area": shaped[0],
        "by_area_batched": shaped[1],
        "by_rows": shaped[2],
        "by_columns": shaped[3],
    }


def _smoothed(design: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Robust ridge regression."""
    weights = np.ones(len(left))
    found = np.zeros(design.shape[1])
    for _ in range(20):
        weighted = design * weights[:, None]
        normal = weighted.T @ design + SHRINKAGE * np.eye(design.shape[1])
        found = np.linalg.solve(normal, weighted.T @ left)
        weights = 1 / np.sqrt(1 + ((left - design @ found) / ROBUST) ** 2)
    return found


def products(rows: Sequence[xla_tables.Product]) -> dict[str, Any]:
    """Rates, by device and bytes per element."""
    out: dict[str, Any] = {}
    seen = [row for row in rows if not row.held_out]
    for (device, size), group in _by(seen, "device", "itemsize"):
        out.setdefault(device, {})[str(size)] = product(group)
    return out


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", type=pathlib.Path, required=True)
    options = parser.parse_args()
    tables = json.loads(options.tables.read_text())
    found = {
        "source": SOURCE,
        "collectives": collectives(xla_tables.transfers(tables)),
        "partners": partners(xla_tables.transfers(tables)),
        "products": products(xla_tables.products(tables)),
    }
    text = json.dumps(found, indent=1)
    OUT.write_text(_compact(text) + "\n")


def _compact(text: str) -> str:
    """Writes each list of numbers on one line."""
    return re.sub(
        r"\[[\s\d.,eE+-]+\]",
        lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "["),
        text,
    ).replace(" ]", "]")


if __name__ == "__main__":
    main()
