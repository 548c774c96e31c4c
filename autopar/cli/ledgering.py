"""The work of ``autopar ledger``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cli.commands.runs import LedgerCommand
from autopar.cli.output import Result
from autopar.elastic.ledger import read_ledger
from autopar.errors import PlanError
from autopar.terminal import columns
from autopar.units import bytes_text, rounded_cluster, seconds_text

_Line = Mapping[str, Any]
_HEADING = (
    "step", "event", "from", "to", "chosen", "of", "moved", "pause", "plan", "compile",
    "move", "step before", "after",
)  # fmt: skip
_WORLDS = (
    "step", "what happened", "processes from", "to", "pause", "plan", "compile",
    "place", "moved", "step before",
)  # fmt: skip
# Errors for values that are missing, have another type, or are not finite numbers.
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_NUMBERS = (0, *range(6, len(_HEADING)))
_BATCHES = (
    "step", "from", "to", "of", "phi", "goodput before", "predicted", "measured",
    "at least", "pause", "step before", "after",
)  # fmt: skip


def ledger(asked: LedgerCommand) -> Result:
    """Shows the ledger of an elastic run as tables.

    The tables list the sets of processes that trained, the re-plans, and events without
    effect.

    Raises:
      PlanError: the file is not a ledger.
    """
    file = asked.file
    lines = read_ledger(file)
    if asked.as_json:
        return Result.of({"lines": [dict(line) for line in lines]})
    later = {(x["kind"], str(x.get("number"))): x for x in lines}
    replans: list[Sequence[str]] = [_HEADING]
    batches: list[Sequence[str]] = [_BATCHES]
    worlds: list[Sequence[str]] = [_WORLDS]
    processes = ""
    others: list[Sequence[str]] = [("what", "from", "why")]
    for number, line in enumerate(lines, 1):
        kind, name = line["kind"], str(line.get("number"))
        try:
            if kind == "replan":
                replans.append(_row(line, later.get(("measured", name), {})))
            elif kind == "batch":
                measured = later.get(("batch measured", name), {})
                batches.append(_batch_row(line, measured))
            elif kind == "world":
                worlds.append(_world_row(line, processes))
                processes = str(line["processes"])
            elif other := _other(line):
                others.append(tuple(map(str, other)))
        except _WRONG as error:
            raise PlanError(
                f"{file}: line {number} is none of a ledger: no run writes such a "
                f"{kind[:40]!r} line."
            ) from error
    tables = (
        (worlds, (0, *range(2, len(_WORLDS)))),
        (replans, _NUMBERS),
        (batches, (0, *range(3, len(_BATCHES)))),
        (others, ()),
    )
    parts = [columns(rows, right=right) for rows, right in tables if len(rows) > 1]
    text = "\n\n".join("\n".join(part) for part in parts)
    return Result(text or "no event and no re-plan is written down yet")


def _row(line: _Line, after: _Line) -> tuple[str, ...]:
    """Returns the table row of a re-plan."""
    measured, predicted = line.get("measured", {}), line.get("predicted", {})
    compared = line.get("compared", ())
    times = [measured.get(x) for x in ("pause_s", "plan_s", "compile_s", "move_s")]
    times += [after.get("step_before_s"), after.get("step_after_s")]
    return (
        str(line.get("step", "")),
        "; ".join(x.get("what", "") for x in line.get("events", ())),
        _plan_text(line.get("old", {})),
        _plan_text(line.get("new", {})),
        str(line.get("chosen", "")),
        ", ".join(x.get("name", "") for x in compared),
        bytes_text(predicted.get("move_bytes") or 0.0),
        *("" if t is None else seconds_text(t) for t in times),
    )


def _world_row(line: _Line, before: str) -> tuple[str, ...]:
    """Returns the table row of a change of the set of processes.

    Args:
      line: the line of the ledger.
      before: the number of processes before the change; '' for the first set.
    """
    measured = line["measured"]
    times = [measured.get(x) for x in ("pause_s", "plan_s", "compile_s", "place_s")]
    step_s = measured.get("step_before_s")
    return (
        str(line["step"]),
        str(line.get("why") or ("the run begins" if not before else "")),
        before,
        str(line["processes"]),
        *("" if t is None else seconds_text(t) for t in times),
        bytes_text(measured.get("moved_bytes") or 0.0),
        "" if step_s is None else seconds_text(step_s),
    )


def _batch_row(line: _Line, after: _Line) -> tuple[str, ...]:
    """Returns the table row of a change of batch, plan or codecs by `autopar.train`."""
    predicted, phi = line.get("predicted", {}), line.get("phi") or {}
    times = [line.get("measured", {}).get("pause_s")]
    times += [after.get("step_before_s"), after.get("step_after_s")]
    rates = [predicted.get(x) for x in ("goodput_before", "goodput")]
    least = predicted.get("least")
    return (
        str(line.get("step", "")),
        _way_text(line.get("old", {})),
        _way_text(line.get("new", {})),
        str(len(line.get("compared", ()))),
        _number(phi.get("phi")),
        *(_number(x) for x in (*rates, after.get("goodput_after"))),
        "" if least is None else f"x{least:.2f}",
        *("" if t is None else seconds_text(t) for t in times),
    )


def _way_text(way: _Line) -> str:
    """Returns rows, microbatches, codecs and mesh, such as ``64/2 int8 data=4``."""
    parts = way.get("microbatches", 1)
    rows = f"{way.get('rows', '')}" + (f"/{parts}" if parts > 1 else "")
    meshes: Sequence[Mapping[str, int]] = way.get("meshes", ())
    axes = (" ".join(f"{k}={v}" for k, v in mesh.items()) for mesh in meshes)
    return " ".join((rows, str(way.get("codecs", "")), " | ".join(axes)))


def _number(given: float | None) -> str:
    return "" if given is None else f"{given:.4g}"


def _plan_text(plan: _Line) -> str:
    """Returns cluster and meshes of a plan, such as ``8:cpu data=4 tensor=2``."""
    meshes: Sequence[Mapping[str, int]] = plan.get("meshes", ())
    axes = (" ".join(f"{k}={v}" for k, v in mesh.items()) for mesh in meshes)
    return " ".join((rounded_cluster(plan.get("cluster", "")), " | ".join(axes)))


def _other(line: _Line) -> tuple[str, str, str] | None:
    """Returns an event without a re-plan: the event, its source and the reason."""
    if line["kind"] == "event":
        event = line["event"]
        what = f"{event['what']}: {event['status']}"
        return what, event["source"], event["reason"]
    if line["kind"] == "wrong":
        return "no event", line["source"], line["reason"]
    if line["kind"] == "batch refused":
        way = line.get("way") or {}
        reason = str(line.get("reason", "")).split("\n", 1)[0]
        return f"{_way_text(way)}: refused", "the batch", reason
    if line["kind"] == "batch kept":
        return (
            f"{_way_text(line.get('way') or {})}: kept",
            "the batch",
            _reason_to_stay(line),
        )
    if line["kind"] == "gain capped":
        return f"step {line.get('step')}: gain capped", "the loss", _cap_text(line)
    if line["kind"] in ("refused", "stop"):
        events = line.get("events", ())
        what = "; ".join(x.get("what", "") for x in events)
        source = ", ".join(dict.fromkeys(x.get("source", "") for x in events))
        reason = line.get("reason") or "no device is left"
        first = str(reason).split("\n", 1)[0]
        return f"{what}: {line['kind']}", source, first
    return None


def _cap_text(line: _Line) -> str:
    """Describes a new upper limit of a step's gain.

    The gain is the number of base-batch steps that one step counts as. The limit is
    lowered after the loss has risen.
    """
    numbers = {k: _number(line.get(k)) for k in ("loss", "limit", "gain", "most")}
    loss = numbers["loss"] or "no finite number"
    return (
        f"the loss is {loss}, usual is at most {numbers['limit']}; a step counts at "
        f"most {numbers['most']} of the base batch, {numbers['gain']} before"
    )


def _reason_to_stay(line: _Line) -> str:
    """Describes why the batch size did not change.

    The text has the gain and the cost of the best other batch size.
    """
    nearest = line.get("nearest") or {}
    least, cost_s = nearest.get("least"), nearest.get("cost_s")
    horizon_s = line.get("horizon_s")
    said = [f"{line.get('nearest_name', '')} does not pay"]
    if least is not None:
        said.append(f"nearly surely at least x{least:.2f} of the goodput")
    if cost_s is not None:
        said.append(f"{seconds_text(cost_s)} to get there")
    if horizon_s is not None:
        said.append(f"{seconds_text(horizon_s)} until the next change")
    return ", ".join(said)
