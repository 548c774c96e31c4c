"""The possible results of a solve."""

import enum


class Status(enum.Enum):
    """The result of a solve."""

    OPTIMAL = "proved optimal"
    FEASIBLE = "best found, not proved"
    INFEASIBLE = "no choice of strategies is possible within the memory limit"
    UNKNOWN = "nothing found within the time limit"
