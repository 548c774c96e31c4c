"""The work of ``autopar diff``."""

from __future__ import annotations

import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from autopar.cli.failures import DIFFERENT
from autopar.cli.output import Result
from autopar.plans import Plan
from autopar.plans.schema import differences
from autopar.plans.specs import spec_text
from autopar.reports.table import (
    bytes_text,
    collapse,
    mesh_text,
    method_text,
    seconds_text,
    template,
)
from autopar.terminal import columns

_ABSENT = "-"
# The tables show these fields; all others that differ are counted.
_SHOWN = ("cluster/", "predicted/", "/mesh/", "/inputs/", "/gradients/", "/devices")
_COSTS: tuple[tuple[str, Callable[[Plan], float], Callable[[float], str]], ...] = (
    ("step", lambda p: p.predicted.step_s, seconds_text),
    ("compute", lambda p: p.predicted.compute_s, seconds_text),
    ("communication", lambda p: p.predicted.communication_s, seconds_text),
    ("hidden", lambda p: p.predicted.hidden_s, seconds_text),
    ("sent by a device", lambda p: p.predicted.communication_bytes, bytes_text),
    ("held by a device", lambda p: p.predicted.peak_memory_bytes, bytes_text),
)


def diff(one: pathlib.Path, other: pathlib.Path, as_json: bool) -> Result:
    """Compares two saved plans.

    Raises:
      PlanError: a file is no plan.
    """
    plans = (Plan.load(one), Plan.load(other))
    found = differences(plans[0].to_json(), plans[1].to_json())
    code = DIFFERENT if found else 0
    if as_json:
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
    """The part of a plan that a field is in; that of a stage without the stage."""
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
    """Lists the differences; names that are alike but for numbers share a row."""
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
            yield path, a, b
