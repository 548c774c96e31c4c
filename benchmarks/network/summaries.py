"""Makes the table of times to the dense run's loss, from the records of runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

DENSE = "dense"
ROUNDING = 1e-5
"""Two exact runs under different layouts end this far apart, relatively."""
SMOOTH_STEPS = 20
"""Of the training loss, half on each side would look ahead: only the past counts."""


def merged(results: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One record from those of all processes: longest times, and CPU time of all."""
    found: list[dict[str, Any]] = []
    for same in zip(*results, strict=False):
        times = zip(*(record["step_s"] for record in same), strict=True)
        cpu_s = [sum(t) for t in zip(*(r["cpu_s"] for r in same), strict=True)]
        most = {
            name: max(record[name] for record in same)
            for name in ("sent_bytes", "data_bytes", "wire_bytes")
        }
        found.append(
            {**same[0], "step_s": [max(t) for t in times], "cpu_s": cpu_s, **most}
        )
    return found


def smoothed(losses: Sequence[float], window: int = SMOOTH_STEPS) -> list[float]:
    """The mean of the last ``window`` losses (of fewer losses at the beginning).

    >>> smoothed([4.0, 2.0, 0.0], window=2)
    [4.0, 3.0, 1.0]
    """
    return [
        statistics.fmean(losses[max(0, k + 1 - window) : k + 1])
        for k in range(len(losses))
    ]


def steps_to(points: Sequence[tuple[int, float]], target: float) -> float | None:
    """The step at which a loss first reaches a target, or None.

    Between two measurements, the loss is assumed to fall linearly.

    >>> steps_to([(20, 3.0), (40, 2.0)], 2.5)
    30.0
    """
    before: tuple[int, float] | None = None
    for step, loss in points:
        if loss <= target:
            if before is None or before[1] == loss:
                return float(step)
            part = (before[1] - target) / (before[1] - loss)
            return before[0] + part * (step - before[0])
        before = (step, loss)
    return None


def reached(points: Sequence[tuple[int, float]], target: float) -> float | None:
    """`steps_to`; a final loss that exceeds the target by a rounding error counts as
    reached.
    """
    steps = steps_to(points, target)
    return steps_to(points, target * (1 + ROUNDING)) if steps is None else steps


def seconds_at(step_s: Sequence[float], steps: float) -> float:
    """The time after a number of steps, which may be fractional.

    >>> seconds_at([1.0, 2.0], 1.5)
    2.0
    """
    whole = int(steps)
    rest = (steps - whole) * step_s[whole] if whole < len(step_s) else 0.0
    return sum(step_s[:whole]) + rest


def time_to(record: dict[str, Any], dense: dict[str, Any]) -> float | None:
    """Seconds until the last evaluation loss of the dense run; None: not reached."""
    target = dense["evaluations"][-1][1]
    steps = reached([tuple(p) for p in record["evaluations"]], target)
    return None if steps is None else seconds_at(record["step_s"], steps)


def time_to_smoothed(record: dict[str, Any], dense: dict[str, Any]) -> float | None:
    """Seconds until the last smoothed training loss of the dense run."""
    target = smoothed(dense["losses"])[-1]
    points = list(enumerate(smoothed(record["losses"]), start=1))
    steps = reached(points[SMOOTH_STEPS - 1 :], target)
    return None if steps is None else seconds_at(record["step_s"], steps)


def groups(records: Sequence[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    """Groups records by rate and configuration, over the seeds."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        key = (record["rate_mbit"], record["compression"])
        found.setdefault(key, []).append(record)
    return found


def _spread(values: Sequence[float | None], scale: float, digits: int) -> str:
    """The median, with minimum and maximum in brackets; 'no' if a value is missing."""
    known = [v * scale for v in values if v is not None]
    missing = "" if len(known) == len(values) else f" ({len(values) - len(known)} no)"
    if not known:
        return "not reached"
    text = f"{statistics.median(known):.{digits}f}"
    if len(known) > 1:
        text += f" ({min(known):.{digits}f} to {max(known):.{digits}f})"
    return text + missing


def row(same: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of one configuration at one rate."""
    by_seed = {record["seed"]: record for record in dense}
    pairs = [(r, by_seed[r["seed"]]) for r in same if r["seed"] in by_seed]
    times = [time_to(r, d) for r, d in pairs]
    own = [seconds_at(d["step_s"], len(d["step_s"])) for _, d in pairs]
    gains = [None if t is None else o / t for t, o in zip(times, own, strict=True)]
    typical = [statistics.median(r["step_s"]) for r in same]
    return [
        _spread(typical, 1e3, 1),
        _spread([statistics.median(r["cpu_s"]) for r in same], 1e3, 0),
        _spread([r.get("predicted_step_s") for r in same], 1e3, 1),
        _spread([r["data_bytes"] for r in same], 1e-6, 3),
        _spread([r["wire_bytes"] for r in same], 1e-6, 3),
        _spread([r["evaluations"][-1][1] for r in same], 1, 4),
        _spread(times, 1, 1),
        _spread(gains, 1, 2),
        _spread([time_to_smoothed(r, d) for r, d in pairs], 1, 1),
    ]


def table(records: Sequence[dict[str, Any]]) -> str:
    """All runs in Markdown."""
    names = (
        "Mbit/s", "compression", "step ms", "CPU ms", "planned ms", "data MB",
        "wire MB", "evaluation loss", "s to dense loss", "times faster",
        "s, training loss",
    )  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    grouped = groups(records)
    for (rate, compression), same in grouped.items():
        dense = grouped.get((rate, DENSE), [])
        cells = [f"{rate:g}" if rate else "unshaped", compression, *row(same, dense)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
