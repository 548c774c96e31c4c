"""The best plan on one mesh, in a limited time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

from autopar.cost.codecs.matrix import Prices
from autopar.cost.overlap import discounts
from autopar.cost.pricer import Pricer
from autopar.cost.reassociation import alone_s
from autopar.errors import PlanError
from autopar.garbage import collector_paused
from autopar.planner.candidate import (
    WORTHWHILE,
    Candidate,
    choices_of,
    priced,
    solved_again,
)
from autopar.planner.fewer_messages import with_fewer_messages
from autopar.planner.hiding import PROVED, Plane, Weights, best_weights, plane_of
from autopar.planner.infeasible import infeasible
from autopar.planner.limit import Limit
from autopar.planner.memory_terms import fixed_bytes
from autopar.planner.problem import Formulation, Restriction, Within, formulate
from autopar.planner.recipes import least_bytes, recipes, restriction_of
from autopar.planner.ties import laid_out, tie_broken
from autopar.steps.analysis import Analysis
from autopar_solver import Status, solve

# How often the memory limit is tightened until the exact peak fits.
_TIGHTENINGS = 5
# Problems solved for one mesh to find the weights of what is hidden.
_ROUNDS = 5
# Part of a step that its messages must expose for plans of experts to be made for it.
EXPOSED = 0.02
# Parts of the time that is left: of one problem, and of one plan by an expert's rule.
_PROBLEM_SHARE, _EXPERT_SHARE = 0.45, 0.15


@collector_paused()
def solve_mesh(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None = None,
    seconds: float | None = None,
    starts: Sequence[Candidate] = (),
    prices: Prices | None = None,
    weights: Weights | None = None,
    most_s: float = math.inf,
    experts: bool = False,
) -> Candidate:
    """Finds the best assignment on one mesh.

    Where communication runs beside work, the problem is solved at some weights of
    what is hidden, then at better ones (`autopar.planner.hiding`). Where a plan may be
    faster by more than `WORTHWHILE` then, the plans that people write are made too: the
    search goes on from the best of them.

    The problem of the layouts holds what bytes take; a message that collectives
    share has a latency besides, which is paid once for its group, whoever sends in
    it. So the problem is solved first as if latencies were free, then without each
    of the groups that were used, and so on, as long as that may pay
    (`autopar.planner.fewer_messages`).
    The gap is that to the lowest bound of what was left.

    With ``prices`` it is solved once, for codecs have messages of their own.

    Args:
      analysis: the step.
      pricer: the mesh and cluster.
      restriction: says which strategies are allowed.
      seconds: time limit of all problems of the mesh.
      starts: assignments known already.
      prices: with them gradients may be sent by codecs.
      weights: of what is hidden; None: they are found.
      most_s: seconds of the best plan of other meshes; no more is proved of this mesh
        than that it has none that is faster.
      experts: whether plans that people write are made where they may be faster.

    Raises:
      InfeasibleError: nothing fits the memory of a device.
    """
    memory = pricer.cluster.memory_bytes
    fitting = [c for c in starts if c.peak_memory_bytes <= memory]
    start = min(fitting, key=lambda c: c.step_s, default=None)
    task = _Task(analysis, restriction, Limit(seconds), prices)
    if prices is not None or weights is not None:
        found = _solved(task, pricer, start, weights or {}, None) or start
        assert found is not None
        best = found if start is None else min(found, start, key=lambda c: c.step_s)
        return dataclasses.replace(best, pricer=pricer)
    return _on_mesh(task, pricer, start, most_s=most_s, experts=experts)


def _on_mesh(
    task: _Task,
    pricer: Pricer,
    start: Candidate | None,
    *,
    most_s: float,
    memory_limit: float | None = None,
    experts: bool = False,
) -> Candidate:
    """`solve_mesh` where nothing but the layouts is chosen.

    Args:
      task: the step.
      pricer: the mesh and cluster.
      start: a plan that is known.
      most_s: seconds of the best plan of other meshes.
      memory_limit: bytes that terms of memory may use from the first problem on;
        None: problems have such terms where the fastest plan does not fit.
      experts: whether plans that people write are made where they may be faster.
    """
    rounds = _Rounds(task, pricer, start, memory_limit)
    rounds.begin(experts=experts)
    _go_on(rounds, most_s, experts and not rounds.asked)
    if not rounds.proved(most_s, WORTHWHILE):
        rounds.charge_whole()
    best, first = rounds.best, rounds.last
    assert best is not None  # where none was found an error was raised
    if rounds.weighted or start is not None:
        best = dataclasses.replace(best, weights=rounds.weights, lower_s=rounds.bound_s)
    if first is not None and rounds.bound_s < most_s:
        first = dataclasses.replace(first, lower_s=rounds.bound_s)
        best = with_fewer_messages(
            lambda fewer: _without(task, fewer, rounds), task.limit, first, best
        )
    return dataclasses.replace(best, pricer=pricer)


def _without(task: _Task, pricer: Pricer, rounds: _Rounds) -> Candidate:
    """The best plan without some groups of messages, solved as the last problem was.

    Raises:
      PlanError: there is none, or none was found.
    """
    assert rounds.last is not None
    tight = rounds.last.formulation.problem.memory_limit
    found = _solved(task, pricer, None, rounds.weights, tight)
    assert found is not None  # without a start there is one, or an error
    return found


class TimeOutError(PlanError):
    """Time ran out before any plan was found."""


class _SlowerError(PlanError):
    """No plan is as fast as one that is known."""


def has_plan(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None,
    seconds: float | None,
) -> bool:
    """Whether a plan that fits is found on a mesh in one problem."""
    task = _Task(analysis, restriction, Limit(seconds))
    try:
        _solved(task, pricer, None, None, None)
    except PlanError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What stays the same in all problems of a mesh.

    Attributes:
      analysis: the step.
      restriction: says which strategies are allowed.
      limit: of time, of all problems.
      prices: with them gradients may be sent by codecs.
      below_s: plans that take as long are of no use; they are not priced.
    """

    analysis: Analysis
    restriction: Restriction | None
    limit: Limit
    prices: Prices | None = None
    below_s: float = math.inf


class _Rounds:
    """What is known of a mesh after some problems.

    Attributes:
      best: the fastest plan.
      last: the solution of the last problem; None: it gave no plan that fits.
      weights: of what is hidden, in that problem.
      bound_s: the highest bound of all problems.
      planes: of the plans known.
      memory_limit: that of the last problem.
      problems: number of problems solved.
      weighted: whether communication may be hidden.
      asked: whether plans that people write are among those known.
      began: the plan that the last problem was begun with.
    """

    def __init__(
        self,
        task: _Task,
        pricer: Pricer,
        start: Candidate | None,
        memory_limit: float | None,
    ) -> None:
        """Knows a plan at most."""
        self.task, self.pricer = task, pricer
        self.weighted = bool(pricer.cluster.device.calibrated.overlap)
        self.asked = False
        self.best = self.began = start
        self.last: Candidate | None = None
        self.weights: Weights | None = None
        self.bound_s = 0.0
        self.planes: list[Plane] = []
        self.memory_limit = memory_limit
        self.problems = 0
        if start is not None:
            self.take(start)

    def take(self, found: Candidate) -> None:
        """Adds a plan."""
        if self.weighted:
            known = self.pricer.cluster.device.calibrated
            plane = plane_of(found.step_s, found.timelines, known)
            self.planes.append(plane)
        if self.best is None or found.step_s < self.best.step_s:
            self.best = found

    @property
    def certain(self) -> bool:
        """Whether the last problem was solved to its end."""
        return self.last is not None and self.last.solution.status is Status.OPTIMAL

    def proved(self, most_s: float, part: float = PROVED) -> bool:
        """Whether no plan is faster than the best by a part, or than ``most_s``.

        But for what messages expose because arrays share them, which no problem holds.
        """
        assert self.best is not None
        return self.bound_s >= min(most_s, (1 - part) * self.best.alone_s)

    def sure(self, most_s: float) -> bool:
        """Whether no plan is faster by what is worth the time, messages included.

        Plans that people write may expose less of their messages than the best plan of
        a problem, which does not hold them.
        """
        assert self.best is not None
        least_s = (1 - EXPOSED) * self.best.step_s
        return self.proved(most_s, WORTHWHILE) and self.bound_s >= min(most_s, least_s)

    def go_on(self) -> bool:
        """Solves at the best weights; False where that would be the same again.

        A problem that time ended is the same from the same plan: it has less time now.
        """
        weights = self.best_weights()
        settled = self.certain or self.began is self.best
        if self.task.limit.over or (weights == self.weights and settled):
            return False
        self.solve(weights)
        return True

    def best_weights(self) -> Weights | None:
        """The weights at which the plans known so far are bounded best."""
        if not self.weighted:
            return None
        known = self.pricer.cluster.device.calibrated
        return best_weights(self.planes, known) if self.planes else {}

    def begin(self, *, experts: bool) -> None:
        """Solves the first problem.

        Raises:
          PlanError: no plan was found, and none was known.
        """
        try:
            self.solve(self.best_weights())
        except TimeOutError:
            if not experts:
                raise
            self.ask_experts()
            if self.best is None:
                self.solve(self.best_weights())

    def solve(self, weights: Weights | None) -> None:
        """Solves one problem.

        Raises:
          PlanError: no plan was found, and none was known.
        """
        self.weights, self.began = weights, self.best
        before = self.last.formulation if self.last is not None else None
        self.last = _solved(
            self.task, self.pricer, self.best, weights, self.memory_limit, before
        )
        self.problems += 1
        if self.last is not None:
            self.memory_limit = self.last.formulation.problem.memory_limit
            self.bound_s = max(self.bound_s, self.last.bound_s)
            self.take(self.last)

    def charge_whole(self) -> None:
        """Solves again if the last solution pays too little for sums.

        The problem charges sums that may be one a part each. Where a solution makes
        one of them and not the others, they are charged whole. That bounds no plan.
        """
        if self.last is None or self.task.limit.over:
            return
        missing = alone_s(self.last.assignment, self.pricer)
        if sum(missing.values()) < WORTHWHILE * self.last.step_s:
            return
        pricer = dataclasses.replace(self.pricer, alone=frozenset(missing))
        with contextlib.suppress(PlanError):
            found = _solved(
                self.task, pricer, self.best, self.weights, self.memory_limit
            )
            if found is not None:
                self.take(dataclasses.replace(found, pricer=self.pricer))

    def ask_experts(self) -> None:
        """Makes the plans that people write; those that shard parameters first."""
        self.asked = True
        analysis, limit = self.task.analysis, self.task.limit
        rules = recipes(len(self.pricer.mesh.axes))
        share = _EXPERT_SHARE
        for recipe in sorted(rules, key=lambda r: not r.shard_parameters):
            if limit.over and self.best is not None:
                return
            # What the user pinned holds for the plans of experts, too.
            rule = Within(
                self.task.restriction, restriction_of(analysis, recipe, self.pricer)
            )
            least = least_bytes(analysis, rule, self.pricer)
            if least > self.pricer.cluster.memory_bytes:
                continue
            best_s = self.best.step_s if self.best else math.inf
            part = limit.part(share)
            task = _Task(analysis, rule, part, below_s=best_s)
            try:
                found = _on_mesh(
                    task,
                    self.pricer,
                    None,
                    most_s=best_s,
                    # What shards parameters mostly fits, and is found sooner without
                    # terms of memory.
                    memory_limit=None if recipe.shard_parameters else self.memory_limit,
                )
            except TimeOutError:  # a few plans are worth more than none of many
                share = min(2 * share, _PROBLEM_SHARE)
            except PlanError:
                continue
            else:
                self.take(found)


def _go_on(rounds: _Rounds, most_s: float, experts: bool) -> None:
    """Solves at better weights, from better plans, until the best plan is proved.

    The plans of experts are asked for where they may be worth their time.
    """
    while rounds.problems < _ROUNDS and not rounds.proved(most_s):
        if experts and (rounds.problems == 2 or not rounds.certain):
            experts = False
            if not rounds.sure(most_s):
                rounds.ask_experts()
        if not rounds.go_on():
            break
    if experts and not rounds.sure(most_s):
        rounds.ask_experts()
        rounds.go_on()


def _solved(
    task: _Task,
    pricer: Pricer,
    start: Candidate | None,
    weights: Weights | None,
    tightened: float | None,
    known_terms: Formulation | None = None,
) -> Candidate | None:
    """The best assignment, but for the latencies of shared messages.

    Memory terms enter only where the fastest assignment does not fit without.

    Args:
      task: the step.
      pricer: the mesh and cluster.
      start: an assignment that is known.
      weights: of what is hidden; None: work and communication are added.
      tightened: bytes that terms of memory may use; None: no terms at first.
      known_terms: a problem of the same mesh, whose terms of memory may be the same.

    Returns:
      None where the solver found none that fits, and one is known.
    """
    known = pricer.cluster.device.calibrated
    lowered = None
    if weights is not None and known.overlap:
        lowered = discounts(
            task.analysis,
            weights,
            known.overlap,
            known.contention,
            whole=known.whole_messages,
        )
    fixed = fixed_bytes(task.analysis, pricer)
    memory = float(pricer.cluster.memory_bytes)
    formulation = known_terms
    status = Status.UNKNOWN
    for _ in range(_TIGHTENINGS + 1):
        formulation = formulate(
            task.analysis,
            pricer,
            task.restriction,
            tightened,
            task.prices,
            lowered,
            like=formulation,
        )
        choices = None if start is None else choices_of(formulation, start.assignment)
        seconds = task.limit.part_s(_PROBLEM_SHARE)
        solution = solve(
            formulation.problem,
            seconds=seconds,
            warm_start=choices,
            timer=time.thread_time,
        )
        task.limit.spend(solution.seconds)
        status = solution.status
        if status in (Status.INFEASIBLE, Status.UNKNOWN):
            break
        if solution.bound >= task.below_s:
            raise _SlowerError(f"no plan on mesh {pricer.mesh.label} is as fast.")
        found = solved_again(task.analysis, formulation, solution, start)
        if found is not None:
            found = dataclasses.replace(found, weights=weights)
            return tie_broken(task.analysis, found)
        solution, layouts, peak_bytes = laid_out(task.analysis, formulation, solution)
        if peak_bytes <= memory:
            found = priced(formulation, solution, layouts, peak_bytes)
            found = dataclasses.replace(found, weights=weights)
            return tie_broken(task.analysis, found)
        over = (memory - fixed) / (peak_bytes - fixed)
        tightened = memory - fixed if tightened is None else 0.995 * tightened * over
        if start is not None and task.limit.over:
            break
    if start is not None:
        return None
    raise _failed(task, pricer, formulation, status, tightened)


def _failed(
    task: _Task,
    pricer: Pricer,
    formulation: Formulation | None,
    status: Status,
    tightened: float | None,
) -> PlanError:
    """The error where the solver found no plan that fits."""
    if status is Status.UNKNOWN:
        return TimeOutError(
            f"no plan found on mesh {pricer.mesh.label} within "
            f"{task.limit.seconds:g} s. Give the solver more time with seconds=."
        )
    if tightened is None or formulation is None:
        return PlanError(
            f"no plan found on mesh {pricer.mesh.label}: no choice of layouts is "
            "possible."
        )
    if math.isfinite(task.below_s):  # a plan is known, and nobody reads why
        return _SlowerError(f"no other plan on mesh {pricer.mesh.label} fits.")
    return infeasible(task.analysis, pricer, formulation)
