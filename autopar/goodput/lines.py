"""What a loop whose batch follows writes into a ledger."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.goodput.choice import Decision, PhiRange, json_number
from autopar.goodput.guard import LossGuard
from autopar.goodput.ways import Made
from autopar.progress import LOGGER


def way_data(made: Made) -> dict[str, Any]:
    """A way as a line of a ledger has it."""
    return {
        **dataclasses.asdict(made.key),
        "cluster": made.plan.cluster.text,
        "meshes": [dict(s.mesh["axes"]) for s in made.plan.stages],
        "step_s": made.plan.predicted.step_s,
    }


def kept(made: Made, decision: Decision, phi: PhiRange | None) -> dict[str, Any] | None:
    """Why a way stays; None: there is no other.

    Args:
      made: the way that runs.
      decision: that compared it with others.
      phi: the noise scale.
    """
    others = [x for x in decision.compared if x is not decision.current]
    if not others:
        return None
    nearest = max(others, key=lambda x: x.pays)
    return {
        "way": way_data(made),
        "nearest_name": nearest.way.name,
        "nearest": nearest.to_data(),
        "compared": len(decision.compared),
        "horizon_s": json_number(decision.horizon_s),
        "phi": None if phi is None else numbers(phi),
    }


def changed(
    old: Made, new: Made, phi: PhiRange | None, decision: Decision, pause_s: float
) -> dict[str, Any]:
    """How a way was changed, and why.

    Args:
      old: the way before.
      new: the way now.
      phi: the noise scale; None: it was not known.
      decision: that chose it.
      pause_s: seconds in which no step ran.
    """
    return {
        "old": way_data(old),
        "new": way_data(new),
        "phi": None if phi is None else numbers(phi),
        "compared": [x.to_data() for x in decision.compared],
        "predicted": {
            "horizon_s": decision.horizon_s,
            **decision.chosen.to_data(),
            "goodput_before": decision.current.goodput,
        },
        "measured": {"pause_s": pause_s},
    }


def capped(
    step: int, loss: float, before: LossGuard, now: LossGuard, gain: float
) -> dict[str, Any]:
    """How a loss capped the gain of steps, which is logged, too.

    Args:
      step: its number.
      loss: that rose.
      before: the guard before it.
      now: the guard after it.
      gain: of the step.
    """
    LOGGER.warning(
        "step %d: the loss rose to %.4g, so steps count at most %.3g of the base "
        "batch (%.3g before)", step, loss, now.most, gain,
    )  # fmt: skip
    return {
        "step": step,
        "loss": json_number(loss),
        "limit": before.limit,
        "gain": gain,
        "most": now.most,
    }


def numbers(phi: PhiRange) -> dict[str, float | None]:
    """A noise scale and its range."""
    found = {"phi": phi.phi, "low": phi.low, "high": phi.high}
    return {k: json_number(x) for k, x in found.items()}
