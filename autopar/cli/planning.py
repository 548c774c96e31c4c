"""The work of ``autopar plan``."""

from __future__ import annotations

import time

import jax
import msgspec

from autopar.audits import audit_analysis
from autopar.cli import common
from autopar.cli.commands.plans import AuditCommand, PlanCommand
from autopar.cli.output import Result
from autopar.cli.target import load, parse_words
from autopar.cluster import Cluster
from autopar.compilers.targets import target_of
from autopar.errors import PlanError
from autopar.planner.proposals import recorded_proposals
from autopar.plans import Plan
from autopar.reports.attribution import LAYER, attribute
from autopar.reports.explain import bind_plan, communication_rows, proposal_lines
from autopar.reports.gradients import codec_rows
from autopar.reports.html import render_html
from autopar.reports.schedule import trace_text
from autopar.reports.table import planning_times, render
from autopar.steps.analysis import Analysis
from autopar.whole_files import export_whole


def plan(asked: PlanCommand) -> Result:
    """Plans the step of a target, and writes the requested files."""
    for path in (asked.out, asked.html, asked.trace):
        common.check_folder(path)
    cluster = common.read_cluster(asked.cluster, asked.memory)
    begin = time.perf_counter()
    with common.progress() as say, recorded_proposals() as proposals:
        workload = load(asked.target, parse_words(asked.words or []))
        analysis, found = common.plan_workload(workload, cluster, asked.limits, say)
        total_s = time.perf_counter() - begin
        spent = msgspec.structs.replace(found.seconds, total=total_s)
        found = msgspec.structs.replace(found, seconds=spent)
        if asked.out is not None:
            found.save(asked.out)
        if asked.trace is not None:
            if found.pipeline is None:
                raise PlanError(
                    f"--trace {asked.trace}: the plan has one stage and no schedule to "
                    "write. Say --stages, too, or leave --trace out."
                )
            export_whole(asked.trace, trace_text(found).encode())
        if asked.html is not None:
            say(f"writing {asked.html}")
            export_whole(asked.html, _page(analysis, found, cluster).encode())
    if asked.as_json:
        return Result.of(found.to_json())
    parts = [render(found)]
    if asked.explain_search:
        parts.append("\n".join(proposal_lines(proposals, found)))
    return Result("\n\n".join([*parts, planning_times(found)]))


def _page(analysis: Analysis, found: Plan, cluster: Cluster) -> str:
    if found.pipeline is not None:
        return render_html(found, ())
    bound = bind_plan(analysis, found, cluster)
    rows = communication_rows(bound)
    rows += codec_rows(found.gradients, bound.pricer)
    ordered = sorted(rows, key=lambda row: -row.seconds)
    return render_html(found, ordered, attribute(bound, LAYER))


def audit(asked: AuditCommand) -> Result:
    """Partitions a planned step by the compiler, and compiles it if requested.

    The result compares the compiler's collectives and memory with the plan's.
    """
    target, compiled = asked.target, asked.compiled and asked.target is None
    if target is not None:
        target_of(target)
        # An audit needs no device. If a compiler for accelerators is installed, JAX
        # would otherwise look for these accelerators.
        jax.config.update("jax_platforms", "cpu")
    with common.progress() as say:
        if compiled:
            _start_devices(asked.source, asked.cluster)
        found = common.subject(
            asked.source, asked.words, asked.cluster, asked.limits, say
        )
        compiling = f" and compiling for {target or 'simulated devices'}"
        say("partitioning" + (compiling if compiled or target else ""))
        result = audit_analysis(
            found.analysis, found.plan, found.cluster, compiled=compiled, target=target
        )
    if asked.as_json:
        return Result.of(found.plan.to_json() | result.to_json())
    return Result(str(result))


def _start_devices(source: str, cluster: str | None) -> None:
    """Simulates the devices of the plan; must run before other code starts JAX."""
    if common.is_plan_file(source):
        count = 1 + max(d for stage in Plan.load(source).stages for d in stage.devices)
    else:
        count = common.read_cluster(cluster).num_devices
    common.simulate_devices(count)
