"""Tests the checks that constructors of stage problems make."""

import dataclasses
import math

import numpy as np
import pytest
from stage_problems import random_problem

from autopar_solver.stages.problem import (
    DeviceGroup,
    SharedParameter,
    StageProblem,
    SubmeshOption,
)

PROBLEM = next(p for p in map(random_problem, range(99)) if p.num_layers == 3)
COSTS = PROBLEM.costs[0]
ONES = np.ones(len(PROBLEM.options))


def with_costs(**changes) -> StageProblem:
    return dataclasses.replace(PROBLEM, costs=(dataclasses.replace(COSTS, **changes),))


BAD = {
    "groups must not be empty": lambda: dataclasses.replace(PROBLEM, groups=()),
    "schedules must not be empty": lambda: dataclasses.replace(PROBLEM, schedules=()),
    "group 0 needs": lambda: dataclasses.replace(PROBLEM, groups=(DeviceGroup(0),)),
    "option 0 must name": lambda: dataclasses.replace(
        PROBLEM, options=(SubmeshOption(9, 1),)
    ),
    "step_s must have shape": lambda: with_costs(step_s=np.zeros((3, 99))),
    "latency_s must have shape": lambda: with_costs(latency_s=np.zeros((9, 9))),
    "step_s must be numbers": lambda: with_costs(step_s=COSTS.step_s + math.inf),
    "transient_bytes must be": lambda: with_costs(
        transient_bytes=COSTS.transient_bytes - 99
    ),
    "positive and differ": lambda: dataclasses.replace(PROBLEM, costs=(COSTS, COSTS)),
    "numbers of microbatches must be positive": lambda: dataclasses.replace(
        PROBLEM, costs=(COSTS, dataclasses.replace(COSTS, microbatches=0))
    ),
    "max_stages must be": lambda: dataclasses.replace(PROBLEM, max_stages=0),
    "is of no layer": lambda: dataclasses.replace(
        PROBLEM,
        shared=(SharedParameter(source=0, target=9, step_s=ONES, copy_bytes=ONES),),
    ),
    "copy_bytes of the parameter": lambda: dataclasses.replace(
        PROBLEM,
        shared=(SharedParameter(source=0, target=1, step_s=ONES, copy_bytes=-ONES),),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_problems_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_forbidden_work_is_allowed():
    with_costs(forward_s=COSTS.forward_s + math.inf)
