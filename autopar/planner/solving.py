"""Makes proposals for one mesh, and prices each proposal once with the full cost model.

The *layout problem* chooses a strategy for each node of the program
(`autopar.planner.problem`). Its objective is the sum of the seconds of work and of
communication. This sum cannot express two effects that depend on the whole plan: how
much communication overlaps with work, and which arrays share a message and its latency.
So the problem is solved several times, with different prices of communication. Each
resulting plan is priced once with the full cost model, and the fastest plan is taken.
The problem is solved:

- with weights, factors on seconds that may overlap with others, at which the least cost
  is a lower bound of the step of every plan (`autopar.planner.weights`). The next
  weights are those at which the bound, estimated from the plans known so far, is
  highest (cutting planes: Kelley, J. SIAM 8, 1960);
- with communication that may overlap with work at a fraction of its seconds (`PARTLY`),
  and then at fractions close to those that gave the fastest plan;
- with messages as large as those of the fastest plan, where an array that has a
  fraction of a message's bytes costs this fraction of its latency; and with one message
  for each array;
- with the rules of plans that people write (`autopar.planner.recipes`), and with plans
  that leave an axis of the mesh idle;
- if the user requested codecs, with gradients that may be sent by codecs. The prices of
  a codec's error and of a second on the links, in seconds of the step, are those of the
  best choice of codecs so far. Each plan is then priced with its codecs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Sequence

from autopar.cost.combining import Group
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.garbage import collector_paused
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import (
    WORTHWHILE,
    Candidate,
    choices_of,
    laid_out,
    peak_of,
    price_solution,
    tie_broken,
)
from autopar.planner.codecs.choose import CodecRequest, prices_of, sent_as_asked
from autopar.planner.deadline import (
    end_text,
    is_over,
    leave_untried,
    limited_s,
    timer_for,
)
from autopar.planner.infeasible import infeasible
from autopar.planner.memory_terms import fixed_bytes
from autopar.planner.problem import (
    Formulation,
    Restriction,
    Within,
    formulate,
    small_state,
)
from autopar.planner.proposals import Proposal, record
from autopar.planner.recipes import (
    expert_rules,
    has_context,
    least_bytes,
    recipes,
    restriction_of,
)
from autopar.planner.weights import (
    HIDDEN,
    WHOLE,
    CommunicationWay,
    Messages,
    Plane,
    Weights,
    highest,
    nowhere,
    partly,
    plane_of,
    weights_of,
)
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar_solver import Solution, Status, solve

# Every problem gets at least this fraction of the whole time limit, even if the limit
# is already spent.
_LEAST_SHARE = 0.05


class Limit:
    """A limit on the CPU time that the solver spends on the problems of a mesh.

    The limit counts CPU seconds of the thread, so that other programs on the machine do
    not lead to worse plans. The time of pricing plans is not counted. It stays small,
    because only a few plans are priced for each solved problem.

    Attributes:
      seconds: the limit; None: no limit.
      spent_s: CPU seconds that solves have taken.
    """

    def __init__(self, seconds: float | None, parent: Limit | None = None) -> None:
        """Makes a limit; with a parent, time spent here also counts in the parent."""
        self.seconds, self.parent = seconds, parent
        self.spent_s = 0.0

    def spend(self, seconds: float) -> None:
        """Counts seconds as spent."""
        self.spent_s += seconds
        if self.parent is not None:
            self.parent.spend(seconds)

    @property
    def over(self) -> bool:
        """Whether the whole limit is spent, or that of the whole search."""
        spent = self.seconds is not None and self.spent_s >= self.seconds
        return spent or is_over()

    def part_s(self, share: float) -> float | None:
        """Returns a fraction of the remaining seconds; None: no limit."""
        if self.seconds is None:
            return limited_s(None)
        part_s = max(share * (self.seconds - self.spent_s), _LEAST_SHARE * self.seconds)
        return limited_s(part_s)

    def part(self, share: float) -> Limit:
        """Returns a limit of a fraction of the remaining seconds."""
        return Limit(self.part_s(share), self)


# The most times that the memory limit of the problem is lowered so that the exact peak
# of the solution fits.
_TIGHTENINGS = 5
# The search of a mesh stops after this many plans in a row that come from problems with
# memory terms and are hardly faster; only rules and codecs are then still tried. A
# problem with memory terms takes about ten times as long as one without.
_MOST_ALIKE = 2
# How many times the weights of the lower bound are changed to raise it.
_ROUNDS = 4
PARTLY = (WHOLE, partly(1.0, 0.33), partly(0.5, 0.0), partly(0.67, 0.67))
# The most problems in which gradients may be sent by codecs. Each of these problems
# uses the prices of the best choice so far.
_CODED = 2
# The amount by which `_Mesh.improve` raises or lowers one of the weights that gave the
# fastest plan, to look for a faster one.
_STEP = 0.25
# The search for a plan by an expert's rule ends once its cost exceeds both the seconds
# of the fastest plan and the least cost of the problem times this factor.
_FAR = 1.1
# The relative gap to which the solver proves least costs.
_GAP = 1e-3
# Reason that is recorded for a proposal that led to no plan.
_TOO_LARGE = "does not fit"
# The fractions of the remaining time that a problem may take. The first is for the
# first problem and for problems with codecs, the second for all others.
_FIRST_SHARE, _SHARE = 0.45, 0.2


@collector_paused()
def solve_mesh(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None = None,
    seconds: float | None = None,
    starts: Sequence[Candidate] = (),
    codecs: CodecRequest | None = None,
    weights: Sequence[Weights] | None = None,
    most_s: float = math.inf,
    experts: bool = False,
) -> Candidate:
    """Finds the best assignment on one mesh.

    Args:
      analysis: the step.
      pricer: the mesh and cluster.
      restriction: says which strategies are allowed.
      seconds: time limit of all problems of the mesh together.
      starts: known assignments.
      codecs: the user's request about codecs; None: no codecs.
      weights: the only weights at which the problem is solved. (): it is solved once,
        with messages like those of the known assignments. None: it is solved in all the
        ways that the module's docstring lists.
      most_s: seconds of a step of the best plan of other meshes; the search ends when
        no plan of this mesh can be faster.
      experts: whether to try plans that people write, if they may be faster.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: no gradient can use the requested codec.
    """
    memory = pricer.cluster.memory_bytes
    fitting = [c for c in starts if c.peak_memory_bytes <= memory]
    mesh = _Mesh(analysis, pricer, restriction, Limit(seconds), codecs, fitting)
    if weights is not None:
        for one in weights:
            mesh.solve(CommunicationWay(one))
        if not weights:
            mesh.solve(CommunicationWay(HIDDEN, mesh.messages()))
        mesh.send(seconds)
        return mesh.fastest_plan()
    try:
        mesh.raise_bound(most_s)
    except TimeOutError:
        if experts:
            mesh.ask_experts()
        if mesh.best is None:
            raise
    mesh.propose(most_s)
    if mesh.small and not mesh.is_settled(most_s):
        mesh.solve(dataclasses.replace(mesh.way, small=not mesh.way.small))
    if experts and not mesh.is_settled(most_s):
        mesh.ask_experts()
        mesh.improve(most_s)
    mesh.send(seconds)
    return mesh.fastest_plan()


class TimeOutError(PlanError):
    """The time limit ended before any plan was found."""


def has_plan(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None,
    seconds: float | None,
) -> bool:
    """Whether one problem on a mesh gives a plan that fits."""
    mesh = _Mesh(analysis, pricer, restriction, Limit(seconds), None, ())
    try:
        mesh.solve(CommunicationWay(HIDDEN))
    except PlanError:
        return False
    return True


class _Mesh:
    """The plans and bounds of a mesh after some proposals.

    Attributes:
      best: the fastest plan that fits, without codecs.
      sent: the fastest plan with codecs; None: no codecs were requested, or no codec
        can be used.
      bound_s: a lower bound of the seconds of every plan.
    """

    def __init__(
        self,
        analysis: Analysis,
        pricer: Pricer,
        restriction: Restriction | None,
        limit: Limit,
        codecs: CodecRequest | None,
        starts: Sequence[Candidate],
    ) -> None:
        """Starts with the known plans."""
        self.analysis, self.pricer, self.limit = analysis, pricer, limit
        self.restriction, self.codecs = restriction, codecs
        self.best = min(starts, key=lambda c: c.plain_s, default=None)
        self.sent: Candidate | None = None
        self._refused: PlanError | None = None
        self.bound_s = 0.0
        # The memory limit of the problem, in bytes; None while every plan has fitted,
        # so that the problem needs no memory terms.
        self.tight: float | None = None
        # How many plans in a row came from problems with memory terms and were hardly
        # faster.
        self._alike = 0
        # Seconds of a step of the fastest plan, whatever memory the plan needs.
        self.free_s = math.inf
        # Three facts about problems in which all work has weight 1: the weights and
        # messages of the problem that gave the fastest plan (`way`), the seconds of
        # this plan (`_way_s`), and the least cost of any of them (`least_s`).
        self.way = CommunicationWay(HIDDEN)
        self._way_s = self.least_s = math.inf
        self._planes: list[Plane] = []
        self._tried: set[CommunicationWay] = set()
        self._problems: dict[object, Formulation] = {}
        memory = float(pricer.cluster.memory_bytes)
        self.small = small_state(analysis.graph, analysis.contraction, memory)
        self._known: dict[object, Candidate] = {}
        for start in starts:
            self.take_sent(start)

    @property
    def hides(self) -> bool:
        """Whether communication may overlap with work."""
        return bool(self.pricer.cluster.device.corrections.overlap)

    def is_settled(self, most_s: float) -> bool:
        """Whether no plan can be faster by a fraction of `WORTHWHILE`."""
        if self.best is None:
            return False
        least_s = (1 - WORTHWHILE) * self.best.step_s
        return self.bound_s >= min(most_s, least_s)

    def out_of_time(self) -> bool:
        """Whether no further problem of the mesh may begin."""
        if is_over():
            leave_untried(f"more layouts on mesh {self.pricer.mesh.label}")
        return self.limit.over

    def felt_weights(self, weights: Weights) -> Weights:
        """Raises the weights of communication that overlaps, because it slows the work.

        Communication that overlaps with work is therefore not free.
        """
        if not self.hides:
            return WHOLE
        least = self.pricer.cluster.device.corrections.contention
        return weights.with_least(least)

    def solve(self, way: CommunicationWay) -> Candidate | None:
        """Solves the problem with one way of counting the seconds of communication.

        Returns None if it was already solved in this way, or if no time is left.

        Raises:
          PlanError: no plan was found, and no plan was known before.
        """
        if way in self._tried or (self.best is not None and self.out_of_time()):
            return None
        if self._alike >= _MOST_ALIKE and way.prices is None:
            return None
        self._tried.add(way)
        found = self.solve_way(way, self.best)
        if found is None:
            return None
        if way.bounds:
            self.bound_s = max(self.bound_s, found.solution.bound)
        plain = way.prices is None
        if plain and way.weights.works and found.step_s < self._way_s:
            self.way, self._way_s = way, found.step_s
            self.least_s = found.solution.cost
        self.take(found)
        return found

    def raise_bound(self, most_s: float) -> None:
        """Raises the lower bound of every plan's step; collects the plans found.

        Raises:
          PlanError: no plan was found, and no plan was known before.
        """
        known = self.pricer.cluster.device.corrections
        best = tried = nowhere()
        part = 0.25
        for _ in range(_ROUNDS + 1):
            before_s = self.bound_s
            if self.solve(CommunicationWay(weights_of(tried, known))) is None:
                return
            if self.bound_s > before_s:
                best, part = tried, min(1.0, 2.0 * part)
            else:
                part *= 0.5
            if not self.hides or self.is_settled(most_s):
                return
            # With few planes (`autopar.planner.weights.Plane`), the bound is estimated
            # well only near their own weights. So the first moves go only half of the
            # way to the new weights.
            goal, most_bound_s = highest(self._planes, known.overlap)
            if most_bound_s <= (1.0 + WORTHWHILE) * self.bound_s:
                return
            tried = (1.0 - part) * best + part * goal

    def propose(self, most_s: float) -> None:
        """Solves the problem with other costs of communication."""
        small = bool(self.small)
        for weights in PARTLY if self.hides else ():
            if not self.is_settled(most_s):
                self.solve(CommunicationWay(weights, small=small))
        for messages in (None, ()):
            before = None
            while before is not self.best and not self.is_settled(most_s):
                before = self.best
                known = self.messages() if messages is None else messages
                self.solve(CommunicationWay(self.way.weights, known, small))

    def messages(self) -> Messages:
        """Returns the largest message of the fastest plan, by group of devices."""
        assert self.best is not None
        found: dict[Group, float] = {}
        for one in self.best.collectives:
            group = self.pricer.group_of(one.step)
            found[group] = max(found.get(group, 0.0), one.message_bytes)
        return tuple(sorted(found.items()))

    def improve(self, most_s: float) -> None:
        """Changes the weights of communication in small steps while plans get faster.

        Does nothing unless the fastest plan came from a problem in which communication
        had a weight below 1.
        """
        assert self.best is not None
        moved = self.hides and self._way_s <= self.best.step_s
        while moved and not self.is_settled(most_s):
            before = self.way
            known = before.weights
            for gathers, sums in ((_STEP, 0), (-_STEP, 0), (0, _STEP), (0, -_STEP)):
                weights = partly(
                    min(1.0, max(0.0, known.gathers[0] + gathers)),
                    min(1.0, max(0.0, known.sums[0] + sums)),
                )
                self.solve(dataclasses.replace(before, weights=weights))
            moved = self.way != before

    def take(self, found: Candidate) -> None:
        """Adds a plan; the faster of it and the best plan stays."""
        if self.hides:
            places = self.analysis.positions
            known = self.pricer.cluster.device.corrections
            plane = plane_of(places, found.step_s, found.timelines, known)
            self._planes.append(plane)
        if self.best is None or found.step_s < self.best.step_s:
            self.best = found
        self.take_sent(found)

    def take_sent(self, found: Candidate) -> None:
        """Adds a plan with its codecs, if codecs were requested and can help."""
        least_s = found.estimate.cost.work_s
        if self.codecs is None or (self.sent and self.sent.step_s <= least_s):
            return
        try:
            coded = sent_as_asked(self.analysis, found, self.codecs)
        except PlanError as error:
            self._refused = error
            return
        if self.sent is None or coded.step_s < self.sent.step_s:
            self.sent = coded

    def send(self, seconds: float | None) -> None:
        """Makes plans in which gradients may be sent by codecs."""
        for _ in range(_CODED if self.codecs is not None else 0):
            before = self.sent
            known = before or self.best
            assert known is not None
            assert self.codecs is not None
            self.limit = Limit(seconds)
            prices = prices_of(known, self.codecs)
            weights = self.best.weights if self.best else HIDDEN
            self.solve(CommunicationWay(weights, prices=prices))
            if self.sent is before or not self.codecs.chooses:
                return

    def fastest_plan(self) -> Candidate:
        """Returns the fastest plan, with the lower bound of plans without codecs.

        Raises:
          PlanError: no plan can use the requested codec.
        """
        assert self.best is not None  # otherwise `solve` has raised an error
        if self.sent is None and self._refused is not None:
            raise self._refused
        return dataclasses.replace(
            self.sent or self.best,
            pricer=self.pricer,
            lower_s=self.bound_s,
            before_s=self.best.step_s,
            free_s=min(self.free_s, self.best.step_s),
        )

    def ask_experts(self) -> None:
        """Finds the best plan for each rule of plans that people write."""
        axes, context = len(self.pricer.mesh.axes), has_context(self.analysis)
        # The most specific rules come first, because the time may not suffice for all.
        rules = [
            *expert_rules(self.analysis, axes),
            *(
                (recipe.name, restriction_of(self.analysis, recipe, self.pricer))
                for recipe in recipes(axes, context=context)
            ),
        ]
        if axes > 1:
            rules += [
                (f"axis {axis} idle", functools.partial(_leaves_idle, axis))
                for axis in range(axes)
            ]
        way = dataclasses.replace(self.way, messages=None)
        for name, inner in (("nothing split", _splits_nothing), *rules):
            if self.out_of_time():
                return
            # The user's pins also hold for plans of experts.
            rule = Within(self.restriction, inner)
            least = least_bytes(self.analysis, rule, self.pricer)
            if least > self.pricer.cluster.memory_bytes:
                self.record(f"rule: {name}", None, _TOO_LARGE)
                continue
            with contextlib.suppress(PlanError):
                found = self.solve_way(way, None, inner, name)
                if found is not None:
                    self.take(found)

    @property
    def far_s(self) -> float:
        """The cost, in seconds, above which plans by an expert's rule are skipped."""
        known = self.best.step_s if self.best is not None else math.inf
        return max(_FAR * self.least_s, known)

    def solve_way(
        self,
        way: CommunicationWay,
        start: Candidate | None,
        inner: Restriction | None = None,
        name: str = "",
    ) -> Candidate | None:
        """Returns the best plan of the problem for one way of counting communication.

        Memory terms make a problem hard to solve. So the problem is first solved
        without them. They are added only if the resulting plan does not fit but is
        faster than the best plan: memory terms cannot lower the least cost.

        Args:
          way: how the problem counts communication: weights, messages and prices.
          start: a known plan.
          inner: a rule that says which strategies are allowed.
          name: name of the rule.

        Returns:
          The plan; None if the solver found no plan that fits and another plan is
          known.

        Raises:
          PlanError: no plan was found, and no plan was known before.
        """
        fixed = fixed_bytes(self.analysis, self.pricer)
        memory = float(self.pricer.cluster.memory_bytes)
        tight = None
        first = self.best is None or way.prices is not None
        part = _FIRST_SHARE if first else _SHARE
        left = _TIGHTENINGS
        proposer = f"rule: {name}" if name else way.name
        begin = time.thread_time()
        # The fastest plan so far, with gradients summed over devices in each
        # microbatch.
        each: Candidate | None = None
        while True:
            # Each problem is formulated only once with memory terms and once without.
            key = tight is not None, way.messages, way.prices, way.small
            known, weights = self._problems.get(key), self.felt_weights(way.weights)
            whole = self._problems.get((*key[:3], False))
            if known is None and whole is not None:
                known = whole.within(self.analysis, None, self.small)
                self._problems[key] = known
            elif known is None:
                pricer = dataclasses.replace(self.pricer, messages=way.messages)
                known = formulate(
                    self.analysis,
                    pricer,
                    self.restriction,
                    tight,
                    way.prices,
                    weights,
                    self.small if way.small else frozenset(),
                    self._problems.get((key[0], None, None, way.small)),
                )
                # Every plan's step is predicted with the full cost model, whatever
                # problem gave it.
                known = dataclasses.replace(known, pricer=self.pricer)
                self._problems[key] = known
            formulation = known.at(weights).with_limit(tight)
            if inner is not None:
                formulation = formulation.within(self.analysis, Within(None, inner))
            choices = None
            if start is not None:
                choices = choices_of(formulation, start.assignment)
            limit_s = self.limit.part_s(part)
            solution = solve(
                formulation.problem,
                seconds=limit_s,
                gap=_GAP,
                warm_start=choices,
                below=math.inf if inner is None else self.far_s,
                timer=timer_for(limit_s),
            )
            self.limit.spend(solution.seconds)
            if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
                break
            found = self.judge_solution((key, inner), formulation, solution)
            plain_s, peak_bytes = found.step_s, found.peak_memory_bytes
            if peak_bytes > memory:
                each = _faster(each, self.summed_each_microbatch(found))
            # A problem whose sums are postponed to the end of all microbatches is
            # solved further only if postponing saves time.
            if each is not None and each.step_s <= (1 + WORTHWHILE) * plain_s:
                found = each
            if found.peak_memory_bytes <= memory:
                found = _faster(found, each) or found
                if tight is None:
                    self.free_s = min(self.free_s, plain_s)
                elif inner is None and self.best is not None:
                    least_s = (1 - WORTHWHILE) * self.best.step_s
                    self._alike = 0 if found.step_s < least_s else self._alike + 1
                self.record(proposer, found, "", time.thread_time() - begin)
                return dataclasses.replace(found, weights=way.weights)
            over = (memory - fixed) / (peak_bytes - fixed)
            if tight is not None:
                tight *= 0.995 * over
            else:
                self.free_s = min(self.free_s, found.step_s)
                best_s = self.best.step_s if self.best else math.inf
                if way.prices is None and found.step_s >= best_s:
                    self.record(proposer, None, "no faster", time.thread_time() - begin)
                    return None
                tight = memory - fixed
                if inner is None and self.tight is not None:
                    tight = self.tight
            if inner is None:
                self.tight = tight
            left -= 1
            if left < 0 or (self.best is not None and self.limit.over):
                break
        if each is not None:
            self.record(proposer, each, "", time.thread_time() - begin)
            return dataclasses.replace(each, weights=way.weights)
        late = solution.status is Status.UNKNOWN
        note = "none is faster" if name and late else "out of time" if late else ""
        note = note or (_TOO_LARGE if tight is not None else "not possible")
        self.record(proposer, None, note, time.thread_time() - begin)
        if self.best is not None:
            return None
        raise _failure(self, formulation, solution.status, tight)

    def summed_each_microbatch(self, found: Candidate) -> Candidate | None:
        """Returns a plan's layouts with gradients summed in each microbatch.

        The result is None if the plan does not fit.

        If gradients are summed over devices in each microbatch, each device stores only
        its shard of the sum. If the sum is postponed, every device stores a gradient of
        full size. If the user requested codecs, sums must be postponed, because codecs
        send only postponed sums.
        """
        own = found.assignment
        if self.analysis.microbatches == 1:
            return None
        if self.codecs is not None and not self.codecs.chooses:
            return None
        if not any(held.deferral.gradients for held in own.stackings.values()):
            return None
        layouts = dataclasses.replace(own, sums_each_microbatch=True)
        peak_bytes = peak_of(layouts, self.pricer)
        if peak_bytes > self.pricer.cluster.memory_bytes:
            return None
        priced = price_solution(found.formulation, found.solution, layouts, peak_bytes)
        return dataclasses.replace(priced, formulation=found.formulation)

    def record(
        self, proposer: str, found: Candidate | None, note: str, cpu_s: float = 0.0
    ) -> None:
        """Records a proposal, if proposals are recorded."""
        made = (found.step_s, found.peak_memory_bytes) if found else (None, 0.0)
        label = self.pricer.mesh.label
        record(Proposal(proposer, label, *made, note=note, cpu_s=cpu_s))

    def judge_solution(
        self, kind: object, formulation: Formulation, solution: Solution
    ) -> Candidate:
        """Prices the plan of a solution; a known plan is not priced again.

        Args:
          kind: key of the formulation; in formulations with equal keys, equal choices
            have the same meaning.
          formulation: the problem.
          solution: its solution.
        """
        key = kind, solution.choices
        known = self._known.get(key)
        if known is None:
            fitted, layouts, peak_bytes = laid_out(self.analysis, formulation, solution)
            same = layouts.strategies, frozenset(layouts.copies.items())
            known = self._known.get(same)
            if known is None:
                known = price_solution(formulation, fitted, layouts, peak_bytes)
                if peak_bytes <= self.pricer.cluster.memory_bytes:
                    known = tie_broken(self.analysis, known)
            known = dataclasses.replace(known, solution=fitted)
            self._known[key] = self._known[same] = known
        # The bound is that of this problem. The choices are those of the known plan:
        # there, arrays that cost nothing to split have been split already.
        solution = dataclasses.replace(solution, choices=known.solution.choices)
        return dataclasses.replace(known, formulation=formulation, solution=solution)


def _faster(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    """Returns the faster of two plans, each of which may be None."""
    if one is None or other is None:
        return one or other
    return other if other.step_s < one.step_s else one


def _splits_nothing(node: Node, strategy: Strategy) -> bool:
    del node
    return not any(strategy)


def _leaves_idle(axis: int, node: Node, strategy: Strategy) -> bool:
    del node
    return all(axis not in axes for axes in strategy)


def _failure(
    mesh: _Mesh, formulation: Formulation, status: Status, tight: float | None
) -> PlanError:
    """Returns the error if the solver found no plan that fits."""
    label = mesh.pricer.mesh.label
    if status is Status.UNKNOWN:
        ended = end_text()
        seconds = mesh.limit.seconds
        within = f"{ended}" if ended or seconds is None else f"{seconds:g} s"
        return TimeOutError(
            f"no plan found on mesh {label} within {within}. Give the solver more time "
            f"with {'planning_seconds=' if ended else 'seconds='}."
        )
    if tight is None:
        return PlanError(
            f"no plan found on mesh {label}: no choice of layouts is possible."
        )
    failure = infeasible(mesh.analysis, mesh.pricer, formulation)
    failure.free_s = mesh.free_s if math.isfinite(mesh.free_s) else 0.0
    return failure
