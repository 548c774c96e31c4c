"""The work of ``autopar audit``."""

from __future__ import annotations

import jax

from autopar.audits import audit_analysis
from autopar.cli import common
from autopar.cli.output import Result
from autopar.compilers.targets import target_of
from autopar.planner.options import PlanOptions
from autopar.plans import Plan


def audit(
    source: str,
    words: list[str] | None,
    *,
    cluster: str | None,
    limits: PlanOptions,
    compiled: bool,
    target: str | None,
    as_json: bool,
) -> Result:
    """Partitions a planned step, and compiles it if that is asked for."""
    if target is not None:
        target_of(target)
        # An audit needs no device; with the target's compiler beside it JAX would
        # look for some.
        jax.config.update("jax_platforms", "cpu")
    with common.progress() as say:
        if compiled:
            _start_devices(source, cluster)
        found = common.subject(source, words, cluster, limits, say)
        compiling = f" and compiling for {target or 'simulated devices'}"
        say("partitioning" + (compiling if compiled or target else ""))
        result = audit_analysis(
            found.analysis, found.plan, found.cluster, compiled=compiled, target=target
        )
    if as_json:
        return Result.of(found.plan.to_json() | result.to_json())
    return Result(str(result))


def _start_devices(source: str, cluster: str | None) -> None:
    """Simulates the devices of the plan before anything starts JAX."""
    if common.is_plan_file(source):
        count = 1 + max(d for stage in Plan.load(source).stages for d in stage.devices)
    else:
        count = common.read_cluster(cluster).num_devices
    common.simulate_devices(count)
