"""Chooses the codecs of stage cuts: the fastest step within a budget of errors.

A *site* is a cut and a direction: activations or cotangents. The choice has three
steps.

1. For each site and codec, the seconds on the link and the seconds of encoding and
   decoding of a step are computed. `autopar_solver.solve_selection` takes one codec for
   each site, so that the sum of these seconds is least within the budget.
2. The schedule is played with these codecs. Links run beside the work of stages, so a
   site may not need its codec. One site after the other gets the codec with the least
   error with which the step takes no longer.
3. Codecs are used if the step is faster than without them by at least `WORTHWHILE`.

The *error* of a choice is the square root of the sum of squared errors over all sites.
The error of a site is that of its codec, relative and in the L2 norm
(`autopar.compression.codecs.codec.Codec.error`), and counts `COTANGENT_WEIGHT` times
for cotangents. It is a sum because every activation passes all later cuts, and every
cotangent all earlier ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.cut_codes import EXACT
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import WORTHWHILE
from autopar.planner.stages.cut_codecs import cut_parts, with_codes
from autopar.planner.stages.stage_costs import KINDS, coding_s, link_s, stage_costs
from autopar.steps.stages import CutStep
from autopar_solver import (
    CodecSelection,
    ScheduleTable,
    TaskSeconds,
    play,
    solve_selection,
)

# Errors of cotangents harm less, because they are about independent and cancel in the
# gradients of weights. `python benchmarks/network/cut_codecs.py` shows the loss with
# codecs in one direction, such as ``--ways eden:levels=16/dense dense/eden:levels=8``.
COTANGENT_WEIGHT = 0.2
# The default budget allows int8 for activations and eden with 8 levels for cotangents,
# at one cut.
DEFAULT_CUT_BUDGET = 0.045
# The codecs to choose from, those of most bytes first. fp8 has three times the error of
# int8 at equal bytes.
OFFERED = ("int8", *(f"eden:levels={n}" for n in (32, 16, 8, 6)))
# A step counts as no longer if it is longer by at most this fraction.
_SAME = 1e-3


def smallest_codec(most: float, offered: Sequence[str] = OFFERED) -> str:
    """The codec of the fewest bytes with an error of at most ``most``, as text.

    >>> smallest_codec(0.2), smallest_codec(0.001)
    ('eden:levels=8', 'dense')
    """
    fitting = [t for t in offered if parse_codec(t).error((1, 1)) <= most]
    return fitting[-1] if fitting else EXACT


@dataclasses.dataclass(frozen=True, slots=True)
class CutChoice:
    """Codecs of all cuts.

    Attributes:
      activations: for each part except the last, the codec of its activations.
      cotangents: likewise of the cotangents that the next part sends back.
      error: see the module.
      step_s: predicted seconds of a step.
      exact_s: predicted seconds of a step that sends all values exactly.
    """

    activations: tuple[str, ...]
    cotangents: tuple[str, ...]
    error: float
    step_s: float
    exact_s: float

    @property
    def is_exact(self) -> bool:
        """Whether all values are sent exactly."""
        return not {*self.activations, *self.cotangents} - {EXACT}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Option:
    """A codec of a site.

    Attributes:
      codec: as text.
      error: its relative error, weighted for cotangents; 0 for exact values.
      link_s: float64 ``[parts - 1]``, seconds for which the values of a microbatch in
        the site's direction occupy the link after each part. A value that skips parts
        occupies another link than that of its cut.
      task_s: float64 ``[parts, 4]``, seconds of encoding and decoding in each part's
        tasks of a microbatch.
    """

    codec: str
    error: float
    link_s: np.ndarray
    task_s: np.ndarray


# Whether the values are activations, and the number of their cut.
_Site = tuple[bool, int]


def choose_cut_codecs(
    cut: CutStep,
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
    found: Sequence[Candidate],
    table: ScheduleTable,
    budget: float,
    offered: Sequence[str] = OFFERED,
) -> CutChoice:
    """Chooses a codec for the activations and for the cotangents of each cut.

    Args:
      cut: the step as stages.
      cluster: all devices.
      devices: by stage, the positions of its devices in the cluster.
      found: the layouts of each stage.
      table: the schedule.
      budget: the largest error of all sites together.
      offered: the codecs to choose from, as text.
    """
    exact = with_codes(cut, (), ())
    tasks = stage_costs(exact, cluster, devices, found).tasks
    options = _options(exact, cluster, devices, found, offered)
    exact_s = play(table, tasks).makespan_s
    nothing = dict.fromkeys(options, 0)
    taken = _selected(options, cut.found.microbatches, budget) if options else {}
    step_s = play(table, _with_options(tasks, options, taken)).makespan_s
    for site in sorted(taken, key=lambda s: (not s[0], s[1])):
        order = sorted(range(len(options[site])), key=lambda k: options[site][k].error)
        for k in order[: order.index(taken[site])]:
            milder = {**taken, site: k}
            seconds = play(table, _with_options(tasks, options, milder)).makespan_s
            if seconds <= (1 + _SAME) * step_s:
                taken = milder
                break
    step_s = play(table, _with_options(tasks, options, taken)).makespan_s
    if step_s > (1 - WORTHWHILE) * exact_s:
        taken, step_s = nothing, exact_s
    count = cut.cut.parts.count - 1

    def codecs(forward: bool) -> tuple[str, ...]:
        sites = [(forward, number) for number in range(count)]
        return tuple(
            options[site][taken[site]].codec if site in taken else EXACT
            for site in sites
        )

    error = math.hypot(*(options[site][k].error for site, k in taken.items()))
    return CutChoice(codecs(True), codecs(False), error, step_s, exact_s)


def _options(
    cut: CutStep,
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
    found: Sequence[Candidate],
    offered: Sequence[str],
) -> dict[_Site, list[_Option]]:
    """The codecs of each site that has values to encode; the first sends exactly."""
    parts, count = cut.cut.parts.count, cut.cut.parts.count - 1
    out: dict[_Site, list[_Option]] = {}
    nothing = np.zeros((parts, 4))
    for site in sorted(set(cut_parts(cut).values())):
        forward, number = site
        links = functools.partial(_links_s, cluster, devices, found, forward)
        row = [_Option(EXACT, 0.0, links(cut), nothing)]
        for text in offered:
            given = tuple(text if k == number else EXACT for k in range(count))
            pair = (given, ()) if forward else ((), given)
            coded = with_codes(cut, *pair)
            if not coded.codes:
                continue
            task_s = nothing.copy()
            for key, seconds in coding_s(coded, found):
                task_s[key.number, KINDS[key.phase]] += seconds
            shapes = [cut.analysis.graph.values[v].shape for v in coded.codes]
            error = max(parse_codec(text).error(tuple(shape)) for shape in shapes)
            error *= 1.0 if forward else COTANGENT_WEIGHT
            row.append(_Option(text, error, links(coded), task_s))
        out[site] = row
    return out


def _links_s(
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
    found: Sequence[Candidate],
    forward: bool,
    cut: CutStep,
) -> np.ndarray:
    """The seconds of each link in one direction."""
    count = cut.cut.parts.count - 1
    way = 0 if forward else 1
    return np.array(
        [link_s(cut, cluster, devices, found, k)[way] for k in range(count)]
    )


def _selected(
    options: Mapping[_Site, Sequence[_Option]], microbatches: int, budget: float
) -> dict[_Site, int]:
    """Takes one option of each site, with the least seconds within the budget."""

    def columns(of: str) -> tuple[np.ndarray, ...]:
        return tuple(
            np.array([_measure(option, of, microbatches) for option in row])
            for row in options.values()
        )

    problem = CodecSelection(
        name="codecs of stage cuts",
        wire_s=columns("link"),
        local_s=columns("task"),
        error=columns("error"),
        ready_s=(0.0,) * len(options),
        backward_s=0.0,
        error_budget=budget**2,
    )
    return dict(zip(options, solve_selection(problem).choices, strict=True))


def _measure(option: _Option, of: str, microbatches: int) -> float:
    """The seconds of an option in a step on the link or in tasks, or its squared
    error.
    """
    if of == "error":
        return option.error**2
    seconds = option.link_s if of == "link" else option.task_s
    return microbatches * float(seconds.sum())


def _with_options(
    tasks: TaskSeconds,
    options: Mapping[_Site, Sequence[_Option]],
    taken: Mapping[_Site, int],
) -> TaskSeconds:
    """The seconds of a pipeline's tasks and links with codecs."""
    links = {True: tasks.forward_link_s, False: tasks.backward_link_s}
    task_s = tasks.task_s
    for site, k in taken.items():
        row, forward = options[site], site[0]
        links[forward] = links[forward] + row[k].link_s - row[0].link_s
        task_s = task_s + row[k].task_s
    return dataclasses.replace(
        tasks, task_s=task_s, forward_link_s=links[True], backward_link_s=links[False]
    )
