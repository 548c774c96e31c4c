"""Rewrites a step to candidate programs, plans each one, and keeps the fastest plan.

Here a program is the step with a certain number of microbatches and of rematerialised
layers. Each program is first planned quickly: the solver solves one problem on each
mesh. The programs with the fastest quick plans are then planned in full.
`autopar.planner.deciding` proposes the programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.codecs.gathers import gathers_of, why_none
from autopar.planner.deadline import is_over, keep_plan, stop_if_over
from autopar.planner.infeasible import size_text
from autopar.planner.options import PlanOptions, decide_open, layers_asked, of_one_stage
from autopar.planner.proposals import Proposal, of_program, record
from autopar.planner.record import as_planned, assignment_of
from autopar.planner.scheme import GATHERED, RING
from autopar.planner.search import plan_mesh
from autopar.planner.solving import HIDDEN, TimeOutError, solve_mesh
from autopar.plans import AS_WRITTEN, Plan, Rematerialisation
from autopar.progress import LOGGER, say
from autopar.steps.analysis import Analysis
from autopar.steps.for_devices import (
    for_devices,
    why_logits_are_kept,
    why_scores_are_kept,
)
from autopar.steps.nodes import Node
from autopar.steps.offload import keep_on_host
from autopar.steps.remat import layer_starts, rematerialise
from autopar_passes.graph.roles import InputRole
from autopar_passes.remat.copies import KERNELS


def remat_wanted(analysis: Analysis, options: PlanOptions) -> Rematerialisation:
    """Returns the rematerialisation that the options ask for.

    For ``auto`` it is the rematerialisation that the step itself contains.

    Args:
      analysis: the step.
      options: the options, including a number of microbatches.

    Raises:
      PlanError: the step has fewer layers, or none that can be rematerialised.
    """
    if options.remat in (None, "auto"):
        return AS_WRITTEN
    if options.remat == "none":
        return Rematerialisation(checkpoints=False)
    count, level = layers_asked(options.remat)
    if count == 0:
        return Rematerialisation(level=level) if level == KERNELS else AS_WRITTEN
    couple = options.coupled == "microbatch"
    starts = layer_starts(analysis, options.count, couple=couple)
    if count is not None and count > len(starts):
        raise PlanError(
            f"remat={options.remat!r}: the step has {len(starts)} layers. Give fewer, "
            "or 'all'."
        )
    layers = range(len(starts) if count is None else count)
    return Rematerialisation(layers=tuple(layers), starts=starts, level=level)


def as_asked(
    analysis: Analysis,
    options: PlanOptions,
    devices: int = 1,
    offload: Sequence[str] = (),
) -> Analysis:
    """The step with the microbatches and the rematerialised layers of the options.

    Equal matrix products of the optimizer update are computed together, in batches
    whose size suits ``devices`` devices. The state of the paths ``offload`` is in host
    memory.

    Raises:
      PlanError: the step cannot be split or rewritten in this way.
    """
    made = rematerialise(
        analysis,
        remat_wanted(analysis, options),
        options.count,
        couple=options.coupled == "microbatch",
    )
    return for_devices(keep_on_host(made, offload), devices)


# Time limit of the solver for the layouts of rematerialised operators, in seconds.
_MOST_S = 5.0


def price_in_layouts(
    plan: Plan, planned: Analysis, other: Analysis, cluster: Cluster
) -> Candidate:
    """Prices the step with other rematerialised layers, in the layouts of a plan.

    Operators that are in both steps keep their layouts. The solver chooses the layouts
    of all other operators in one problem. So the result is a valid plan of the other
    step, and the best plan of that step is at least as fast.

    Args:
      plan: a plan of one stage.
      planned: the step that ``plan`` was made for.
      other: the same step with other rematerialised layers.
      cluster: the devices for which the step is priced; their memory is taken to be
        unlimited.

    Raises:
      PlanError: the cluster has no such mesh, or the solver found nothing in time.
    """
    mesh = plan_mesh(cluster, plan.axis_names, plan.axis_sizes)
    pricer = Pricer(cluster, mesh, gathers=gathers_of(plan))
    kept = _kept_strategies(plan, planned, other)

    def same(node: Node, strategy: Strategy) -> bool:
        return strategy == kept.get(node.index, strategy)

    return solve_mesh(other, pricer, same, _MOST_S, weights=(HIDDEN,))


def _kept_strategies(
    plan: Plan, planned: Analysis, other: Analysis
) -> dict[int, Strategy]:
    """Node of the other step -> the plan's strategy, for nodes that both steps have.

    Nodes are matched by the numbers of their values, which stay the same when layers
    are rematerialised. Values that the rewrite for devices adds have other numbers.
    """
    strategies = assignment_of(planned, plan).strategies
    added = min(len((x.alone or x).program.values) for x in (planned, other))
    nodes, node_of = planned.contraction.nodes, planned.contraction.node_of
    known = {
        op.outputs[0]: node_of[op.class_index]
        for op in planned.graph.operators
        if op.outputs and op.class_index in node_of
    }
    out: dict[int, Strategy] = {}
    for op in other.graph.operators:
        number = other.contraction.node_of.get(op.class_index)
        if number is None or not op.outputs or op.outputs[0] not in known:
            continue
        if op.outputs[0] >= added:
            continue
        before, node = known[op.outputs[0]], other.contraction.nodes[number]
        if node.factors == nodes[before].factors:
            out.setdefault(node.index, strategies[before])
    return out


class Planned(NamedTuple):
    """A plan, and further results of its search.

    Attributes:
      plan: the fastest plan.
      slowed: the factor by which the memory limit makes a step slower: its seconds
        divided by those of the best plan for unlimited memory.
      near: the meshes on which a plan is nearly as fast.
    """

    plan: Plan
    slowed: float
    near: tuple[MeshShape, ...] = ()


class Planner(Protocol):
    """Plans the layouts of a step of one stage."""

    def __call__(
        self,
        program: Analysis,
        on: Cluster,
        asked: PlanOptions,
        untried: Sequence[str] | None = None,
        *,
        quick: bool = False,
        most_s: float = math.inf,
        meshes: Sequence[MeshShape] = (),
    ) -> Planned:
        """Finds the best layouts of a step.

        Args:
          program: the step, rewritten as the options say.
          on: the cluster.
          asked: options that decide everything except layouts and codecs.
          untried: options that may help if no plan fits. The error then names them,
            and a memory size that is enough. None: the error names neither.
          quick: whether to solve only one problem on each mesh, for an estimate of the
            step time.
          most_s: seconds of a step under a known plan; the search ends when no plan can
            be faster.
          meshes: the meshes to try; empty: all meshes.
        """
        ...


# The memory limit is assumed not to slow a plan that needs less than this fraction of a
# device's memory.
EASY = 0.5
# Two plans count as equally fast if their step times differ by less than this fraction.
# It is the relative gap to which the solver proves optimality.
GAP = 0.005
# Time limit of the solver on a mesh for a program that is planned quickly, in seconds.
_QUICK_S = 2.0
# The most programs that are planned in full, and the fraction by which the quick plans
# of these programs may be slower than the fastest quick plan.
_REFINED, NEAR = 3, 0.03
# Two programs whose step times differ by less than this fraction count as equally fast.
# Of them, the program that changes the user's step less is preferred.
_TOLD = 1e-3
# The number of analyses of programs that are cached.
_PROGRAMS = 4
# Bytes of a device with practically unlimited memory.
_UNLIMITED = 10**18


# Name of a proposal -> the error that says why none of its plans fits.
Unfit = dict[str, InfeasibleError]


class Programs:
    """The proposed plans, and the fastest plan that fits."""

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        options: PlanOptions,
        plan: Planner,
        codecs: CodecRequest,
        unfit: Unfit | None = None,
        offload: Sequence[str] = (),
    ) -> None:
        """Starts without any plan; for the arguments see `autopar.planner.deciding`.

        The state of the paths ``offload`` is in host memory.
        """
        self.offload = tuple(offload)
        self.analysis, self.cluster = analysis, cluster
        self.options = decide_open(options)
        self.said, self.plan, self.codecs = options, plan, codecs
        self.best: Plan | None = None
        self.plans: dict[str, Plan] = {}
        self.unfit: Unfit = {} if unfit is None else unfit
        self.errors: dict[str, PlanError] = dict(self.unfit)
        # Proposal that was not tried -> the reason.
        self.left_out: dict[str, str] = {}
        self.programs: dict[str, PlanOptions] = {}
        # The analyses of programs that were made last.
        self.analyses: dict[str, Analysis] = {}
        # Seconds of a step of a program (the second name) in the layouts of the plan of
        # another program (the first name).
        self.seconds: dict[tuple[str, str], float] = {}
        # Programs that were planned only quickly.
        self.quick: set[str] = set()
        # Program -> the factor by which the memory limit slows its plan
        # (`Planned.slowed`).
        self.slowed: dict[str, float] = {}
        # Number of microbatches -> the fastest meshes of the last program with this
        # number that fits.
        self.near: dict[int, tuple[MeshShape, ...]] = {}
        self.begin_s = time.thread_time()

    def judge(self, name: str, make: Callable[[], Plan | None], gain: float) -> None:
        """Finds the plan of a proposal, and keeps the plan if it is the fastest so far.

        Args:
          name: name of the proposal.
          make: finds the plan of the proposal. It returns None if the proposal has no
            plan as fast as the best plan so far.
          gain: the plan is kept only if it shortens the step by at least this fraction.
        """
        if name in self.plans or name in self.errors:
            return
        stop_if_over(name)
        begin = time.thread_time()
        try:
            found = make()
        # If the solver found no plan in time, the program counts as too large.
        except TimeOutError as error:
            self.errors[name] = self.unfit[name] = InfeasibleError(str(error))
            found = None
        except PlanError as error:
            self.errors[name] = error
            if isinstance(error, InfeasibleError):
                self.unfit[name] = error
            found = None
        if found is not None:
            self.plans[name] = found
            self.keep(found, gain)
        if name not in self.programs:
            _record(name, found, self.errors.get(name), time.thread_time() - begin)

    def keep(self, plan: Plan, gain: float = 0.0) -> None:
        """Keeps a plan if it is faster than the best plan so far.

        Of equally fast plans, keeps the plan that changes the user's step less.
        """
        best = self.best
        keep_plan()
        if best is not None:
            more, less = _changes(plan), _changes(best)
            gain += _TOLD * ((more > less) - (more < less))
        if plan.predicted.step_s < self.most_s(gain):
            self.best = plan

    def most_s(self, gain: float = 0.0) -> float:
        """Returns the seconds of a step below which a plan is kept."""
        best = self.best
        return math.inf if best is None else (1 - gain) * best.predicted.step_s

    def leave_out(self, what: str, why: str) -> None:
        """Records that a proposal is not tried, with the reason."""
        # The next work may take minutes, and the newest message is shown meanwhile.
        LOGGER.info("%s: %s", what, why)
        say(f"not tried: {what}")
        self.left_out[what] = why
        record(Proposal(what, "", note=f"not tried: {why}"))

    def rewritten(self, count: int, remat: str) -> PlanOptions:
        """The options of a plan of one stage with microbatches and rematerialised
        layers.
        """
        asked = self.options
        said = asked.remat if asked.remat != "auto" else remat or None
        return of_one_stage(asked, schedule=None, microbatches=count, remat=said)

    def program(self, name: str) -> Analysis:
        """Returns the step, rewritten as a program's options say; see `as_asked`."""
        found = self.analyses.pop(name, None)
        if found is None:
            found = as_asked(
                self.analysis,
                self.programs[name],
                self.cluster.num_devices,
                self.offload,
            )
        self.analyses[name] = found
        for old in list(self.analyses)[:-_PROGRAMS]:
            del self.analyses[old]
        return found

    def fits_in(self, count: int, remat: str = "") -> bool:
        """Whether a plan with these microbatches and rematerialised layers fits.

        Programs that differ only in the rematerialised layers tend to be fastest on the
        same meshes. Once one program with this number of microbatches fits, the others
        are tried only on the meshes on which it was fastest.

        Raises:
          PlanError: the user's step cannot be planned without a change.
        """
        name = program_name(count, remat)
        options = self.programs.setdefault(name, self.rewritten(count, remat))
        quick = bool(self.plans or self.errors)
        if quick and name not in self.plans and self.codecs.mode == "none":
            self.quick.add(name)
            limit_s = min(options.seconds or _QUICK_S, _QUICK_S)
            options = dataclasses.replace(options, seconds=limit_s)

        def find() -> Plan:
            with of_program(name):
                program = self.program(name)
                meshes = self.near.get(count, ()) if quick else ()
                found = self.plan(
                    program, self.cluster, options, quick=quick, meshes=meshes
                )
            self.slowed[name], self.near[count] = found.slowed, found.near
            return found.plan

        self.judge(name, find, 0.0)
        error = self.errors.get(name)
        if error is not None and not isinstance(error, InfeasibleError):
            raise error
        return name in self.plans

    def refine(self) -> None:
        """Plans the fastest of the quickly planned programs in full.

        A program is skipped if the lower bound of its step time is not below the step
        time of the best plan. A program is also skipped if it would have to become
        faster by a larger fraction than the programs that were already planned in full.
        """
        gain = GAP
        near_s = (1 + NEAR) * self.best.predicted.step_s if self.best else 0.0
        known = self.quick & self.plans.keys()
        found = {n: self.plans[n].predicted.step_s for n in known}
        near = [n for n in sorted(found, key=lambda n: found[n]) if found[n] <= near_s]
        for name in near[:_REFINED]:
            quick_s = self.plans[name].predicted.step_s
            if self.plans[name].solver.bound >= self.most_s(GAP):
                continue
            if (1 - gain) * quick_s >= self.most_s():
                continue
            stop_if_over(f"the proof of {name}")
            say(f"planning in full: {name}")
            options, most_s = self.programs[name], self.most_s()
            # If the solver finds no plan that fits within its time limit, the quick
            # plan stays.
            with contextlib.suppress(InfeasibleError, TimeOutError), of_program(name):
                program = self.program(name)
                plan = self.plan(program, self.cluster, options, most_s=most_s).plan
                self.plans[name] = plan
                self.keep(plan)
                gain = max(gain, 1 - plan.predicted.step_s / quick_s)

    def free_s(self, name: str) -> float:
        """Seconds of a step under a program's best plan for unlimited memory.

        The result is 0 if the time is unknown.
        """
        plan = self.plans.get(name)
        if plan is None:
            return getattr(self.errors.get(name), "free_s", 0.0)
        return plan.predicted.step_s / self.slowed[name]

    def is_held_back(self, name: str) -> bool:
        """Whether the best plan of a program would be faster with unlimited memory."""
        plan = self.plans[name]
        easy = plan.predicted.peak_memory_bytes <= EASY * self.cluster.memory_bytes
        return not easy and self.slowed[name] > 1 + GAP

    def priced_s(self, name: str, other: str) -> float:
        """Returns the step time of program ``other`` in the layouts of ``name``.

        Both programs compute attention and sort rows as the plan of ``name`` does. The
        solver chooses layouts for operators that only ``other`` has. The result is 0 if
        it finds none in time, or if ``other`` cannot be computed so.
        """
        if (name, other) not in self.seconds:
            plan, found_s = self.plans[name], 0.0
            programs = self.program(name), self.program(other)
            with contextlib.suppress(PlanError):
                before, after = (as_planned(p, plan) for p in programs)
                roomy = _roomy(self.cluster)
                found_s = price_in_layouts(plan, before, after, roomy).step_s
            self.seconds[name, other] = found_s
        return self.seconds[name, other]

    def too_large(self) -> bool:
        """Whether the state alone does not fit the memory, however it is sharded."""
        if self.cluster.groups:
            return False
        graph = self.analysis.graph
        state = sum(
            graph.values[i.value].device_nbytes
            for i in graph.inputs
            if i.role is not InputRole.BATCH and i.path not in self.offload
        )
        return state > self.cluster.memory_bytes * self.cluster.num_devices

    def failure(self, *, advise: bool) -> PlanError:
        """Returns the error to raise if no plan fits.

        Of all programs without a plan that fits, the error is that of the program that
        needs least memory.
        """
        unfit = {n: e for n, e in self.errors.items() if isinstance(e, InfeasibleError)}
        programs = [name for name in unfit if name in self.programs]
        others = {n: e for n, e in self.errors.items() if n not in unfit}
        if not programs:
            known = {*self.errors, *self.left_out}
            alone = self.options.stages == "auto" and "stages" not in known
            if self.cluster.groups and alone:
                return PlanError(
                    f"one kind of devices alone trains fastest on {self.cluster}: plan "
                    "for a part of it, cluster.groups[0] and so on. Not tried: "
                    f"replicas: {self.errors['replicas']}"
                )
            return [*others.values(), *unfit.values()][0]
        name = min(reversed(programs), key=lambda n: unfit[n].least_bytes or math.inf)
        error: PlanError = unfit[name]
        if advise and not is_over():
            try:
                with of_program(name):
                    program, options = self.program(name), self.programs[name]
                    self.plan(
                        program, self.cluster, options, self.options.untried_options
                    )
            except PlanError as found:
                error = found
        said = {n: str(e).split("\n", 1)[0] for n, e in others.items()}
        known = {**self.left_out, **said}.items()
        reasons = [f"\n  not tried: {what}: {why}" for what, why in known]
        cluster = self.cluster
        where = self.program(name), cluster.num_devices, cluster.device
        kept = [why_scores_are_kept(*where), why_logits_are_kept(*where)]
        reasons[:0] = [f"\n  {why}" for why in kept if why]
        if name != program_name(1, ""):
            reasons.insert(0, f"\n  this is with what needs least memory: {name}")
        if reasons and isinstance(error, InfeasibleError):
            made = InfeasibleError(f"{error}{''.join(reasons)}")
            made.least_bytes, made.enough_bytes = error.least_bytes, error.enough_bytes
            return made
        return error

    def write_plan(self) -> Plan:
        """The best plan, with a record of each decision and of what it saves."""
        best = self.best
        assert best is not None
        count = best.microbatches
        narrowed = self.options.one_stage
        lines = [f"one stage: {narrowed}"] if narrowed else []
        if len(best.stages) > 1 and self.options.stages == "auto":
            one = self.fastest(lambda _: True)
            lines.append(
                self.describe_gain(f"{len(best.stages)} stages", best, one, "one")
            )
        split = self.options.microbatches == "auto" and count > 1
        if len(best.stages) == 1 and split and not best.replicas:
            whole = self.fastest(lambda plan: plan.microbatches == 1)
            lines.append(
                self.describe_gain(f"{count} microbatches", best, whole, "one")
            )
        if best.remat.layers and self.options.remat == "auto":
            without = self.fastest(lambda plan: not plan.remat.layers)
            other = without.microbatches if without else count
            than = "none" if other == count else f"none in {other} microbatches"
            what = f"{len(best.remat.layers)} of {len(best.remat.starts)} layers again"
            lines.append(self.describe_gain(what, best, without, than))
        if len(best.stages) == 1 and self.options.cut_codecs not in ("none", "auto"):
            lines.append(
                f"cut_codecs={self.options.cut_codecs}: not used, because one stage is "
                "fastest and has no cuts"
            )
        if why := why_none(best, self.options.gather_codecs, self.codecs.gathers):
            lines.append(why)
        name = next((n for n in self.programs if self.plans.get(n) is best), None)
        if name is not None and (batches := self.program(name).batches):
            lines.append(
                f"update in batches: {sum(batches)} matrices in {len(batches)} "
                f"{'stacks' if len(batches) > 1 else 'stack'}, so that a device may "
                "have some of them whole"
            )
        worth = best.worth
        scheme = worth.scheme if worth is not None else ""
        if name is not None and (RING in scheme or GATHERED in scheme):
            order = as_planned(self.program(name), best).ring_order
            placed = "order of the ring" if RING in scheme else "zigzag order"
            plain = isinstance(order, str)
            where = f"in plain order: {order}" if plain else f"in the {placed}"
            lines.append(f"tokens: {where}")
        lines += [line for line in best.decided if line not in lines]
        return msgspec.structs.replace(best, decided=tuple(lines))

    def fastest(self, which: Callable[[Plan], bool]) -> Plan | None:
        """The fastest plan of one stage for which a condition holds; None: no such plan
        fits.
        """
        ones = [plan for plan in self.plans.values() if len(plan.stages) == 1]
        return min(filter(which, ones), key=lambda p: p.predicted.step_s, default=None)

    def describe_gain(
        self, what: str, best: Plan, other: Plan | None, than: str
    ) -> str:
        """Describes how much slower the best plan without a decision is."""
        if other is not None:
            times = other.predicted.step_s / best.predicted.step_s
            if times < 1.1:
                return f"{what}: {times - 1:.1%} faster than {than}"
            return f"{what}: {times:.3g} times as fast as {than}"
        fits = f"{what}: fits in {size_text(best.predicted.peak_memory_bytes, ' ')}"
        bytes_ = [
            e.least_bytes
            for n, e in self.errors.items()
            if isinstance(e, InfeasibleError) and n in self.programs and e.least_bytes
        ]
        least = min(bytes_, default=0.0)
        if least <= best.predicted.peak_memory_bytes:
            return f"{fits}, no plan looked at fits without"
        return f"{fits}, {size_text(least, ' ')} without"


def _changes(plan: Plan) -> tuple[int, int]:
    """Returns numbers that measure how much a plan changes the user's step.

    The numbers grow as the plan changes more of the user's step. Of two equally fast
    plans, the one with smaller numbers is preferred.
    """
    layers = len(plan.remat.layers) + (plan.remat.level == KERNELS)
    return layers, plan.microbatches


def program_name(count: int, remat: str) -> str:
    """The name of a program, made of its microbatches and rematerialised layers."""
    parts = [f"{count} microbatches"] if count > 1 else []
    parts += [f"remat {remat}"] if remat else []
    return ", ".join(parts) or "as written"


def _record(
    name: str, found: Plan | None, error: PlanError | None, cpu_s: float
) -> None:
    if found is None:
        note = "none is faster" if error is None else str(error).split("\n", 1)[0]
        record(Proposal(name, "", note=note, cpu_s=cpu_s))
        return
    expected = found.predicted
    what = f"{len(found.stages)} stages, {found.microbatches} microbatches"
    name = f"{name}: {what}" if len(found.stages) > 1 else name
    made = expected.step_s, expected.peak_memory_bytes
    record(Proposal(name, "", *made, cpu_s=cpu_s))


def _roomy(cluster: Cluster) -> Cluster:
    """Returns a cluster with the same devices but unlimited memory."""
    device = dataclasses.replace(cluster.device, memory_bytes=_UNLIMITED)
    return dataclasses.replace(cluster, device=device)
