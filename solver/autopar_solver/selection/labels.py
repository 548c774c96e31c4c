"""Solves a codec selection gradient by gradient, keeping what can still be best.

A *label* is a choice for the first gradients of the link's order, as far as the rest of
the problem can see it: when the link is done with them, ``f``, and their sums of local
time, error and memory. This is label setting for shortest paths with resources (Irnich
and Desaulniers, "Shortest path problems with resource constraints", 2005).

How late the link is matters only between two times, known backwards from the end of the
backward pass, where they meet::

    early[l - 1] = max(ready[l], early[l] - slowest wire of l)
    late[l - 1]  = max(ready[l], late[l] - fastest wire of l)

Up to ``early[l]`` all of the rest is as if the link were free; from ``late[l]`` on it
never pauses again and ends after the backward pass, so that each further second costs
one, and is counted with the local time at once. A label goes if

- its error or memory leaves too little for the others,
- the prices of the relaxed program prove that it ends above the cutoff, or
- another one with no more error and memory has ``local`` and ``f + local`` no larger.

If more than ``width`` remain, those that promise least go too, and the best promise
among them bounds what was missed.
"""

import dataclasses
import math

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.selection.options import Options
from autopar_solver.selection.problem import BUDGET_TOLERANCE, CodecSelection
from autopar_solver.selection.relaxation import Relaxed

BINS = 12
"""Into how many parts lateness is divided to compare labels: all pairs are too many."""

MEMORY_BINS = 4
"""The same for memory, where it is limited."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LabelAnswer:
    """What a search found.

    Attributes:
        chosen: by gradient in the link's order, an index into the options; None if
            nothing under the cutoff was found.
        bound_s: no choice costs less, unless it is at least the cutoff; ``inf`` if no
            label was ever cut for the width and nothing was found.
    """

    chosen: np.ndarray | None
    bound_s: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Columns of one length; ``parent`` is a label of the gradient before."""

    finish: np.ndarray
    local: np.ndarray
    error: np.ndarray
    memory: np.ndarray
    parent: np.ndarray
    option: np.ndarray

    def keep(self, kept: np.ndarray) -> "_Labels":
        return _Labels(
            finish=self.finish[kept],
            local=self.local[kept],
            error=self.error[kept],
            memory=self.memory[kept],
            parent=self.parent[kept],
            option=self.option[kept],
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Outlook:
    """What holds for all that follows each gradient.

    Attributes:
        ready: by gradient.
        early, late: see the module's docstring.
        error, memory: the least that the gradients after it add.
        rest: seconds that they add to the cost at least, at the prices.
    """

    ready: np.ndarray
    early: np.ndarray
    late: np.ndarray
    error: np.ndarray
    memory: np.ndarray
    rest: np.ndarray


def search_labels(
    problem: CodecSelection,
    options: Options,
    relaxed: Relaxed,
    *,
    cutoff_s: float,
    width: int,
    clock: Clock,
) -> LabelAnswer | None:
    """Searches for a choice that costs less than the cutoff.

    Args:
        problem: what to solve.
        options: what may be chosen.
        relaxed: prices; any prove, the best prove most.
        cutoff_s: only lower costs are of interest.
        width: how many labels are kept for each gradient.
        clock: None is returned when it has run out.
    """
    outlook = _outlook(problem, options, relaxed)
    labels = _Labels(*np.zeros((4, 1)), *np.zeros((2, 1), np.int64))
    stages, missed = list[_Labels](), math.inf
    for place in range(options.num_gradients):
        if clock.left <= 0:
            return None
        labels = _extend(labels, options, outlook, place)
        labels = labels.keep(_affordable(problem, labels, outlook, place))
        promise = _promise(labels, relaxed, outlook, place)
        labels, promise = labels.keep(promise < cutoff_s), promise[promise < cutoff_s]
        kept = np.sort(_undominated(problem, labels))
        labels, promise = labels.keep(kept), promise[kept]
        order = np.argsort(promise, kind="stable")
        missed = min([missed, *promise[order[width:]][:1].tolist()])
        labels = labels.keep(np.sort(order[:width]))
        stages.append(labels)
    if not len(labels.local):
        return LabelAnswer(None, missed)
    end = int(np.argmin(labels.local))
    bound = min(missed, float(labels.local[end]))
    return LabelAnswer(_backtrack(stages, end), bound)


def _outlook(problem: CodecSelection, options: Options, relaxed: Relaxed) -> _Outlook:
    count = options.num_gradients
    ready = np.array(sorted(problem.ready_s))
    fastest, slowest = options.least(options.wire), options.most(options.wire)
    early, late = np.empty(count), np.empty(count)
    early[-1] = late[-1] = problem.backward_s
    for place in reversed(range(1, count)):
        early[place - 1] = max(ready[place], early[place] - slowest[place])
        late[place - 1] = max(ready[place], late[place] - fastest[place])
    priced = options.priced(relaxed.weights, relaxed.error_price, relaxed.memory_price)
    starts = np.diff(relaxed.weights, prepend=0.0) * (ready - problem.backward_s)
    rest = _after(options.least(priced) + starts)
    rest = rest - relaxed.weights * problem.backward_s
    for price, budget in (
        (relaxed.error_price, problem.error_budget),
        (relaxed.memory_price, problem.memory_limit),
    ):
        rest = rest - (price * budget if price else 0.0)
    return _Outlook(
        ready=ready,
        early=early,
        late=late,
        error=_after(options.least(options.error)),
        memory=_after(options.least(options.memory)),
        rest=rest,
    )


def _after(values: np.ndarray) -> np.ndarray:
    """The sum of all values behind each."""
    return np.append(np.cumsum(values[:0:-1])[::-1], 0.0)


def _extend(
    labels: _Labels, options: Options, outlook: _Outlook, place: int
) -> _Labels:
    """Every label with every option of the next gradient."""
    own = np.arange(options.starts[place], options.starts[place + 1])
    parent = np.repeat(np.arange(len(labels.local)), len(own))
    option = np.tile(own, len(labels.local))
    start = np.maximum(labels.finish[parent], outlook.ready[place])
    finish = start + options.wire[option]
    late = outlook.late[place]
    exposed = np.maximum(finish - late, 0.0)
    return _Labels(
        finish=np.clip(finish, outlook.early[place], late),
        local=labels.local[parent] + options.local[option] + exposed,
        error=labels.error[parent] + options.error[option],
        memory=labels.memory[parent] + options.memory[option],
        parent=parent,
        option=option,
    )


def _affordable(
    problem: CodecSelection, labels: _Labels, outlook: _Outlook, place: int
) -> np.ndarray:
    allowed = 1 + BUDGET_TOLERANCE
    error = labels.error + outlook.error[place]
    memory = labels.memory + outlook.memory[place]
    return (error <= problem.error_budget * allowed) & (
        memory <= problem.memory_limit * allowed
    )


def _promise(
    labels: _Labels, relaxed: Relaxed, outlook: _Outlook, place: int
) -> np.ndarray:
    """What any choice that begins with each label costs at least, at the prices.

    Raising a finish to ``early`` changes no cost; the bound holds for what it is then.
    """
    charged = labels.local + relaxed.weights[place] * labels.finish
    charged = charged + relaxed.error_price * labels.error
    charged = charged + relaxed.memory_price * labels.memory
    return charged + outlook.rest[place]


def _undominated(problem: CodecSelection, labels: _Labels) -> np.ndarray:
    """Labels that no other of a later bin, or of an equal one, replaces.

    Of two labels, the one with ``f + local`` no larger and ``f`` no smaller has no more
    ``local`` either: it is enough to go through labels by ``f + local`` and compare
    errors with the least so far in bins of ``f`` that are no earlier.
    """
    if not len(labels.local):
        return np.empty(0, np.int64)
    total = labels.finish + labels.local
    error = labels.error * (problem.error_budget < math.inf)
    memory = labels.memory * (problem.memory_limit < math.inf)
    order = np.lexsort((memory, error, -labels.finish, total))
    error = error[order]
    later, later_same = _bins(-labels.finish[order], BINS)
    less, less_same = _bins(memory[order], MEMORY_BINS)
    kept = np.ones(len(order), bool)
    for g in range(len(later_same)):
        for h in range(len(less_same)):
            own = (later == g) & (less == h)
            if not own.any():
                continue
            others = (later < g + later_same[g]) & (less < h + less_same[h])
            best = np.minimum.accumulate(np.where(others, error, np.inf))
            best = np.append(np.inf, best[:-1])
            kept[own] = best[own] > error[own]
    return order[kept]


def _bins(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which bin each value is in, and by bin, whether all its values are equal.

    Every value of a bin is below every value of the next one.
    """
    edges = np.unique(np.quantile(values, np.linspace(0, 1, count + 1), method="lower"))
    # A value at an edge has a bin of its own; between two edges lies another.
    bins = np.searchsorted(edges, values, side="left") + np.searchsorted(
        edges, values, side="right"
    )
    return bins - 1, np.arange(2 * len(edges)) % 2 == 0


def _backtrack(stages: list[_Labels], end: int) -> np.ndarray:
    chosen = np.empty(len(stages), np.int64)
    for place in reversed(range(len(stages))):
        chosen[place] = stages[place].option[end]
        end = int(stages[place].parent[end])
    return chosen
