"""The work of ``autopar sweep``."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from autopar.cli import common, ranges
from autopar.cli.failures import spell_options
from autopar.cli.output import Result
from autopar.cli.target import Workload, load, parse_words
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InfeasibleError, TargetError
from autopar.planner.cache import PlanCache
from autopar.planner.options import PlanOptions
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
      target: the target.
      words: the options of the target, with ranges.
      clusters: the clusters to plan for.
      limits: the planning options of each search.
      share: the least efficiency (the speed-up over one device, divided by the number
        of devices) at which a number of devices is worth its cost.
      sized: the option for which to find the largest value that fits; None for no
        option.
      cache: a cache of plans; None for no cache.
      as_json: whether the result is JSON.
    """

    target: str
    words: dict[str, str]
    clusters: tuple[Cluster, ...]
    limits: PlanOptions
    share: float
    sized: str | None
    cache: PlanCache | None
    as_json: bool

    @property
    def swept_options(self) -> list[str]:
        """The options that are swept."""
        several = [k for k, text in self.words.items() if len(ranges.values(text)) > 1]
        return [k for k in self.words if k in several or k == self.sized]


def sweep(
    target: str,
    words: Sequence[str],
    *,
    clusters: Sequence[str],
    memory: str | None,
    limits: PlanOptions,
    share: float,
    sized: str | None,
    cache: pathlib.Path | None,
    as_json: bool,
) -> Iterator[Result]:
    """Plans a target for all values of its options, on all clusters.

    Yields:
      The partial result after each point; the last result is complete.

    Raises:
      PlanError: no point has a plan, with the reason.
      TargetError: the target does not have the option ``sized``.
    """
    made_for = [common.read_cluster(c, memory) for c in ranges.clusters(clusters)]
    given = SweepRequest(
        target,
        parse_words(words),
        tuple(made_for or [common.read_cluster(None)]),
        limits,
        share,
        sized,
        None if cache is None else PlanCache(cache),
        as_json,
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
    if given.sized is None:
        return
    text = given.words.get(given.sized, "")
    if not text or not all(v.isdigit() and int(v) for v in ranges.values(text)):
        raise TargetError(
            f"--largest {given.sized}: say where to start, with a whole number such as "
            f"{given.sized}=8."
        )


def _points(
    given: SweepRequest, failures: list[Exception], say: common.Say
) -> Iterator[Point]:
    """Plans all combinations of options and clusters.

    Then plans the values that the search for the largest value of an option tries.
    """
    every = ranges.combinations(given.words)
    total = len(every) * len(given.clusters)
    done: list[Point] = []
    for options in every:
        analysed = _Analysed(given, options)
        for cluster in given.clusters:
            name = _point_name(given, options, cluster)
            say(f"point {len(done) + 1} of {total}: {name}")
            done.append(_point(given, analysed, cluster, failures))
            yield done[-1]
    if given.sized is None:
        return
    smaller = {k: v for k, v in given.words.items() if k != given.sized}
    for options in ranges.combinations(smaller):
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
    assert given.sized is not None
    name = given.sized
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
                workload = load(self.given.target, self.options)
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
        return plan_analysis(analysis, cluster, given.limits)

    if given.cache is None:
        return make()
    return given.cache.plan(analysis, cluster, given.limits, make)


def _point_name(given: SweepRequest, options: dict[str, str], cluster: Cluster) -> str:
    words = [f"{k}={v}" for k, v in options.items() if k in given.swept_options]
    return " ".join([*words, str(cluster)])


def _result(given: SweepRequest, points: Sequence[Point], *, complete: bool) -> Result:
    if given.as_json:
        sized = [] if given.sized is None else largest(points, given.sized)
        return Result.of(
            {
                "target": given.target,
                "complete": complete,
                "points": [point.data for point in points],
                "worth_it": [found.data for found in worth_it(points, given.share)],
                "largest": [point.data for point in sized],
            }
        )
    lines = table_lines(points)
    follows = conclusion_lines(points, given.share, given.sized)
    lines += ["", *follows] if follows else []
    if not complete:
        lines += ["", "stopped: not all points were planned"]
    return Result("\n".join(lines))
