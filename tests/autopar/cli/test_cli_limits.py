"""The limits of the commands are those of the functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

import autopar
from autopar.cli import common
from autopar.cli.commands.audit import audit
from autopar.cli.commands.compare import compare
from autopar.cli.commands.demo import demo
from autopar.cli.commands.plan import plan
from autopar.cli.commands.sweep import sweep
from autopar.planner.options import PlanOptions


def seconds_of(function: Callable[..., Any]) -> object:
    return inspect.signature(function).parameters["seconds"].default


@pytest.mark.parametrize("command", [audit, compare, demo, plan, sweep])
def test_the_solver_has_the_same_time(command: Callable[..., Any]) -> None:
    limits = {seconds_of(f) for f in (command, autopar.plan, PlanOptions)}
    assert limits == {common.plan_options().seconds}


def test_infinite_seconds_are_no_limit() -> None:
    assert common.plan_options(seconds=math.inf).seconds is None
    assert common.plan_options(seconds=2.5).seconds == 2.5
