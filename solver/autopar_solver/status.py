"""How a solve can end."""

import enum


class Status(enum.Enum):
    """How a solve ended."""

    OPTIMAL = "proved optimal"
    FEASIBLE = "best found, not proved"
    INFEASIBLE = "no choice of strategies is possible within the memory limit"
    UNKNOWN = "nothing found within the time limit"
