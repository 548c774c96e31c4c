"""The work of ``autopar compare``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from autopar.cli import common
from autopar.cli.commands.plans import CompareCommand
from autopar.cli.commands.runs import DiffCommand
from autopar.cli.failures import DIFFERENT, spell_options
from autopar.cli.output import Result
from autopar.cli.target import load, parse_words
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.candidate import SearchResult
from autopar.planner.experts import Expert, expert_plans
from autopar.planner.options import PlanOptions
from autopar.planner.record import check_plan, make_plan
from autopar.planner.stages.entry import cut_as
from autopar.planner.stages.hand_made import HandMade, hand_made
from autopar.plans import Plan
from autopar.plans.schema import differences
from autopar.plans.specs import spec_text
from autopar.reports.table import (
    bytes_text,
    collapse,
    mesh_text,
    method_text,
    remat_text,
    seconds_text,
    template,
)
from autopar.runtime.timing import measure_plans
from autopar.steps.analysis import Analysis
from autopar.terminal import columns, cut_name, shorten
from autopar.units import rounded_cluster

OURS = "autopar"


def compare(asked: CompareCommand) -> Result:
    """Compares a plan with plans that experts write by hand; times them if requested.

    Raises:
      PlanError: a saved plan is for another step or cluster, or there are too few
        devices.
    """
    limits: PlanOptions = asked.limits
    cluster = _cluster_said(asked)
    if asked.measure:
        _check_devices(_cluster_of(asked.target, cluster))
    with common.progress() as say:
        words = list(asked.words or [])
        found, ours = _subjects(asked.target, words, cluster, limits, say)
        say("planning as experts do")
        analysis, cluster = found.analysis, found.cluster
        experts = expert_plans(analysis, cluster, seconds=limits.seconds)
        experts = best_experts(experts)
        piped = _pipelines(analysis, cluster, limits, ours)
        rows = [_plan_row(name, plan) for name, plan in ours.items()]
        rows += [expert_row(e, cluster) for e in experts]
        rows += [pipeline_row(p) for p in piped]
        made = ours | {p.name: p.plan for p in piped if p.plan is not None}
        if asked.measure:
            plans = made | _plans(experts, cluster)
            took = measure_plans(analysis, plans, repeats=asked.repeats)
            rows = [row | {"measured_s": took.get(row["name"])} for row in rows]
    if asked.as_json:
        return Result.of({"cluster": str(cluster), "plans": rows})
    notes = program_notes(made, len(experts))
    lines = [f"cluster  {rounded_cluster(cluster)}", "", *table_lines(rows), *notes]
    return Result("\n".join(lines))


def program_notes(plans: Mapping[str, Plan], experts: int) -> list[str]:
    """Returns lines that say which plans run different programs.

    Programs differ in microbatches and rematerialisation. The result is empty if all
    plans run the same program.

    Args:
      plans: name -> plan.
      experts: the number of further plans; these do not change the step.
    """
    programs = {name: _program(plan) for name, plan in plans.items()}
    if experts:
        programs["the plans that people write"] = _AS_WRITTEN
    if len(set(programs.values())) < 2:
        return []
    names: dict[str, list[str]] = {}
    for name, program in programs.items():
        names.setdefault(program, []).append(name)
    lines = [f"{', '.join(who)}: {program}" for program, who in names.items()]
    return ["", "the plans run different programs:", *(f"  {x}" for x in lines)]


def _program(plan: Plan) -> str:
    """Describes how a plan changes its step: microbatches and rematerialisation."""
    parts = plan.microbatches
    changes = [f"{parts} microbatches"] if parts > 1 else []
    if again := remat_text(plan):
        changes.append(f"computes again {again}")
    return "; ".join(changes) or _AS_WRITTEN


def _pipelines(
    analysis: Analysis, cluster: Cluster, limits: PlanOptions, ours: Mapping[str, Plan]
) -> list[HandMade]:
    """Makes pipelines as people write them, if a plan has or may have several stages.

    Many pipelines are possible, and each needs a search. Therefore pipelines are made
    only if a plan has several stages or the option ``stages`` allows several.
    """
    asked = limits.stages
    if asked in (None, 1) and all(len(plan.stages) == 1 for plan in ours.values()):
        return []
    most = asked if isinstance(asked, int) and asked > 1 else None
    return best_pipelines(hand_made(analysis, cluster, limits, most_stages=most))


def _cluster_said(asked: CompareCommand) -> Cluster | None:
    """Returns the cluster of ``--cluster`` and ``--memory``; None without them."""
    if asked.cluster is None and asked.memory is None:
        return None
    return common.read_cluster(asked.cluster, asked.memory)


def _cluster_of(target: str, cluster: Cluster | None) -> Cluster:
    """Returns the cluster on which plans are compared.

    Raises:
      ClusterError: no cluster is given, and the target is not a saved plan.
    """
    if cluster is not None:
        return cluster
    if common.is_plan_file(target):
        return Plan.load(target).cluster.read()
    return common.read_cluster(None)


def _subjects(
    target: str,
    words: list[str],
    cluster: Cluster | None,
    limits: PlanOptions,
    say: common.Say,
) -> tuple[common.Subject, dict[str, Plan]]:
    """Returns the step, and name -> plan: a new plan, or saved plans."""
    made_for = _cluster_of(target, cluster)
    if not common.is_plan_file(target):
        workload = load(target, parse_words(words))
        analysis, plan = common.plan_workload(workload, made_for, limits, say)
        return common.Subject(plan, analysis, made_for), {OURS: plan}
    saved = [w for w in words if "=" not in w and common.is_plan_file(w)]
    rest = [w for w in words if w not in saved]
    found = common.subject(target, rest, None, limits, say)
    plans = {target: found.plan}
    for path in saved:
        plan = Plan.load(path)
        if len(plan.stages) > 1:
            cut_as(found.analysis, plan)
        else:
            check_plan(found.analysis, plan)
        _check_cluster(path, plan.cluster.read(), found.cluster)
        plans[path] = plan
    if cluster is not None:
        _check_cluster(target, found.cluster, cluster)
    return found, plans


def _check_cluster(path: str, has: Cluster, wanted: Cluster) -> None:
    if has != wanted:
        raise PlanError(f"{path} is for {has}; the plans are compared on {wanted}.")


def _check_devices(cluster: Cluster) -> None:
    """Checks, before anything is planned, that there are enough devices.

    Simulates CPU devices if the cluster has CPUs.

    Raises:
      PlanError: there are too few devices.
    """
    if cluster.device.kind == "cpu":
        common.simulate_devices(cluster.num_devices)
    found = jax.device_count()
    if found < cluster.num_devices:
        raise PlanError(
            f"--measure runs plans for {cluster.num_devices} devices, and this process "
            f"has {found}. Leave it out, or plan for --cluster local."
        )


def best_experts(experts: Sequence[Expert]) -> list[Expert]:
    """Returns the fastest plan of each expert rule over all meshes.

    For a rule that gives no plan on any mesh, the result has its first entry.
    """

    def rank(expert: Expert) -> float:
        return expert.candidate.step_s if expert.candidate else float("inf")

    found: dict[str, Expert] = {}
    for expert in experts:
        if expert.name not in found or rank(expert) < rank(found[expert.name]):
            found[expert.name] = expert
    return list(found.values())


def fits(expert: Expert, cluster: Cluster) -> bool:
    """Whether an expert's plan exists and fits in the memory of a device."""
    made = expert.candidate
    return made is not None and made.peak_memory_bytes <= cluster.memory_bytes


def best_pipelines(pipelines: Sequence[HandMade]) -> list[HandMade]:
    """Returns the fastest pipeline of each name.

    For a name without a possible pipeline, the result has its first entry.
    """

    def rank(made: HandMade) -> float:
        return made.plan.predicted.step_s if made.plan else float("inf")

    found: dict[str, HandMade] = {}
    for made in pipelines:
        if made.name not in found or rank(made) < rank(found[made.name]):
            found[made.name] = made
    return list(found.values())


def pipeline_row(made: HandMade) -> dict[str, Any]:
    """Returns the table row of a pipeline; without a plan the row has no times."""
    if made.plan is not None:
        return _plan_row(made.name, made.plan)
    mesh = f"{made.stages} x {made.mesh}" if made.mesh else f"{made.stages} stages"
    row = {"name": made.name, "mesh": mesh, "fits": False}
    return row | {"step_s": None, "reason": spell_options(made.reason)}


def _meshes_text(plan: Plan) -> str:
    """Describes the mesh of a plan, or the number of stages and their meshes."""
    found = dict.fromkeys(mesh_text(stage) for stage in plan.stages)
    text = ", ".join(found)
    return text if len(plan.stages) == 1 else f"{len(plan.stages)} x {text}"


def _plan_row(name: str, plan: Plan) -> dict[str, Any]:
    predicted = plan.to_json()["predicted"]
    return {
        "name": name,
        "mesh": _meshes_text(plan),
        **predicted,
        "fits": True,
        "reason": "",
    }


def expert_row(expert: Expert, cluster: Cluster) -> dict[str, Any]:
    """Returns the table row of an expert's plan, without times if there is no plan."""
    row = {"name": expert.name, "mesh": expert.mesh, "fits": fits(expert, cluster)}
    made = expert.candidate
    if made is None:
        reason = spell_options(expert.reason) or "none found within the time limit"
        return row | {"step_s": None, "reason": reason}
    held = float(made.peak_memory_bytes)
    too_much = f"a device has {bytes_text(cluster.memory_bytes)}"
    return row | {
        "step_s": made.step_s,
        "compute_s": made.compute_s,
        "communication_s": made.communication_s,
        "hidden_s": made.hidden_s,
        "communication_bytes": made.communication_bytes,
        "peak_memory_bytes": held,
        "reason": "" if row["fits"] else f"does not fit: {too_much}",
    }


def _plans(experts: Sequence[Expert], cluster: Cluster) -> dict[str, Plan]:
    """Returns the plans of experts that fit in memory, by name."""
    return {
        e.name: make_plan(
            e.candidate.assignment.analysis, SearchResult(e.candidate, (), 0.0)
        )
        for e in experts
        if e.candidate is not None and fits(e, cluster)
    }


_AS_WRITTEN = "the step as it is written"
_TIMES = ("step_s", "compute_s", "communication_s")


def table_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the plans as lines of a table; our plan is the first row."""
    measured = any("measured_s" in row for row in rows)
    hidden = any(row.get("hidden_s") for row in rows)
    heading = ["plan", "mesh", "step", "compute", "communication"]
    heading += [*(["hidden"] if hidden else []), "sends", "memory"]
    heading += [*(["measured"] if measured else []), f"against {rows[0]['name']}"]
    times = (*_TIMES, *(["hidden_s"] if hidden else []))
    cells = [heading, *(_cells(row, rows[0], times, measured) for row in rows)]
    return columns(cells, right=range(2, len(heading) - 1))


def _cells(
    row: dict[str, Any], ours: dict[str, Any], shown_s: Sequence[str], measured: bool
) -> list[str]:
    if row["step_s"] is None:
        empty = [""] * (len(shown_s) + 2 + measured)
        return [row["name"], row["mesh"], *empty, shorten(row["reason"])]
    times = [seconds_text(row[k]) for k in shown_s]
    sizes = [bytes_text(row[k]) for k in ("communication_bytes", "peak_memory_bytes")]
    took = row.get("measured_s")
    shown = [seconds_text(took) if took is not None else ""] if measured else []
    return [row["name"], row["mesh"], *times, *sizes, *shown, _against(row, ours)]


def _against(row: dict[str, Any], ours: dict[str, Any]) -> str:
    """Returns a text: step time of a plan divided by that of our plan.

    The text has the ratio of predicted times, then the ratio of measured times.
    """
    if row["reason"] or row is ours or not ours["step_s"]:
        return shorten(row["reason"])
    text = f"{row['step_s'] / ours['step_s']:.3g} x"
    if row.get("measured_s") and ours.get("measured_s"):
        text += f", measured {row['measured_s'] / ours['measured_s']:.3g} x"
    return text


_ABSENT = "-"
# The tables of ``autopar diff`` show the values of these fields if they differ. For all
# other fields they show only how many differ.
_SHOWN = ("cluster/", "predicted/", "/mesh/", "/inputs/", "/gradients/", "/devices")
_COSTS: tuple[tuple[str, Callable[[Plan], float], Callable[[float], str]], ...] = (
    ("step", lambda p: p.predicted.step_s, seconds_text),
    ("compute", lambda p: p.predicted.compute_s, seconds_text),
    ("communication", lambda p: p.predicted.communication_s, seconds_text),
    ("hidden", lambda p: p.predicted.hidden_s, seconds_text),
    ("sent by a device", lambda p: p.predicted.communication_bytes, bytes_text),
    ("held by a device", lambda p: p.predicted.peak_memory_bytes, bytes_text),
)


def diff(asked: DiffCommand) -> Result:
    """Compares two saved plans.

    Raises:
      PlanError: a file is not a plan.
    """
    one, other = asked.one, asked.other
    plans = (Plan.load(one), Plan.load(other))
    found = differences(plans[0].to_json(), plans[1].to_json())
    code = DIFFERENT if found else 0
    if asked.as_json:
        fields = [{"field": path, "a": a, "b": b} for path, a, b in found]
        return Result.of({"same": not found, "differences": fields}, code)
    if not found:
        return Result("the plans are the same")
    names = (one.name, other.name) if one.name != other.name else (str(one), str(other))
    tables = [_summary(plans, names), _layouts(plans, names), _codecs(plans, names)]
    rest = [path for path, _, _ in found if not any(x in path for x in _SHOWN)]
    if rest:
        parts = sorted({_part(path) for path in rest})
        tables.append([f"{len(rest)} other fields differ, in {', '.join(parts)}"])
    return Result("\n\n".join("\n".join(lines) for lines in tables if lines), code)


def _part(path: str) -> str:
    """Returns the section of a plan that holds a field, without the stage's number."""
    first, *more = path.split("/")
    return more[1] if first == "stages" and len(more) > 1 else first


def _summary(plans: tuple[Plan, Plan], names: tuple[str, str]) -> list[str]:
    rows = [("", *names, "B against A")]
    rows += [("cluster", *(str(p.cluster) for p in plans), "")]
    rows += [("mesh", *map(mesh_text, plans), "")]
    for name, read, text in _COSTS:
        a, b = map(read, plans)
        rows.append((name, text(a), text(b), f"{b / a - 1:+.2%}" if a else ""))
    return columns(rows, right=(3,))


def _layouts(plans: tuple[Plan, Plan], names: tuple[str, str]) -> list[str]:
    found = tuple(
        {path: spec_text(spec) for path, spec in plan.inputs.items()} for plan in plans
    )
    return _table("layout", names, *found)


def _codecs(plans: tuple[Plan, Plan], names: tuple[str, str]) -> list[str]:
    found = tuple({g.name: method_text(g) for g in plan.gradients} for plan in plans)
    return _table("gradient", names, *found)


def _table(
    what: str, names: tuple[str, str], one: Mapping[str, str], other: Mapping[str, str]
) -> list[str]:
    """Lists the differences of two plans as a table.

    Fields whose names differ only in numbers share a row.
    """
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys([*one, *other]):
        pair = (one.get(name, _ABSENT), other.get(name, _ABSENT))
        if pair[0] != pair[1]:
            groups[template(name), *pair].append(name)
    rows = [(what, *names), *_rows(groups.items())]
    return columns(rows) if groups else []


def _rows(
    groups: Iterable[tuple[tuple[str, str, str], list[str]]],
) -> Iterable[tuple[str, str, str]]:
    for (_, a, b), paths in groups:
        for path in collapse(paths):
            yield cut_name(path), a, b
