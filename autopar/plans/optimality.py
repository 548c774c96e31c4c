"""How near a plan is to the optimum, in words."""

from __future__ import annotations

import math

from autopar_solver.status import Status

# A smaller gap is none: two digits behind the point would show 0.00%.
NO_GAP = 5e-5


def optimality_text(status: str, gap: float) -> str:
    """Returns how near a plan is to the optimum of the plans searched.

    Args:
      status: how the search ended; it may say before, and a semicolon, what was
        edited by hand.
      gap: (cost - bound) / cost; 1 or more where nothing is known of other plans.

    >>> optimality_text("proved optimal", 0.0)
    'proved optimal'
    >>> optimality_text("proved optimal", 0.0021)
    'proved within 0.21% of the optimum'
    >>> optimality_text("best found, not proved", 0.0302)
    'best found, proved within 3.02% of the optimum'
    >>> optimality_text("best found, not proved", 1.0)
    'best found, not proved'
    >>> optimality_text("layouts as they were given", 0.0)
    'layouts as they were given'
    """
    before, semicolon, ended = status.rpartition("; ")
    if ended not in (Status.OPTIMAL.value, Status.FEASIBLE.value):
        return status
    if ended == Status.OPTIMAL.value and gap < NO_GAP:
        return status
    if not math.isfinite(gap) or gap >= 1.0:
        return f"{before}{semicolon}{Status.FEASIBLE.value}"
    found = "" if ended == Status.OPTIMAL.value else "best found, "
    near = f"{found}proved within {max(gap, NO_GAP):.2%} of the optimum"
    return f"{before}{semicolon}{near}"
