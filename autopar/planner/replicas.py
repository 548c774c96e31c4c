"""Plans a step on groups of unequal devices as replicas of unequal shares.

Each replica holds the whole state and runs a share of the microbatches in proportion to
its speed. Gradients are summed over the replicas once a step, and each replica updates
its own copy of the state. The planner compares numbers of microbatches and the best
layouts for each kind of device. For each combination it divides the microbatches among
the replicas so that the slowest replica ends as early as possible
(`autopar_solver.deal_out`).

All replicas have the same number of devices in the same network levels, so that one
program with one mesh runs on all replicas (`autopar_passes.replay.replicas`). The
seconds of a replica are predicted as if all replicas had its kind of device. They
include collectives within the replica, and the sums over replicas on the link between
the groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from autopar.cluster import Cluster, Level, LinkSpec, MeshAxis, MeshShape
from autopar.cost.estimate import estimate
from autopar.cost.live import live
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import Assignment, CopyChoice
from autopar.layouts.layout import Layout
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.codecs.choose import CodecRequest, sent_alike, sent_as_asked
from autopar.planner.deadline import is_over, leave_untried
from autopar.planner.hints import (
    Pins,
    check_pinned,
    fitting_meshes,
    pin_restriction,
    pinned_layouts,
)
from autopar.planner.options import PlanOptions
from autopar.planner.problem import Restriction
from autopar.planner.programs import EASY, as_asked
from autopar.planner.record import GIVEN, check_plan, make_plan, stated_assignment
from autopar.planner.search import candidate_meshes, plan_mesh, search, search_of_one
from autopar.plans import ClusterData, Plan, ReplicaPlan
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.steps.microbatches import check_can_be_dealt_out, with_turns
from autopar_passes.replay.replicas import AXIS
from autopar_solver import deal_out

# Candidate names for the mesh axis of the replicas; the first name that no other axis
# has is used.
_NAMES = ("replica", "replicas", "replica_group")


@dataclasses.dataclass(frozen=True)
class ReplicaDevices:
    """The devices of one replica.

    Attributes:
      part: the devices of this replica as a cluster.
      count: how many replicas there are.
      between: the link between replicas.
    """

    part: Cluster
    count: int
    between: LinkSpec

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for replicas whose devices and links cost the same."""
        return self.part.device, self.part.levels

    @property
    def whole(self) -> Cluster:
        """The cluster of all replicas, as if all replicas had these devices."""
        taken = {level.name for level in self.part.levels}
        name = next(n for n in ("between", *_NAMES) if n not in taken)
        outer = Level(name=name, size=self.count, link=self.between)
        return Cluster(device=self.part.device, levels=(outer, *self.part.levels))

    def mesh(self, mesh: MeshShape) -> MeshShape:
        """Returns a mesh of this replica with the axis of the replicas prepended."""
        name = axis_name(mesh.names)
        outer = MeshAxis(name=name, size=self.count, link=self.between, level=0)
        inner = [dataclasses.replace(a, level=a.level + 1) for a in mesh.axes]
        return MeshShape(axes=(outer, *inner))


# A function that finds layouts on the devices of a single replica, for the step that it
# runs.
SearchAlone = Callable[[Analysis, ReplicaDevices], Candidate]


def axis_name(names: Sequence[str]) -> str:
    """Returns a name for the axis of the replicas that is not among the given names."""
    return next(n for n in _NAMES if n not in names)


def sites_of(cluster: Cluster) -> tuple[ReplicaDevices, ...]:
    """Returns the replicas of a cluster of unequal groups, in the order of its devices.

    If all groups have equal levels, each group is one replica. Otherwise each group is
    cut into replicas of one shape (`_replica_shape`).

    Raises:
      PlanError: the groups have different numbers of levels.

    >>> whole = Cluster.parse("4x8:h100+2x8:a100")
    >>> [str(site.part.num_devices) for site in sites_of(whole)]
    ['16', '16', '16']
    """
    assert cluster.between is not None
    shapes = [tuple(level.size for level in g.levels) for g in cluster.groups]
    if len({len(shape) for shape in shapes}) > 1:
        raise PlanError(
            f"{cluster}: replicas of unequal devices need groups of as many levels, "
            "and these have different numbers. Describe all groups with their hosts, "
            "such as 1x8 for a single host of 8 devices."
        )
    each = _replica_shape(shapes)
    size = math.prod(each)
    parts = [
        part
        for group in cluster.groups
        for part in group.partition([each] * (group.num_devices // size))
    ]
    return tuple(ReplicaDevices(part, len(parts), cluster.between) for part in parts)


def _replica_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the largest shape into whose copies all groups can be cut.

    The innermost levels whose sizes are equal in all groups stay whole. The next level
    outward has the greatest common divisor of its sizes, and all levels around it have
    size 1.

    >>> _replica_shape([(4, 8), (2, 8)]), _replica_shape([(2, 8), (2, 4)])
    ((2, 8), (1, 4))
    """
    each: list[int] = []
    whole = True
    for sizes in reversed([*zip(*shapes, strict=True)]):
        each.insert(0, math.gcd(*sizes) if whole else 1)
        whole = whole and len(set(sizes)) == 1
    return tuple(each)


def price_replica(view: Analysis, found: Candidate, site: ReplicaDevices) -> Candidate:
    """Prices a step on one replica in the layouts of a candidate.

    Args:
      view: the step with the number of microbatches that the replica runs
        (`with_turns`).
      found: layouts on the mesh of a single replica.
      site: the devices of the replica.
    """
    sizes = (site.count, *found.assignment.sizes)
    assignment = dataclasses.replace(
        _shift_axes(found.assignment), analysis=view, sizes=sizes, replicas=(AXIS,)
    )
    pricer = Pricer(site.whole, site.mesh(_mesh_on(site, found)))
    return dataclasses.replace(
        found,
        assignment=assignment,
        pricer=pricer,
        estimate=estimate(assignment, pricer),
        peak_memory_bytes=live(assignment, site.part.device).peak_bytes(),
        weights=None,
        lower_s=None,
        before_s=None,
        free_s=None,
    )


def _mesh_on(site: ReplicaDevices, found: Candidate) -> MeshShape:
    """Returns a candidate's mesh with the links of a replica."""
    mesh = found.mesh
    levels = site.part.levels
    return MeshShape(
        axes=tuple(dataclasses.replace(a, link=levels[a.level].link) for a in mesh.axes)
    )


def _shift_axes(found: Assignment) -> Assignment:
    """An assignment whose layouts are on the mesh with one more axis prepended."""

    def shift(layout: Layout) -> Layout:
        return tuple(tuple(axis + 1 for axis in axes) for axes in layout)

    copies = {
        key: CopyChoice(shift(choice.layout), choice.reuse)
        for key, choice in found.copies.items()
    }
    strategies = tuple(map(shift, found.strategies))
    return dataclasses.replace(found, strategies=strategies, copies=copies)


def slowest_of(plan: Plan) -> int:
    """Returns the number of the slowest replica of a plan."""
    return max(range(len(plan.replicas)), key=lambda k: plan.replicas[k].step_s)


def replica_pricer(plan: Plan, cluster: Cluster, number: int) -> Pricer:
    """Returns the prices on one replica of a plan.

    Args:
      plan: a plan with replicas.
      cluster: the cluster of the plan.
      number: number of the replica.

    Raises:
      PlanError: the cluster has other replicas, or no such mesh.
    """
    site = sites_for(plan, cluster)[number]
    inner = plan_mesh(site.part, plan.axis_names[1:], plan.axis_sizes[1:])
    return Pricer(site.whole, site.mesh(inner))


def check_mesh(plan: Plan, cluster: Cluster) -> None:
    """Checks that a cluster has the mesh of a plan of one stage.

    Raises:
      PlanError: the cluster has other replicas, or no such mesh.
    """
    part, first = cluster, 0
    if plan.replicas or cluster.groups:
        part, first = sites_for(plan, cluster)[0].part, 1
    plan_mesh(part, plan.axis_names[first:], plan.axis_sizes[first:])


def one_replica(plan: Plan) -> Plan:
    """A plan for one replica of a plan, without codecs, on the mesh of this replica."""
    axes = dict(itertools.islice(plan.mesh["axes"].items(), 1, None))
    stage = msgspec.structs.replace(
        plan.stage,
        mesh={"axes": axes},
        devices=tuple(range(math.prod(axes.values()))),
        gradients=(),
    )
    return msgspec.structs.replace(plan, stages=(stage,), replicas=())


def sites_for(plan: Plan, cluster: Cluster) -> tuple[ReplicaDevices, ...]:
    """Returns the replicas of a cluster, for a plan with as many."""
    sites = sites_of(cluster) if cluster.groups else ()
    if len(sites) != len(plan.replicas):
        raise PlanError(
            f"the plan has {len(plan.replicas)} replicas, and {cluster} has room for "
            f"{len(sites)}: make another plan for it with autopar.plan."
        )
    return sites


def is_tight(plan: Plan, cluster: Cluster) -> bool:
    """Whether the memory limit may slow a plan with replicas."""
    pairs = zip(plan.replicas, sites_for(plan, cluster), strict=True)
    return any(r.peak_memory_bytes > EASY * s.part.memory_bytes for r, s in pairs)


# Status that is recorded in a plan with replicas.
STATUS = "shares and layouts of replicas compared"
# Another number of microbatches is tried if it is expected to save this fraction of a
# step.
_WORTHWHILE = 0.01
# The most numbers of microbatches that are tried, and the most microbatches per
# replica.
_TRIED, _PER_REPLICA = 6, 16


@dataclasses.dataclass(frozen=True)
class Dealt:
    """Layouts of the replicas, and the number of microbatches of each replica.

    Attributes:
      base: the step, split into its microbatches.
      counts: number of microbatches of each replica.
      replicas: the layouts, with the predicted step of each replica.
    """

    base: Analysis
    counts: tuple[int, ...]
    replicas: tuple[Candidate, ...]

    @property
    def slowest(self) -> Candidate:
        """The slowest replica."""
        return max(self.replicas, key=lambda c: c.step_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step: those of the slowest replica."""
        return self.slowest.step_s

    def expected_s(self, count: int) -> float:
        """Estimates the least seconds of a step with another number of microbatches.

        The estimate assumes that a row takes the same time at any microbatch size, and
        that work outside the microbatches takes no time.
        """
        each = [
            c.step_s / n * self.base.microbatches / count
            for c, n in zip(self.replicas, self.counts, strict=True)
        ]
        tables = [[s * n for n in range(1, count + 1)] for s in each]
        shares = deal_out(tables, count)
        return max(s * n for s, n in zip(each, shares, strict=True))


def plan_replicas(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, codecs: CodecRequest
) -> Plan:
    """Plans a step as replicas, one or more on each group of a cluster.

    Args:
      analysis: the step on the whole batch.
      cluster: of groups of unequal devices.
      options: hints and limits; axes and pins refer to the mesh of a replica.
      codecs: the user's request about codecs.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: the groups have no replicas of equal shape, the batch cannot be split,
        or an option is not supported for replicas.
    """
    started = time.perf_counter()
    sites = sites_of(cluster)
    whole = analysis.whole or analysis
    asked = options.microbatches
    shares = asked if isinstance(asked, tuple) else ()

    def search_alone(view: Analysis, site: ReplicaDevices) -> Candidate:
        return _search_alone(view, options, site)

    best: Dealt | None = None
    failed: InfeasibleError | None = None
    left = list(_numbers(whole, options, len(sites)))
    tried = 0
    while left and tried < _TRIED:
        count = left[0] if best is None else _most_promising(best, left)
        if count is None:
            break
        left.remove(count)
        if best is not None and is_over():
            leave_untried(f"{count} microbatches on replicas")
            break
        say(f"dealing {count} microbatches out to {len(sites)} replicas")
        try:
            base = as_asked(whole, dataclasses.replace(options, microbatches=count))
            found = _deal_best(base, search_alone, sites, codecs, shares)
        except InfeasibleError as error:
            failed = error
            continue
        except PlanError:
            if best is None:
                raise
            continue
        tried += 1
        if best is None or found.step_s < best.step_s:
            best = found
    if best is None:
        assert failed is not None
        raise failed
    return _write_plan(best, cluster, sites, time.perf_counter() - started, codecs)


def in_layouts_of(
    analysis: Analysis,
    cluster: Cluster,
    plan: Plan,
    codecs: CodecRequest,
    search_alone: SearchAlone | None = None,
    *,
    shares: Sequence[int] = (),
    pins: Pins | None = None,
    check: Callable[[Candidate], None] = lambda _: None,
) -> Plan:
    """Plans a step on the mesh of a plan with replicas, in the layouts of this plan.

    Args:
      analysis: the step as the plan runs it (`autopar.planner.record.split_as`).
      cluster: of groups of unequal devices.
      plan: the plan.
      codecs: the codecs that the user requested.
      search_alone: finds other layouts on the devices of a replica; None: the layouts
        of the plan stay.
      shares: the number of microbatches of each replica; empty: those of the plan.
      pins: layouts of inputs that the result must have.
      check: called with each replica before codecs are chosen. It refuses a replica by
        raising an error.

    Raises:
      InfeasibleError: a replica does not fit the memory of its devices.
      PlanError: the cluster has other replicas, the plan is for another step, or a
        requested codec cannot be used.
    """
    started = time.perf_counter()
    sites = sites_for(plan, cluster)
    counts = tuple(shares) or tuple(r.microbatches for r in plan.replicas)
    alone = one_replica(plan)

    def as_stated(view: Analysis, site: ReplicaDevices) -> Candidate:
        stated = stated_assignment(view, alone)
        found = search_of_one(view, site.part, stated, alone.axis_names).best
        check_pinned(pins or {}, view, found.assignment, found.pricer.mesh)
        return found

    if search_alone is None:
        check_plan(analysis, plan)
    search = search_alone or as_stated
    dealt = _deal_best(analysis, search, sites, codecs, counts, check)
    spent_s = time.perf_counter() - started
    return _write_plan(dealt, cluster, sites, spent_s, codecs, GIVEN)


def _numbers(whole: Analysis, options: PlanOptions, least: int) -> Iterator[int]:
    """Yields the numbers of microbatches to try, small numbers first.

    Raises:
      PlanError: there is no number to try, or the user requested fewer microbatches
        than there are replicas.
    """
    asked = options.microbatches
    if isinstance(asked, tuple):
        if len(asked) != least:
            raise PlanError(
                f"microbatches={list(asked)}: the cluster has {least} replicas, and "
                f"{len(asked)} are given."
            )
        yield sum(asked)
        return
    if isinstance(asked, int):
        if asked < least:
            raise PlanError(
                f"microbatches={asked}: each of {least} replicas of unequal devices "
                f"runs one or more. Give {least} or more, or 'auto'."
            )
        yield asked
        return
    rows = max(1, batch_rows(whole.graph))
    found = [n for n in range(least, least * _PER_REPLICA + 1) if rows % n == 0]
    if not found:
        raise PlanError(
            f"the batch has {rows} rows, which cannot be split into microbatches for "
            f"{least} replicas of unequal devices. Give a batch with more rows."
        )
    yield from found


def _most_promising(best: Dealt, counts: Sequence[int]) -> int | None:
    """Returns the number of microbatches that may save most seconds.

    The result is None if no number is worth a search.
    """
    least_s, count = min((best.expected_s(count), count) for count in counts)
    return count if least_s < (1 - _WORTHWHILE) * best.step_s else None


def _deal_best(
    base: Analysis,
    search_alone: SearchAlone,
    sites: Sequence[ReplicaDevices],
    codecs: CodecRequest,
    counts: Sequence[int] = (),
    check: Callable[[Candidate], None] = lambda _: None,
) -> Dealt:
    """Finds the best layouts and shares for a number of microbatches.

    Args:
      base: the step in its microbatches.
      search_alone: finds layouts on the devices of a replica.
      sites: the devices of each replica.
      codecs: the user's request about codecs.
      counts: the number of microbatches of each replica; empty: the best numbers.
      check: called with each replica before codecs are chosen. It refuses a replica by
        raising an error.

    Raises:
      InfeasibleError: no layouts fit.
    """
    check_can_be_dealt_out(base)
    view = functools.cache(functools.partial(with_turns, base))
    found: list[Dealt] = []
    failed: InfeasibleError | None = None
    known: list[object] = []
    for site in {site.kind: site for site in sites}.values():
        try:
            layouts = search_alone(view(base.microbatches // len(sites)), site)
            own = layouts.assignment
            axes = [(axis.level, axis.size) for axis in layouts.pricer.mesh.axes]
            key = axes, own.strategies, own.copies, own.sums_each_microbatch
            if key not in known:
                known.append(key)
                shares = _Shares(base, view, layouts, sites, counts)
                found.append(shares.send(codecs, check))
        except InfeasibleError as error:
            failed = error
    if not found:
        assert failed is not None
        raise failed
    return min(found, key=lambda dealt: dealt.step_s)


def _search_alone(
    view: Analysis, options: PlanOptions, site: ReplicaDevices
) -> Candidate:
    """Finds the best layouts on the devices of a single replica."""
    pins = options.pins or {}
    meshes = candidate_meshes(site.part, options.max_axes, options.axis_names)
    if pins:
        meshes = fitting_meshes(view, pins, meshes)

    def restrict(pricer: Pricer) -> Restriction:
        return pin_restriction(view, pinned_layouts(view, pins, pricer.mesh))

    # The search leaves out the sums over replicas; `price_replica` adds them
    # afterwards.
    result = search(
        view,
        site.part,
        meshes=meshes,
        seconds=options.seconds,
        restriction=restrict if pins else None,
    )
    check_pinned(pins, view, result.best.assignment, result.best.pricer.mesh)
    return result.best


@dataclasses.dataclass(frozen=True)
class _Shares:
    """Divides the microbatches among the replicas, for given layouts.

    Attributes:
      base: the step in its microbatches.
      view: the number of microbatches of a replica -> the step that the replica runs.
      layouts: layouts on the mesh of a single replica.
      sites: the devices of each replica.
      counts: the number of microbatches of each replica; empty: the best numbers.
    """

    base: Analysis
    view: Callable[[int], Analysis]
    layouts: Candidate
    sites: Sequence[ReplicaDevices]
    counts: Sequence[int]

    def send(self, codecs: CodecRequest, check: Callable[[Candidate], None]) -> Dealt:
        """Returns the best shares with the codecs that the user requested.

        All replicas send a gradient by the same codec. The codecs are chosen on the
        replica that is the slowest without codecs, and the shares are then chosen
        again, with these codecs.

        Raises:
          InfeasibleError: a replica does not fit the memory of its devices.
          PlanError: no gradient can use the requested codec.
        """
        plain = self.best(lambda candidate: candidate)
        last = plain.slowest
        check(last)
        if codecs.mode == "none":
            return plain
        sent = sent_as_asked(last.assignment.analysis, last, codecs).sending
        assert sent is not None

        def send(candidate: Candidate) -> Candidate:
            view = candidate.assignment.analysis
            return sent_alike(view, candidate, sent, codecs.errors)

        return self.best(send)

    def best(self, send: Callable[[Candidate], Candidate]) -> Dealt:
        """Returns the best shares with given codecs.

        Args:
          send: adds the codecs to a priced replica.

        Raises:
          InfeasibleError: a replica does not fit the memory of its devices.
        """
        known: dict[tuple[object, int], Candidate] = {}

        def at(site: ReplicaDevices, turns: int) -> Candidate:
            key = site.kind, turns
            if key not in known:
                view = self.view(turns)
                known[key] = send(price_replica(view, self.layouts, site))
                _check_fits(known[key], site)
            return known[key]

        def price(k: int, turns: int) -> float:
            return at(self.sites[k], turns).step_s

        count, sites = self.base.microbatches, self.sites
        counts = tuple(self.counts) or tuple(best_shares(price, len(sites), count))
        pairs = zip(sites, counts, strict=True)
        return Dealt(self.base, counts, tuple(at(site, n) for site, n in pairs))


def best_shares(
    price: Callable[[int, int], float], replicas: int, count: int
) -> Sequence[int]:
    """Returns the shares with which the slowest replica ends earliest.

    The seconds of a replica grow almost in proportion to its microbatches; only the
    overlap of communication with work makes the growth uneven. So ``price`` is called
    for few numbers of microbatches, and the seconds of other numbers are interpolated
    linearly. A choice is proved to be best once the seconds of each replica are known
    with its share, and with one microbatch more: a better choice would have to give one
    of the replicas another microbatch.

    Args:
      price: the number of a replica and of its microbatches -> seconds.
      replicas: number of replicas.
      count: number of microbatches of all replicas together.
    """
    most = count - replicas + 1
    known: list[dict[int, float]] = [{} for _ in range(replicas)]
    asked = [(k, n) for k in range(replicas) for n in (1, most)]
    while True:
        for k, n in asked:
            known[k][n] = price(k, n)
        shares = deal_out([_between(row, most) for row in known], count)
        wanted = [(k, m) for k, n in enumerate(shares) for m in (n, n + 1)]
        asked = [(k, n) for k, n in wanted if n <= most and n not in known[k]]
        if not asked:
            return shares


def _between(known: dict[int, float], most: int) -> list[float]:
    """Returns the seconds of 1, 2 ... microbatches, interpolated between known ones."""
    at = sorted(known)
    values = np.maximum.accumulate([known[n] for n in at])
    return [float(s) for s in np.interp(range(1, most + 1), at, values)]


def _check_fits(found: Candidate, site: ReplicaDevices) -> None:
    """Raises `InfeasibleError` if a replica does not fit its devices."""
    need, have = found.held_bytes, site.part.memory_bytes
    if need > have:
        raise InfeasibleError(
            f"a replica on {site.part} needs {need / 1e9:.3g} GB on each device, which "
            f"has {have / 1e9:.3g} GB. Split the batch into more microbatches, or plan "
            "with stages='auto'."
        )


def _write_plan(
    dealt: Dealt,
    cluster: Cluster,
    sites: Sequence[ReplicaDevices],
    seconds: float,
    codecs: CodecRequest,
    status: str = STATUS,
) -> Plan:
    """Returns the plan of the slowest replica, with the shares of all replicas."""
    last = dealt.slowest
    view = last.assignment.analysis
    found = SearchResult(last, ((last.pricer.mesh, last),), seconds, searched=False)
    made = make_plan(view, found, None if codecs.mode == "none" else codecs)
    replicas = tuple(
        ReplicaPlan(
            devices=str(site.part),
            microbatches=n,
            step_s=c.step_s,
            peak_memory_bytes=float(c.held_bytes),
        )
        for site, n, c in zip(sites, dealt.counts, dealt.replicas, strict=True)
    )
    most = max(r.peak_memory_bytes for r in replicas)
    # No lower bound is known for a step with other shares and layouts.
    solver = msgspec.structs.replace(made.solver, status=status, gap=1.0, bound=0.0)
    return msgspec.structs.replace(
        made,
        cluster=ClusterData.of(cluster),
        fingerprint=dealt.base.fingerprint,
        structure=dealt.base.structure,
        replicas=replicas,
        solver=solver,
        predicted=msgspec.structs.replace(made.predicted, peak_memory_bytes=most),
        worth=None,
    ).with_checks()
