"""Trip counts: how often a loop runs."""

from __future__ import annotations

from autopar_passes.program.equations import Equation, Scalar

# Trip count of a `while` whose count cannot be read off: the number that XLA's
# own auto-sharding assumes (openxla/xla, auto_sharding_option.h,
# loop_iteration_count_estimate).
UNKNOWN_TRIPS = 100.0


def while_trips(eqn: Equation) -> float | None:
    """Returns the count of ``while i < n: ...; i += 1``; None where it is unknown."""
    cond, body = eqn.regions
    if len(cond.equations) != 1 or cond.equations[0].primitive != "lt":
        return None
    left, right = cond.equations[0].inputs
    skip = eqn.params["cond_nconsts"]
    if left not in cond.inputs[skip:] or cond.outputs != cond.equations[0].outputs:
        return None
    position = cond.inputs[skip:].index(left)
    start = eqn.inputs[skip + eqn.params["body_nconsts"] + position]
    if not isinstance(right, Scalar):
        if right not in cond.inputs[:skip]:
            return None
        right = eqn.inputs[cond.inputs.index(right)]
    step = body.outputs[position]
    counts = [
        e for e in body.equations if step in e.outputs and e.primitive == "add"
    ]  # fmt: skip
    if not (isinstance(start, Scalar) and isinstance(right, Scalar) and counts):
        return None
    by = [a for a in counts[0].inputs if isinstance(a, Scalar)]
    if len(by) != 1 or float(by[0].value) <= 0:
        return None
    return max(0.0, (float(right.value) - float(start.value)) / float(by[0].value))
