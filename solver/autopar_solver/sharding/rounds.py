"""Closes the gap between cost and bound, in rounds.

Each round raises the bound, removes strategies, solves an integer program if it is
small, and searches for better choices.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar_solver.clock import Clock, Timer
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.ilp.highs import Backend, StopCriteria
from autopar_solver.sharding.bounds.dual import Dual
from autopar_solver.sharding.bounds.message_passing import carry_messages
from autopar_solver.sharding.exact import solve_field
from autopar_solver.sharding.field import flatten
from autopar_solver.sharding.graph import ContradictionError, Graph
from autopar_solver.sharding.moves.neighbourhood import (
    NeighbourhoodSearch,
    Position,
    mend,
    polish,
)
from autopar_solver.sharding.problem import (
    ReductionReport,
    ShardingProblem,
    Solution,
    evaluate_choices,
    usage_over_time,
)
from autopar_solver.sharding.reductions.pipeline import build_graph, reduce_graph
from autopar_solver.status import Status

ROUNDING = 1e-9
"""Relative difference of cost and bound that always counts as zero."""


class Incumbent:
    """The best valid choices of a problem, and a bound that only rises.

    Attributes:
        choices: the choices of all nodes of the problem; None until valid choices are
            found.
        cost: the cost of the choices; infinite until valid choices are found.
        bound: a lower bound of the cost of all valid choices.
    """

    def __init__(self, problem: ShardingProblem, gap: float) -> None:
        """Starts without choices; ``gap`` is a share of the cost."""
        self.problem = problem
        self.gap = gap
        self.choices: np.ndarray | None = None
        self.cost = math.inf
        self.bound = -math.inf

    @functools.cached_property
    def unit(self) -> float:
        """The smallest absolute value of the costs that are not zero or infinite."""
        return _smallest_cost(self.problem)

    def fork(self) -> Incumbent:
        """Copies the choices without the bound, for a problem of fewer strategies."""
        other = copy.copy(self)
        other.bound = -math.inf
        return other

    def offer(self, choices: Sequence[int] | np.ndarray) -> bool:
        """Accepts choices that are valid and better, after recomputing their cost."""
        found = evaluate_choices(self.problem, [int(choice) for choice in choices])
        limit = self.problem.memory_limit
        if not found.cost < self.cost or (limit is not None and found.peak > limit):
            return False
        self.choices = np.array(choices, np.int64)
        self.cost = found.cost
        return True

    def prove(self, bound: float) -> None:
        """Raises the bound, but never above the cost."""
        self.bound = min(max(self.bound, bound), self.cost)

    @property
    def tolerance(self) -> float:
        """The absolute difference to the bound at which the cost counts as optimal."""
        if math.isinf(self.cost):
            return 0.0
        # A sum of non-negative costs is either 0 or at least the smallest cost that is
        # not 0.
        size = self.cost if self.cost > 0 else max(-self.cost, self.unit)
        return max(self.gap * abs(self.cost), ROUNDING * size)

    @property
    def cutoff(self) -> float:
        """Solutions that cost this much or more are ignored."""
        return self.cost - 0.9 * self.tolerance if self.cost < math.inf else math.inf

    @property
    def is_proved(self) -> bool:
        """Whether cost and bound differ by at most the allowed gap."""
        return self.cost - self.bound <= self.tolerance


def _smallest_cost(problem: ShardingProblem) -> float:
    """The smallest absolute value of the costs that are not zero or infinite."""
    smallest = math.inf
    known: set[int] = set()
    for costs in (*problem.node_costs, *problem.edge_costs):
        if id(costs) not in known:
            known.add(id(costs))
            sizes = np.abs(costs[(costs != 0) & (costs < np.inf)])
            smallest = min(smallest, float(sizes.min(initial=math.inf)))
    return smallest if smallest < math.inf else 0.0


WORK_PER_SECOND = 20_000_000
"""Approximate number of table entries that elimination processes per second."""

STALL_STEPS, STALL_GAIN = 10, 0.01
"""Price steps stop if this number of steps closes less than this share of the gap."""

PROGRAM_PAIRS = 60_000
"""Larger fields get bounds and searches, but no integer program, unless time has no
limit and a slice has grown to `LONG_SLICE`: only a program proves every optimum."""

LONG_SLICE, LONGEST_SLICE = 60.0, 3600.0
"""Seconds of a time slice: from when on large fields get an integer program, and at
most."""

NARROW_PAIRS = 60_000
"""Initial size of the field that is restricted to favoured strategies."""

NARROW_PARTS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015, 0.0)
"""Shares of the gap: the largest share that leaves a small enough field is used."""

SEARCH_GAIN = 0.02
"""A search that closes a smaller share of the gap gets less time next."""

MAX_MENDS = 2_000
"""Limit of the moves that repair decoded choices."""

LARGE_GAIN = 0.1
"""Only price steps are repeated while a time slice closes this share of the gap."""

DECODE_SECONDS = 1e-4
"""Approximate seconds per node of decoding, repairing and polishing."""

NODES_PER_SECOND = 100
"""Branches of the integer program per second, when time is counted, not measured."""

NUM_RECENT = 6
"""Number of recent decoded choices whose strategies are favoured as well."""

DECODE_PAUSE = 3.0
"""Pause between two decodings, in multiples of the time of one decoding."""


def close_gap(
    graph: Graph,
    incumbent: Incumbent,
    clock: Clock,
    backend: Backend,
    *,
    inner: bool = False,
) -> None:
    """Improves the incumbent and its bound until they meet or time runs out.

    Args:
        graph: the remaining problem; its trail leads back to the original problem.
        incumbent: the best choices and the bound so far.
        clock: the time limit.
        backend: the solver of integer programs.
        inner: whether another call of this function removed strategies from the graph,
            to solve a smaller problem first.
    """
    if incumbent.is_proved or clock.left_s < 0.02:
        return
    state = _State(graph, incumbent, clock, backend, inner)
    try:
        while not incumbent.is_proved and clock.left_s > 0.02:
            if not graph.costs:
                state.finish()
                return
            if state.round():
                return
    except ContradictionError:
        # No choice remains that costs less than the cost above which strategies were
        # removed.
        incumbent.prove(state.removed_above)


class _State:
    """A graph that shrinks from round to round, with the dual of the current graph.

    The dual has the messages and prices that prove the lower bound.
    """

    def __init__(
        self,
        graph: Graph,
        incumbent: Incumbent,
        clock: Clock,
        backend: Backend,
        inner: bool,
    ) -> None:
        self.inner = inner
        self.search_share = 1.0
        self.narrow_pairs = float(NARROW_PAIRS)
        self.graph = graph
        self.incumbent = incumbent
        self.clock = clock
        self.backend = backend
        self.slice = 0.5 if len(graph.rows) else 0.1
        self.removed_above = math.inf
        self.next_decode = 0.0
        self.backward = True
        self.recent: list[np.ndarray] = []
        self.decode_seconds = 0.0
        self.size = incumbent.problem.num_strategies
        self._refresh(None, {})

    def round(self) -> bool:
        """Runs every method once; returns True if nothing remains to be done."""
        climbing = self._ascend()
        large = self.field.num_pairs > PROGRAM_PAIRS
        if large and not (climbing or len(self.graph.rows) or self._is_done()):
            # Without memory limits, messages between nodes give a bound that is nearly
            # tight.
            self._narrow()
        if self._is_done():
            return True
        if self._fix():
            return False
        if climbing:
            self.slice = min(1.2 * self.slice, LONGEST_SLICE)
            return False
        self._deepen()
        if self._is_done():
            return True
        if self._fix():
            return False
        if self._takes_program() and self._program():
            return True
        if not self._is_done():
            self._narrow()
        if not self._is_done():
            self._search()
        self.slice = min(1.5 * self.slice, LONGEST_SLICE)
        return self._is_done()

    def _takes_program(self) -> bool:
        """Whether an integer program can solve the field, or time is not limited."""
        endless = self.clock.end == math.inf and self.slice >= LONG_SLICE
        return self.field.num_pairs <= PROGRAM_PAIRS or endless

    def finish(self) -> None:
        """Offers the choices of the trail, because every node is decided."""
        blank = np.zeros(len(self.size), np.int64)
        self.incumbent.offer(self.graph.expand(blank))
        self._prove(self.graph.constant)

    def _prove(self, bound: float) -> None:
        """Stores a bound, limited by the cost above which strategies were removed."""
        self.incumbent.prove(min(bound, self.removed_above))

    def _is_done(self) -> bool:
        return self.incumbent.is_proved or self.clock.left_s < 0.02

    def _refresh(
        self, prices: np.ndarray | None, messages: dict[tuple[int, int], np.ndarray]
    ) -> None:
        """Rebuilds field, dual and search after the graph has changed."""
        if not self.graph.costs:
            return
        self.field = flatten(self.graph)
        self.dual = Dual(self.field, prices)
        self.dual.messages.resume(messages)
        self.search = NeighbourhoodSearch(self.dual, self.backend)
        self.position: np.ndarray | None = None
        self.recent = []
        if self.incumbent.choices is not None:
            whole = self.graph.project(self.incumbent.choices)
            self._hold(whole[list(self.field.nodes)])

    def _hold(self, choices: np.ndarray) -> None:
        if (choices < self.field.sizes).all() and self.field.memory.fits(choices):
            self.position = choices

    def _offer(self, choices: np.ndarray) -> bool:
        """Offers choices of the field's nodes; returns whether they are better."""
        if self.field.cost(choices) >= self.incumbent.cost:
            return False
        whole = np.zeros(len(self.size), np.int64)
        whole[list(self.field.nodes)] = choices
        if not self.incumbent.offer(self.graph.expand(whole)):
            return False
        self.position = choices
        return True

    def _ascend(self) -> bool:
        """Raises the bound by messages between nodes.

        The result is True if prices of memory may raise the bound further.
        """
        before = self._gap()
        self.dual.lighten()
        self.dual.sweep()
        if self.incumbent.choices is None:
            self._decode()
        stalled = self._climb()
        after = self._gap()
        return not stalled and not after > (1 - LARGE_GAIN) * before

    def _gap(self) -> float:
        """The gap between the cost and the best bound that applies to the field."""
        known = -math.inf if len(self.graph.rows) else self.incumbent.bound
        return self.incumbent.cost - max(self.dual.bound, known)

    def _deepen(self) -> None:
        """Raises the bound by eliminating nodes."""
        work = int(WORK_PER_SECOND * min(self.slice, self.clock.left_s / 8))
        if self.dual.deepen(work // 8, work):
            self._climb()

    def _climb(self) -> bool:
        """Changes the prices of memory for a slice of the time.

        The result is True if the bound stalls, that is, if it hardly rises any more.

        From time to time, the method makes choices from the prices and messages, and
        offers them to the incumbent.
        """
        # Making choices from prices and messages must end before the time limit.
        left = self.clock.left_s - 1.2 * self.decode_seconds
        slice_clock = self.clock.within(min(self.slice, left))
        before, steps = self.dual.bound, 0
        stalled = False
        while slice_clock.left_s > 0 and not stalled and not self._is_done():
            self.dual.ascend(self.incumbent.cost)
            self.clock.tick(self.dual.step_seconds)
            steps += 1
            self._prove(self.dual.bound)
            if self.clock.now > self.next_decode:
                self._decode()
            if steps % STALL_STEPS == 0:
                gain = self.dual.bound - before
                gap = self.incumbent.cost - self.dual.bound
                stalled = gain < STALL_GAIN * gap
                before = self.dual.bound
        if not self._is_done():
            self._decode()
        return stalled

    def _decode(self) -> None:
        """Makes choices that fit memory, from the bound's prices and messages."""
        begin = self.clock.now
        dual = self.dual
        choices = dual.bucket_choices
        if choices is None:
            self.backward = not self.backward
            choices = dual.messages.decode(dual.costs, backward=self.backward)
        self.recent = [*self.recent[1 - NUM_RECENT :], choices]
        position = Position(self.field, choices, dual.messages.links)
        if mend(position, dual.costs, MAX_MENDS):
            self._offer(position.choices)
            if self.clock.left_s > max(0.1, self.decode_seconds):
                polish(position)
                self._offer(position.choices)
        self.clock.tick(DECODE_SECONDS * self.field.num_nodes)
        now = self.clock.now
        self.decode_seconds = now - begin
        self.next_decode = now + DECODE_PAUSE * self.decode_seconds

    def _fix(self) -> bool:
        """Removes strategies that no better solution uses; True if it removed many."""
        cutoff = self.incumbent.cutoff
        kept = self.dual.bounds < cutoff
        if self.position is not None:
            kept[self.field.offsets[:-1] + self.position] = True
        if self._pairs(kept) + kept.sum() > 0.9 * (self.field.num_pairs + len(kept)):
            return False
        self.removed_above = min(self.removed_above, cutoff)
        self._remove(~kept)
        return True

    def _remove(self, gone: np.ndarray) -> None:
        rows, prices = self.graph.rows, self.dual.best_prices
        messages = self.dual.messages.by_link()
        first_step = len(self.graph.trail)
        for k, i in enumerate(self.field.nodes):
            own = gone[self.field.offsets[k] : self.field.offsets[k + 1]]
            if own.any():
                self.graph.restrict(i, np.flatnonzero(~own))
        reduce_graph(self.graph, self.clock)
        kept = prices[np.searchsorted(rows, self.graph.rows)]
        self._refresh(kept, carry_messages(messages, self.graph, first_step))

    def _program(self) -> bool:
        """Runs the integer program for a slice of the time; True if it was solved."""
        seconds = min(max(2.0, 2 * self.slice), self.clock.left_s)
        rows = tuple(np.flatnonzero(self.dual.best_prices).tolist())
        counted = self.clock.counted
        stop = StopCriteria(
            None if counted else seconds,
            0.05 * self.incumbent.tolerance,
            self.incumbent.cutoff,
            int(NODES_PER_SECOND * seconds) if counted else None,
        )
        answer = solve_field(self.field, self.backend, stop, rows)
        if answer.choices is not None:
            self._offer(answer.choices)
        self._prove(answer.bound)
        if answer.finished and answer.choices is None:
            self._prove(math.inf)
        return answer.finished

    def _search(self) -> None:
        """Improves parts of the choices one by one.

        Searches for a shorter time if the last searches had little success.
        """
        if self.position is None:
            return
        seconds = min(self.search_share * self.slice, self.clock.left_s)
        clock = self.clock.within(seconds)
        before = self.incumbent.cost
        known = self.incumbent
        enough = known.bound + known.tolerance
        choices = self.search.improve(self.position, known.cutoff, clock, enough)
        self._offer(choices)
        gain = before - self.incumbent.cost
        useful = gain > SEARCH_GAIN * (before - self.incumbent.bound)
        self.search_share = 1.0 if useful else max(self.search_share / 2, 0.1)

    def _narrow(self) -> None:
        """Solves the problem with only the strategies of least lower bounds."""
        if self.position is None or self.inner:
            return
        kept = self._favourites()
        if kept is None:
            return
        graph = self.graph.copy()
        local = self.incumbent.fork()
        clock = self.clock.within(2 * self.slice)
        try:
            for k, i in enumerate(self.field.nodes):
                own = kept[self.field.offsets[k] : self.field.offsets[k + 1]]
                if not own.all():
                    graph.restrict(i, np.flatnonzero(own))
            reduce_graph(graph, clock)
            close_gap(graph, local, clock, self.backend, inner=True)
        except ContradictionError:
            return
        self.narrow_pairs *= 2 if local.is_proved else 0.7
        if local.choices is not None and self.incumbent.offer(local.choices):
            whole = self.graph.project(local.choices)
            self._hold(whole[list(self.field.nodes)])

    def _favourites(self) -> np.ndarray | None:
        """The strategies with the least lower bounds, few enough for the time left."""
        dual, field = self.dual, self.field
        room = self.incumbent.cutoff - dual.bound
        for part in NARROW_PARTS:
            kept = dual.bounds < dual.bound + part * room
            for choices in (self.position, *self.recent):
                kept[field.offsets[:-1] + choices] = True
            if self._pairs(kept) <= self.narrow_pairs:
                return None if kept.all() else kept
        return None

    def _pairs(self, kept: np.ndarray) -> int:
        sizes = np.add.reduceat(kept, self.field.offsets[:-1], dtype=np.int64)
        return sum(int(sizes[k] * sizes[m]) for k, m in self.field.edges)


# Solves a sharding problem: reductions, then rounds of bounds and searches.


REDUCTION_SHARE = 0.3
"""Share of the time limit after which no further round of reductions begins."""


def solve(
    problem: ShardingProblem,
    *,
    seconds: float | None = None,
    gap: float = 1e-4,
    warm_start: Sequence[int] | None = None,
    below: float = math.inf,
    backend: BackendName = "highs",
    timer: Timer = time.monotonic,
) -> Solution:
    """Finds the cheapest choice of strategies that fits in memory.

    Without a time limit the same problem always gives the same solution.

    Args:
        problem: the problem to solve. Its costs may have any scale.
        seconds: time limit, as measured by the timer; None to stop only when the gap is
            closed.
        gap: the largest difference of cost and bound, divided by the cost, at which a
            solution counts as optimal. A difference of 1e-9 always counts as optimal.
        warm_start: choices to begin with. If they are valid, the result costs no more
            than they do.
        below: only solutions with a lower cost are searched. If there is none, the
            status is unknown, and the bound is at least ``below``.
        backend: the solver of integer programs: "highs", or "cbc" through PuLP.
        timer: returns the time in seconds. With ``time.thread_time`` the limit applies
            to CPU time, and does not depend on the load of the machine.

    Raises:
        InputError: the warm start does not name one strategy per node, or there is no
            backend of this name.
    """
    clock = Clock(timer(), seconds, timer)
    solver = backend_of(backend)
    incumbent = Incumbent(problem, gap)
    incumbent.cost = below
    if warm_start is not None:
        incumbent.offer(warm_start)
    graph = build_graph(problem)
    reports: tuple[ReductionReport, ...] = ()
    try:
        early = clock.within(REDUCTION_SHARE * clock.length)
        reports = reduce_graph(graph, early)
        close_gap(graph, incumbent, clock, solver)
    except ContradictionError:
        # The bound equals the cost: either no choice is possible, or no choice costs
        # less than the known choices.
        incumbent.prove(incumbent.cost)
    return _solution(incumbent, clock, reports)


def _solution(
    incumbent: Incumbent, clock: Clock, reports: tuple[ReductionReport, ...]
) -> Solution:
    if incumbent.choices is None:
        nothing = incumbent.bound == math.inf
        status = Status.INFEASIBLE if nothing else Status.UNKNOWN
        incumbent.cost = math.inf
    else:
        status = Status.OPTIMAL if incumbent.is_proved else Status.FEASIBLE
    found = incumbent.choices if incumbent.choices is not None else np.zeros(0)
    return Solution(
        choices=tuple(int(choice) for choice in found),
        cost=incumbent.cost,
        bound=incumbent.bound,
        status=status,
        seconds=clock.spent_s,
        reductions=reports,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveTerm:
    """The least memory that one term needs at the time `InfeasibilityExplanation.time`.

    ``term`` indexes ``problem.memory``; ``node`` is the node that the term belongs to.
    """

    term: int
    node: int
    least: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibilityExplanation:
    """The time at which the least memory that any choice needs is largest.

    Attributes:
        time: the time.
        least_peak: a lower bound of the memory of all choices at this time.
        limit: the problem's limit; None if it has none.
        fixed: the memory at this time that no choice changes.
        terms: the live terms at this time, the largest first.
    """

    time: int
    least_peak: float
    limit: float | None
    fixed: float
    terms: tuple[LiveTerm, ...]

    @property
    def proves_infeasible(self) -> bool:
        """Whether the least peak itself exceeds the limit."""
        return self.limit is not None and self.least_peak > self.limit


def explain_infeasibility(problem: ShardingProblem) -> InfeasibilityExplanation:
    """Finds the time at which all choices need the most memory, and its terms by size.

    For each term separately, every node uses its allowed strategy with the least
    memory. The resulting peak is therefore only a lower bound. A problem can be
    infeasible although this bound is within the limit.
    """
    allowed = [np.isfinite(costs) for costs in problem.node_costs]
    least = np.array(
        [term.usage[allowed[term.node]].min() for term in problem.memory], np.float64
    )
    starts = np.array([term.start for term in problem.memory], np.int64)
    ends = np.array([term.end for term in problem.memory], np.int64)
    fixed = np.array(problem.fixed_memory, np.float64).reshape(-1, 3)
    live = ends > starts
    kept = fixed[:, 1] > fixed[:, 0]
    times, usage = usage_over_time(
        np.concatenate([starts[live], fixed[kept, 0].astype(np.int64)]),
        np.concatenate([ends[live], fixed[kept, 1].astype(np.int64)]),
        np.concatenate([least[live], fixed[kept, 2]]),
    )
    at = int(np.argmax(usage)) if len(usage) else 0
    time = int(times[at]) if len(times) else 0
    there = np.flatnonzero((starts <= time) & (time < ends))
    order = there[np.argsort(-least[there], kind="stable")]
    return InfeasibilityExplanation(
        time=time,
        least_peak=float(usage[at]) if len(usage) else 0.0,
        limit=problem.memory_limit,
        fixed=float(fixed[(fixed[:, 0] <= time) & (time < fixed[:, 1]), 2].sum()),
        terms=tuple(
            LiveTerm(
                term=int(m), node=problem.memory[int(m)].node, least=float(least[m])
            )
            for m in order
        ),
    )
