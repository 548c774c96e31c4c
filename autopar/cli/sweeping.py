"""The work of ``autopar sweep``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autopar.cli import common
from autopar.cli.commands.plans import SweepCommand
from autopar.cli.failures import spell_options
from autopar.cli.output import Result
from autopar.cli.target import Workload, load, parse_words
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InfeasibleError, TargetError
from autopar.planner.cache import PlanCache
from autopar.planner.plan import plan_analysis
from autopar.plans import Plan
from autopar.reports.sweep import (
    Point,
    conclusion_lines,
    largest,
    table_lines,
    worth_it,
)
from autopar.steps.analysis import Analysis

# The most values that the search for the largest value of an option tries.
_MOST_DOUBLINGS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRequest:
    """The options of ``autopar sweep``.

    Attributes:
      asked: the options as they were given.
      words: the options of the target, with ranges.
      clusters: the clusters to plan for.
      cache: a cache of plans; None for no cache.
    """

    asked: SweepCommand
    words: dict[str, str]
    clusters: tuple[Cluster, ...]
    cache: PlanCache | None

    @property
    def swept_options(self) -> list[str]:
        """The options that are swept."""
        several = [
            k for k, text in self.words.items() if len(common.range_values(text)) > 1
        ]
        return [k for k in self.words if k in several or k == self.asked.largest]


def sweep(asked: SweepCommand) -> Iterator[Result]:
    """Plans a target for all values of its options, on all clusters.

    Yields:
      The partial result after each point; the last result is complete.

    Raises:
      PlanError: no point has a plan, with the reason.
      TargetError: the target does not have the option ``--largest``.
    """
    texts = common.cluster_texts(asked.cluster or [])
    made_for = [common.read_cluster(c, asked.memory) for c in texts]
    given = SweepRequest(
        asked,
        parse_words(asked.words or []),
        tuple(made_for or [common.read_cluster(None)]),
        None if asked.cache is None else PlanCache(asked.cache),
    )
    _check_sized(given)
    points: list[Point] = []
    failures: list[Exception] = []
    with common.progress() as say:
        for point in _points(given, failures, say):
            points.append(point)
            yield _result(given, points, complete=False)
    if failures and not any(point.plan for point in points):
        raise failures[-1]
    yield _result(given, points, complete=True)


def _check_sized(given: SweepRequest) -> None:
    name = given.asked.largest
    if name is None:
        return
    text = given.words.get(name, "")
    if not text or not all(v.isdigit() and int(v) for v in common.range_values(text)):
        raise TargetError(
            f"--largest {name}: say where to start, with a whole number such as "
            f"{name}=8."
        )


def _points(
    given: SweepRequest, failures: list[Exception], say: common.Say
) -> Iterator[Point]:
    """Plans all combinations of options and clusters.

    If ``--largest`` names an option, the function then also plans the values that the
    search for the largest value tries.
    """
    every = common.range_combinations(given.words)
    total = len(every) * len(given.clusters)
    done: list[Point] = []
    for options in every:
        analysed = _Analysed(given, options)
        for cluster in given.clusters:
            name = _point_name(given, options, cluster)
            say(f"point {len(done) + 1} of {total}: {name}")
            done.append(_point(given, analysed, cluster, failures))
            yield done[-1]
    if given.asked.largest is None:
        return
    smaller = {k: v for k, v in given.words.items() if k != given.asked.largest}
    for options in common.range_combinations(smaller):
        for cluster in given.clusters:
            yield from _largest(given, options, cluster, done, say)


def _largest(
    given: SweepRequest,
    options: dict[str, str],
    cluster: Cluster,
    done: Sequence[Point],
    say: common.Say,
) -> Iterator[Point]:
    """Finds the largest value of an option that fits into memory.

    Doubles the value until it does not fit, and then bisects.
    """
    assert given.asked.largest is not None
    name = given.asked.largest
    varied = {k: v for k, v in options.items() if k in given.swept_options}
    known = {
        int(p.options[name]): p.plan is not None
        for p in done
        if p.cluster == str(cluster) and p.options.items() >= varied.items()
    }
    unit = min(known)
    for _ in range(_MOST_DOUBLINGS):
        wanted = _next(known, unit)
        if wanted is None:
            return
        tried = {k: options.get(k, str(wanted)) for k in given.words}
        say(f"largest {name}: {_point_name(given, tried, cluster)}")
        point = _point(given, _Analysed(given, tried), cluster, [])
        known[wanted] = point.plan is not None
        yield point


def _next(known: dict[int, bool], unit: int) -> int | None:
    """Returns the next value to try; None if the largest value that fits is known.

    Values above ``unit`` are multiples of ``unit``.

    >>> _next({8: True, 16: True}, 8), _next({16: True, 32: False}, 8)
    (32, 24)
    """
    fit = [value for value, fits in known.items() if fits]
    not_fit = [v for v, fits in known.items() if not fits and v > max(fit, default=0)]
    if not fit:
        return min(not_fit) // 2 or None
    if not not_fit:
        return 2 * max(fit)
    step = min(unit, max(fit))
    middle = (max(fit) + min(not_fit)) // 2 // step * step
    return middle if middle > max(fit) else None


class _Analysed:
    """The analysis of a target, which the first call of `get` makes."""

    def __init__(self, given: SweepRequest, options: dict[str, str]) -> None:
        self.given, self.options = given, options
        self._found: tuple[Workload, Analysis] | AutoparError | None = None

    def get(self) -> tuple[Workload, Analysis]:
        """Returns the analysis.

        Raises:
          AutoparError: the target fails with these options. Every call raises the same
            error.
        """
        if self._found is None:
            try:
                workload = load(self.given.asked.target, self.options)
                self._found = workload, workload.analyse_step()
            except AutoparError as error:
                self._found = error
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def _point(
    given: SweepRequest,
    analysed: _Analysed,
    cluster: Cluster,
    failures: list[Exception],
) -> Point:
    """Plans one point; a point without a plan has the reason."""
    options = {k: v for k, v in analysed.options.items() if k in given.swept_options}
    point = Point(options, str(cluster), cluster.device.name, cluster.num_devices)
    try:
        return dataclasses.replace(point, plan=_plan_for(given, analysed, cluster))
    except InfeasibleError as error:
        failures.append(error)
        return dataclasses.replace(point, reason="does not fit", fits=False)
    except AutoparError as error:
        failures.append(error)
        first = spell_options(str(error).split("\n", 1)[0])
        return dataclasses.replace(point, reason=first, fits=None)


def _plan_for(given: SweepRequest, analysed: _Analysed, cluster: Cluster) -> Plan:
    _, analysis = analysed.get()

    def make() -> Plan:
        return plan_analysis(analysis, cluster, given.asked.limits)

    if given.cache is None:
        return make()
    return given.cache.plan(analysis, cluster, given.asked.limits, make)


def _point_name(given: SweepRequest, options: dict[str, str], cluster: Cluster) -> str:
    words = [f"{k}={v}" for k, v in options.items() if k in given.swept_options]
    return " ".join([*words, str(cluster)])


def _result(given: SweepRequest, points: Sequence[Point], *, complete: bool) -> Result:
    if given.asked.as_json:
        sized = (
            [] if given.asked.largest is None else largest(points, given.asked.largest)
        )
        return Result.of(
            {
                "target": given.asked.target,
                "complete": complete,
                "points": [point.data for point in points],
                "worth_it": [
                    found.data for found in worth_it(points, given.asked.efficiency)
                ],
                "largest": [point.data for point in sized],
            }
        )
    lines = table_lines(points)
    follows = conclusion_lines(points, given.asked.efficiency, given.asked.largest)
    lines += ["", *follows] if follows else []
    if not complete:
        lines += ["", "stopped: not all points were planned"]
    return Result("\n".join(lines))
