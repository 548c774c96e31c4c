"""What ``autopar simulate`` does."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from autopar.cli.failures import COULD_NOT_RUN
from autopar.cli.output import Result
from autopar.errors import ScheduleError
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.named import policy_of
from autopar.scheduler.simulator.engine import History, Options, simulate
from autopar.scheduler.simulator.metrics import Metrics, metrics, timeline_page
from autopar.scheduler.simulator.traces.detect import Trace, read_trace
from autopar.scheduler.simulator.traces.spot import read_events
from autopar.whole_files import export_whole


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """The options of the command."""

    trace: pathlib.Path
    cluster: str
    policy: str
    tables: tuple[str, ...]
    interval_s: float
    react_s: float | None
    restart_s: float | None
    interference: float
    away: pathlib.Path | None
    page: pathlib.Path | None
    explain: bool


def run_simulation(asked: SimulationRequest, *, as_json: bool) -> Result:
    """Simulates, writes the page that is asked for, and returns the figures."""
    nodes, policy = Nodes.parse(asked.cluster), policy_of(asked.policy)
    events = read_events(asked.away, nodes) if asked.away else ()
    options = Options(
        interval_s=asked.interval_s,
        react_s=asked.react_s,
        interference=asked.interference,
        events=events,
    )
    restart_s = asked.restart_s
    if restart_s is not None and not 0 <= restart_s < math.inf:
        raise ScheduleError(
            f"the restart takes {restart_s} s; give a finite time of at least 0."
        )
    trace = read_trace(asked.trace, _tables(asked.tables), nodes, policy, restart_s)
    if not trace.jobs:
        raise ScheduleError(f"{asked.trace}: it has no jobs; give one row at least.")
    history = simulate(trace.jobs, nodes, policy, options)
    figures = metrics(history)
    if asked.page is not None:
        page = timeline_page(history, figures)
        export_whole(asked.page, page.encode(errors="backslashreplace"))
    code = COULD_NOT_RUN if figures.failed else 0
    if as_json:
        data = {
            **figures.data,
            "left_out": dict(trace.left_out),
            "kinds_alike": list(trace.alike),
        }
        more = {"decisions": _all(history)} if asked.explain else {}
        return Result.of(data | more, code)
    lines = [*_headline(figures, trace), _table(figures)]
    lines += [
        f"job {name} could not run: {why}" for name, why in figures.failed.items()
    ]
    lines += _all(history) if asked.explain else []
    return Result("\n".join(lines), code)


def _tables(words: tuple[str, ...]) -> dict[str, pathlib.Path]:
    """Folders by kind of devices, from DIR or KIND=DIR.

    Raises:
      ScheduleError: a kind stands there twice, or a folder has none beside others.
    """
    found: dict[str, pathlib.Path] = {}
    for word in words:
        kind, equals, folder = word.partition("=")
        kind, folder = (kind, folder) if equals else ("", word)
        if kind in found or (found and "" in (kind, *found)):
            raise ScheduleError(
                f"--tables {word}: give one folder, or one for each kind of devices, "
                "as --tables t4=DIR --tables a100=DIR."
            )
        found[kind] = pathlib.Path(folder)
    return found


def _headline(figures: Metrics, trace: Trace) -> list[str]:
    """What must be known before the figures."""
    lines: list[str] = []
    if lost := figures.submitted - figures.jobs:
        lines.append(
            f"{lost} of {figures.submitted} jobs could not run: the figures are of the "
            f"{figures.jobs} others"
        )
    for why, count in trace.left_out.items():
        lines.append(f"{count} jobs of the trace {why} and are left out")
    if trace.alike:
        kinds = ", ".join(kind or "others" for kind in trace.alike)
        lines.append(
            f"no table distinguishes {kinds}: these kinds of devices count as equally "
            "fast"
        )
    return lines


def _all(history: History) -> list[str]:
    """Every decision, a line for each job that moves."""
    return [
        f"{item.at_s:g} s: {reason.text}"
        for item in history.rounds
        for reason in item.reasons
    ]


def _table(figures: Metrics) -> str:
    rows = (
        ("policy", figures.policy),
        ("jobs done", f"{figures.jobs}{_beside(figures)}"),
        ("average completion", f"{figures.average_s:,.1f} s"),
        *_guarantee_rows(figures),
        ("median completion", f"{figures.median_s:,.1f} s"),
        ("99th percentile", f"{figures.p99_s:,.1f} s"),
        ("makespan", f"{figures.makespan_s:,.1f} s"),
        ("slowest over its service", f"{figures.slowest_share:.2f}x"),
        ("devices in use", f"{figures.utilisation:.1%}"),
        ("moves", f"{figures.restarts}"),
    )
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


def _beside(figures: Metrics) -> str:
    """The jobs that there were, where not all were done."""
    return "" if figures.jobs == figures.submitted else f" of {figures.submitted}"


def _guarantee_rows(figures: Metrics) -> list[tuple[str, str]]:
    if figures.guaranteed_s is None:
        return []
    seconds = f"{figures.guaranteed_s:,.1f} s, {figures.guaranteed} jobs"
    return [("of guaranteed jobs", seconds)]
