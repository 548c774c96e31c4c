"""``autopar audit``: what the compiler will really communicate, against the plan."""

import math
from typing import Annotated

import typer

from autopar.api import audit_analysis
from autopar.cli import common
from autopar.plans import Plan


def audit(
    source: common.PlanOrTarget,
    words: common.PlanWords = None,
    cluster: common.ClusterSpec = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile for simulated devices too; slower."),
    ] = False,
    seconds: common.Seconds = None,
    max_axes: common.MaxAxes = None,
    compression: common.Compression = "none",
    error_budget: common.ErrorBudget = None,
    as_json: common.Json = False,
) -> None:
    """Partitions a planned step with the compiler, and compares the communication.

    No device is needed. With --compile the step is also compiled for simulated
    CPU devices, and the memory of the compiled step is read.
    """
    limits = common.plan_options(
        seconds=seconds,
        compression=compression,
        error_budget=error_budget,
        max_axes=max_axes,
    )
    with common.progress() as say:
        if compiled:
            _start_devices(source, cluster)
        found = common.subject(source, words, cluster, limits, say)
        say("partitioning and compiling" if compiled else "partitioning")
        result = audit_analysis(
            found.analysis, found.plan, found.cluster, compiled=compiled
        )
    if as_json:
        common.print_json(found.plan.to_json() | result.to_json())
    else:
        typer.echo(str(result))


def _start_devices(source: str, cluster: str | None) -> None:
    """Simulates the devices of the plan before anything starts JAX."""
    if common.is_plan_file(source):
        count = math.prod(Plan.load(source).axis_sizes)
    else:
        count = common.read_cluster(cluster).num_devices
    common.simulate_devices(count)
