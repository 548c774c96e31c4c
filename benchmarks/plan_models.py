"""A model of steps under Rubick's plans, from four measured placements of each.

Seconds of a step on n nodes and K devices are ``a / K + b + c (K - 1) / K + d`` where
n > 1 (that last one times ``(n - 1) / n``): computation, what does not shrink, the ring
inside a node, the ring between nodes. All are at least 0. Errors are relative. The form
was chosen on bert; the other programs are kept out.
"""

from __future__ import annotations

import pathlib

import numpy as np
from scipy.optimize import nnls

from autopar.scheduler.simulator.tables import read_rows

CHOSEN_ON = ("bert",)
PROGRAMS = ("bert", "gpt2", "roberta", "t5", "vit")
PLANS = ("ga", "gc", "zero-dp", "zero-offload")
# What is measured of each program and plan; all else is predicted.
MEASURED = ("1", "8", "11", "44")


def table(folder: pathlib.Path) -> None:
    """Prints mean and worst errors of placements that were not measured."""
    print("| program | kept out | plan | predicted | mean error | worst |")
    print("| --- " * 6 + "|")
    means: list[float] = []
    for program in PROGRAMS:
        rows = placements(folder / program)
        for plan in PLANS:
            errors = np.abs(errors_of(rows.get(plan, {})))
            if not len(errors):
                print(f"| {program} | - | {plan} | not enough measured | | |")
                continue
            kept = "no" if program in CHOSEN_ON else "yes"
            means += [float(errors.mean())] if kept == "yes" else []
            print(
                f"| {program} | {kept} | {plan} | {len(errors)} | {errors.mean():.1%} "
                f"| {errors.max():.1%} |"
            )
    print(f"\nkept out: mean of means {np.mean(means):.1%}, worst {max(means):.1%}")


def placements(folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Seconds of a step by plan and placement."""
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(
        folder / "placements.csv", ("exec_plan", "placement", "iter_time")
    ):
        digits = "".join(sorted(row.text("placement")))
        plan = found.setdefault(row.text("exec_plan"), {})
        plan.setdefault(digits, row.number("iter_time"))
    return found


def errors_of(rows: dict[str, float]) -> np.ndarray:
    """Relative errors where nothing was measured; empty without the four."""
    known = [digits for digits in MEASURED if digits in rows]
    others = [digits for digits in rows if digits not in known]
    if len(known) < len(MEASURED):
        return np.zeros(0)
    seconds = np.array([rows[d] for d in known])
    scaled = features(known) / seconds[:, None]
    constants, _ = nnls(scaled, np.ones(len(known)))
    return features(others) @ constants / np.array([rows[d] for d in others]) - 1


def features(placed: list[str]) -> np.ndarray:
    """What the four constants are multiplied with; shape (n, 4)."""
    rows: list[list[float]] = []
    for digits in placed:
        nodes, devices = len(digits), sum(map(int, digits))
        rows.append(
            [
                1 / devices,
                1.0,
                (devices - 1) / devices,
                (nodes > 1) * (nodes - 1) / nodes,
            ]
        )
    return np.array(rows)
