"""Fits the rates of permutations and all-to-alls for `scripts/fit_rates.py`.

The model is that of `autopar.cost.collectives`, with NCCL's rules. First its constants
are fitted, and then the knots of the remaining errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xla_tables
from scipy.optimize import least_squares

from autopar.cluster.rates import PartnerRates
from autopar.cost.collectives import beside, channels, modelled_s

KINDS = ("all_to_all", "collective_permute")
# NCCL's numbers of channels: of all rings, rounded up to a power of two; and for one
# partner. On 8 H100s a message gets at most 16 channels, on Blackwell 32: larger
# messages take longer again.
CHANNELS = {"h100": (32, 16), "b200": (32, 32), "gb200": (32, 32)}
NAMES = (
    "start_s", "partner_s", "small_bytes_per_s", "large_bytes_per_s",
    "bandwidth_bytes_per_s", "sharpness",
)  # fmt: skip
LEAST = (1e-6, 1e-9, 1e9, 5e9, 1e11, 1.0)
FIRST = (1e-5, 3e-7, 5e9, 2e10, 4e11, 3.0)
MOST = (6e-5, 5e-6, 4e10, 1e11, 2e12, 8.0)
OCTAVES = {
    "all_to_all": (12.0, 15.0, 17.0, 19.0, 21.0, 23.0, 25.0, 27.0, 29.0),
    "collective_permute": (12.0, 16.0, 19.0, 22.0, 24.0, 26.0, 28.0, 30.0),
}
# Delays only lengthen small messages, so a time above the curve has this weight, as for
# other collectives.
SLOWER_COUNTS = 0.35
ROBUST = 0.3
KNOTS_ROBUST = 0.2
SHRINKAGE = 0.1


@dataclasses.dataclass(frozen=True)
class Sent:
    """Messages of one size to every partner; `weight` is below 1 if delays may lengthen
    them.
    """

    nbytes: float
    size: int
    partners: int
    seconds: float
    small: bool


def fitted(rows: Sequence[xla_tables.Transfer]) -> dict[str, Any]:
    """The rates of one kind on one device."""
    kind, device = rows[0].kind, rows[0].device
    most, each = CHANNELS[device]
    start = PartnerRates(channels=most, most_channels=each)
    sent = _sent(rows)

    def rates(logs: np.ndarray) -> PartnerRates:
        values = dict(zip(NAMES, map(float, np.exp(logs)), strict=True))
        return msgspec.structs.replace(start, **values)

    def errors(logs: np.ndarray) -> np.ndarray:
        return _weighted(sent, _left(sent, rates(logs)))

    found = least_squares(
        errors,
        np.log(FIRST),
        bounds=(np.log(LEAST), np.log(MOST)),
        loss="soft_l1",
        f_scale=ROBUST,
    )
    rounded = {k: float(f"{v:.4g}") for k, v in _values(rates(found.x)).items()}
    done = msgspec.structs.replace(start, **rounded)
    sizes = tuple(sorted({s.size for s in sent}))
    logs = _knots(sent, done, sizes, OCTAVES[kind])
    knots = {"group_sizes": sizes, "octaves": OCTAVES[kind], "logs": logs}
    return {"channels": most, "most_channels": each, **rounded, **knots}


def _values(rates: PartnerRates) -> dict[str, float]:
    return {name: getattr(rates, name) for name in NAMES}


def _sent(rows: Sequence[xla_tables.Transfer]) -> list[Sent]:
    """The rows; of equal rows (a ring and pairs), their geometric mean."""
    alike: dict[tuple[float, int], list[float]] = {}
    for row in rows:
        alike.setdefault((row.nbytes, row.group_size), []).append(row.seconds)
    out: list[Sent] = []
    for (nbytes, size), seconds in alike.items():
        one = rows[0].kind == "collective_permute"
        mean = math.exp(sum(map(math.log, seconds)) / len(seconds))
        small = nbytes < xla_tables.SMALL_BYTES
        part = nbytes if one else nbytes / size
        out.append(Sent(part, size, 1 if one else size - 1, mean, small))
    return out


def _left(sent: Sequence[Sent], rates: PartnerRates) -> np.ndarray:
    """Logarithm of measured divided by modelled time."""
    return np.array([math.log(s.seconds / _one(s, rates)) for s in sent])


def _one(sent: Sent, rates: PartnerRates) -> float:
    used = channels(sent.nbytes, sent.size, rates)
    at = np.array([sent.nbytes])
    return float(modelled_s(at, used, sent.size, sent.partners, rates)[0])


def _weighted(sent: Sequence[Sent], left: np.ndarray) -> np.ndarray:
    small = np.array([s.small for s in sent])
    return np.where(small & (left > 0), SLOWER_COUNTS, 1.0) * left


def _knots(
    sent: Sequence[Sent],
    rates: PartnerRates,
    sizes: Sequence[int],
    octaves: Sequence[float],
) -> list[list[float]]:
    """The knots of the errors of the model, by robust ridge regression."""
    left = _left(sent, rates)
    shape = (len(sizes), len(octaves))
    columns: list[np.ndarray] = []
    for k in range(shape[0] * shape[1]):
        one = np.zeros(shape)
        one.flat[k] = 1.0
        unit = msgspec.structs.replace(
            rates, group_sizes=tuple(sizes), octaves=tuple(octaves), logs=one.tolist()
        )
        at = [float(beside(np.array([s.nbytes]), s.size, unit)[0]) for s in sent]
        columns.append(np.array(at))
    design = np.stack(columns, axis=1)
    weight = np.abs(_weighted(sent, np.sign(left)))
    found = np.zeros(len(columns))
    for _ in range(20):
        robust = weight / np.sqrt(1 + ((left - design @ found) / KNOTS_ROBUST) ** 2)
        weighted = design * robust[:, None]
        normal = weighted.T @ weighted + SHRINKAGE * np.eye(len(columns))
        found = np.linalg.solve(normal, weighted.T @ (robust * left))
    return np.round(found.reshape(shape), 4).tolist()
