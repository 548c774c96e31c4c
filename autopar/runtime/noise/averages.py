"""The noise scale from the squared norms of partial gradients, averaged over steps.

A batch of M rows is split into n groups of equal size. With g_i the mean gradient of
group i and G the mean of all g_i::

    local = mean |g_i|^2        total = |G|^2
    sqr = (n total - local) / (n - 1)         an estimate of |E g|^2
    var = (local - total) M / (n - 1)         an estimate of the variance of the
                                              gradient of one row
    phi = var / sqr                           the noise scale, in rows

The formulas are those of Pollux (Qiao et al., OSDI 2021) and of McCandlish et al.
(arXiv 1812.06162). The formulas are linear in the norms. So gradients with different
numbers of groups can be estimated separately, and their estimates added up. ``sqr`` and
``var`` are averaged over steps with exponential weights: each step multiplies the old
averages by ``decay ** (M / M0)``. Each average is divided by the sum of its weights,
which corrects the bias towards zero.

Preconditioned gradients have no fixed unit. Second moments begin at zero, so that in
the first steps gradients are divided by numbers that are far too small, and some
elements of them are huge. Therefore all norms of such a step are divided by ``local``,
and every step counts alike: ``phi`` is a ratio and needs no unit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes
from autopar.planner.codecs.sites import gradients_of, updated_parameters
from autopar.steps.analysis import Analysis
from autopar.steps.batch import BATCH, batch_dims, batch_rows
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.microbatches.facts import Combine
from autopar_passes.program.equations import walk

# Finds the gradients of parameters in a planned step, and their partial gradients.
#
# A *group* is the rows of one microbatch that one data replica works on. With K
# replicas and A microbatches there are n = K * A groups of equal size. The gradient
# of a parameter is the sum of the partial gradients of all groups.
#
# Replicas of unequal devices share the A microbatches of a step. Each microbatch
# belongs to one of them, so K counts the data replicas within such a replica. The
# groups have equal sizes even though the replicas have unequal numbers of rows. If a
# gradient has no partial gradients of single microbatches, it has K groups, each with
# rows of all microbatches.


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSource:
    """The gradient of one parameter, and its partial gradients by group.

    Values are given as numbers of values of the program.

    Attributes:
      name: path of the parameter.
      value: the gradient.
      replicas: mesh axes whose devices hold partial gradients of different rows.
      groups: number of groups with separate partial gradients, n.
      parts: the value that holds the partial gradients of the groups, as partial sums
        over devices or as one value for each microbatch.
      bare: an earlier value that only transpositions and reshapes turn into ``parts``,
        so that both have the same norm (`bare_of`).
      loop: the equation of the loop over microbatches that computes ``parts``; -1: no
        loop computes ``parts``.
      share: the factor with which each microbatch's partial gradient counts in the
        gradient.
    """

    name: str
    value: int
    replicas: Axes
    groups: int
    parts: int
    bare: int
    loop: int = -1
    share: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """The gradients that are measured.

    Attributes:
      found: the measured gradients, in program order.
      left_out: paths of the parameters whose gradients are not found.
      rows: number of rows in the batch, M.
    """

    found: tuple[GradientSource, ...]
    left_out: tuple[str, ...]
    rows: int


def with_waiting(assignment: Assignment) -> Assignment:
    """Returns the assignment with the sum of each gradient deferred if possible."""
    waiting = frozenset(gradients_of(assignment.analysis))
    return dataclasses.replace(assignment, waiting=waiting)


def find_sources(assignment: Assignment) -> Sources:
    """Finds the gradients of a step's parameters.

    Args:
      assignment: the plan as layouts, from `with_waiting`.
    """
    analysis = assignment.analysis
    rows = batch_rows((analysis.whole or analysis).graph)
    parameters = trained_paths(analysis.graph)
    names = updated_parameters(analysis.graph, list(_candidates(analysis)))
    alone = alone_in(names)
    micro = _micro_values(analysis)
    found = [_source(assignment, v, name, micro, rows) for v, name in alone.items()]
    left = tuple(name for name in parameters if name not in alone.values())
    return Sources(tuple(found), left, rows)


def trained_paths(graph: OperatorGraph) -> list[str]:
    """Paths of the parameters that a step changes.

    An input that the step returns unchanged, such as a learning rate, is not included.
    """
    return [
        given.path
        for given in graph.inputs
        if given.role is InputRole.PARAMETER
        and graph.outputs[given.output] != given.value
    ]


def alone_in(names: dict[int, str]) -> dict[int, str]:
    """Value -> name of its parameter, if this value alone updates the parameter.

    If several values update a parameter, each is only a part of the gradient, so none
    is returned.

    Args:
      names: value -> name of the parameter, from `updated_parameters`.
    """
    counts = Counter(names.values())
    return {v: name for v, name in names.items() if name and counts[name] == 1}


def _candidates(analysis: Analysis) -> Iterator[int]:
    """Yields the values that may be gradients of parameters.

    Gradients whose sum over devices is deferred come first.
    """
    graph = analysis.graph
    yield from gradients_of(analysis)
    on_path = set[int]().union(*(d.members for d in analysis.deferrals))
    crossing = (
        set[int]() if analysis.split is None else analysis.split.accumulated_values
    )
    top = {e.index for e in analysis.program.body.equations}
    read = {
        v
        for op in graph.operators
        if op.role is Role.UPDATE or op.kind == "return"
        for v in op.inputs
        if v is not None
    }
    for op in graph.operators:
        for value in op.outputs:
            backward = op.role is Role.BACKWARD and op.equation in top
            if (
                (backward or value in crossing)
                and value in read
                and value not in on_path
                and graph.values[value].floating
            ):
                yield value


def _micro_values(analysis: Analysis) -> dict[int, tuple[int, int, float]]:
    """Returns gradient -> its value in one microbatch, the loop's equation, its share.

    The share is the factor with which one microbatch counts in the gradient.
    """
    split, whole = analysis.split, analysis.whole
    if split is None or whole is None:
        return {}
    first = len(whole.program.values)
    loops = {
        value: eqn.index
        for eqn in analysis.program.body.equations
        for region in eqn.regions
        for inner in walk(region)
        for value in inner.outputs
    }
    shares = {Combine.SUM: 1.0, Combine.MEAN: 1.0 / split.microbatches}
    return {
        c.value: (first + c.value, loops[first + c.value], shares[c.combine])
        for c in split.crossings
        if c.combine in shares and first + c.value in loops
    }


def _source(
    assignment: Assignment,
    value: int,
    name: str,
    micro: dict[int, tuple[int, int, float]],
    rows: int,
) -> GradientSource:
    replicas = replicas_of(assignment, value)
    workers = math.prod(assignment.sizes[a] for a in replicas)
    count = assignment.analysis.microbatches if value in micro else 1
    if rows % (workers * count):
        # The rows cannot be divided equally. So several devices work on the same row,
        # and no device has the partial gradient of rows of its own.
        replicas, workers = (), 1
    parts, loop, share = micro.get(value, (value, -1, 1.0))
    bare = bare_of(assignment, parts)
    return GradientSource(
        name, value, replicas, workers * count, parts, bare, loop, share
    )


# Operators that only change the order or the shape of the elements.
_LAYING = ("copy", "reshape", "squeeze", "transpose")


def bare_of(assignment: Assignment, value: int) -> int:
    """Returns the earliest value that has the same elements as ``value``.

    Copies, transpositions and reshapes before ``value`` are followed back as long as
    the values are partial over the same mesh axes. The measurement reads this earlier
    array, because the compiler can then fuse the transposition with a sum. If the
    measurement read the transposed array, the compiler would have to store it.
    """
    held = assignment.partial_layout(value)
    while True:
        op = assignment.contraction.producer[value]
        before = op.inputs[0] if op.kind in _LAYING and len(op.inputs) == 1 else None
        if before is None or assignment.floating(before):
            return value
        found = assignment.partial_layout(before)
        if (held and held[0]) != (found and found[0]):
            return value
        value = before


def turn_of(assignment: Assignment, value: int, bare: int) -> tuple[int, ...] | None:
    """Returns the permutation of dims that transposes ``bare`` to ``value``.

    Args:
      assignment: the plan as layouts.
      value: a gradient.
      bare: the value that `bare_of` returns for ``value``.

    Returns:
      For each dim of ``value`` the number of the same dim in ``bare``. None if ``bare``
      is also reshaped on its way to ``value``.
    """
    equations = assignment.analysis.program.by_index()
    turn = tuple(range(len(assignment.graph.values[value].shape)))
    while value != bare:
        op = assignment.contraction.producer[value]
        if op.kind not in ("copy", "transpose"):
            return None
        if op.kind == "transpose":
            permutation = equations[op.equation].params["permutation"]
            turn = tuple(permutation[dim] for dim in turn)
        (before,) = op.inputs
        assert before is not None
        value = before
    return turn


def replicas_of(assignment: Assignment, value: int) -> Axes:
    """Returns the mesh axes over which a gradient is a partial sum of different rows.

    On such an axis the devices are data replicas.
    """
    held = assignment.stackings.get(value)
    if held is None or value not in held.deferral.ends:
        return ()
    operators = assignment.graph.operators
    makers = [operators[op] for op, ends in held.deferral.reach if value in ends]
    batch = _batch_axes(assignment)
    return tuple(
        a
        for a in held.axes
        if all(_splits_rows(assignment, m, a, batch) for m in makers)
    )


def _batch_axes(assignment: Assignment) -> frozenset[int]:
    """The mesh axes that split the rows of the batch in the inputs of the step."""
    analysis = assignment.analysis
    inputs, found = analysis.graph.inputs, set[int]()
    for k, dim in batch_dims((analysis.whole or analysis).graph).items():
        found.update(assignment.home_layout(inputs[k].value)[dim])
    return frozenset(found)


def _splits_rows(
    assignment: Assignment, maker: Operator, axis: int, batch: frozenset[int]
) -> bool:
    """Whether a mesh axis splits the rows over which an operator sums.

    Args:
      assignment: the plan as layouts.
      maker: an operator that computes a gradient.
      axis: the mesh axis.
      batch: the mesh axes that split the rows of the batch.
    """
    analysis = assignment.analysis
    node = assignment.contraction.node(maker)
    labels = analysis.node_labels.get(node.index, {})
    strategy: Sequence[Axes] = assignment.strategies[node.index]
    for factor in node.factors_reduced(maker):
        if axis in strategy[factor]:
            label = labels.get(factor)
            return label == BATCH or (label is None and axis in batch)
    return False


# Number of steps from one measurement to the next, if a codec sends the gradients.
# Measurements are rare then, because each sends the gradients a second time, without
# the codec.
SPARSE = 32
# Number of steps from one measurement to the next within the first `SPARSE` steps.
# Measurements are more frequent there, because no noise scale is known yet.
EARLY = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseOptions:
    """How the noise of gradients is measured.

    Attributes:
      base_batch: number of rows, M0, of the batch that the learning rate was chosen
        for; None: the number of rows of the first batch.
      decay: factor by which a step with M0 rows multiplies the old averages.
      every: number of steps from one measurement to the next; None: 1 if no codec sends
        gradients. If codecs do, a measurement also sends these gradients without the
        codec, so only one step in 32 is measured, and one in 4 of the first 32.
      preconditioned: whether gradients are divided by the square root of the
        optimizer's second moments, like the updates of Adam and its variants.
    """

    base_batch: int | None = None
    decay: float = 0.999
    every: int | None = None
    preconditioned: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges of the options."""
        for name in ("base_batch", "every"):
            number = getattr(self, name)
            known = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (known and number >= 1):
                raise PlanError(
                    f"noise_scale: {name}={number!r}: expected a whole number of at "
                    "least 1, or None."
                )
        if not 0 <= self.decay < 1:
            raise PlanError(
                f"noise_scale: decay={self.decay!r}: expected a part of at least 0 and "
                "below 1, such as 0.999."
            )


def noise_options(given: Any) -> NoiseOptions | None:
    """Converts the argument ``noise_scale=`` to options; None: nothing is measured.

    Raises:
      PlanError: the argument is neither a bool nor `NoiseOptions`.
    """
    if isinstance(given, NoiseOptions):
        return given
    if isinstance(given, bool):
        return NoiseOptions() if given else None
    raise PlanError(
        f"parallelize: noise_scale={given!r}: expected True, False or "
        "autopar.goodput.NoiseOptions(...)."
    )


State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The noise scale of the gradients, and the averages that it is computed from.

    Attributes:
      sqr: squared norm of the mean gradient. If gradients are preconditioned, it is
        divided by ``local``, and so are all norms below.
      var: variance of the gradient of one row, summed over its elements.
      rows: number of rows, M, of the batch of the last step.
      groups: least number of groups, n, over all gradients.
      steps: number of measured steps in the averages.
      skipped: number of measured steps that are not in the averages because a gradient
        was not finite.
      biased: whether the estimate is biased. It is if a gradient has only one group and
        is compared with that of the step before, or if a gradient was not found.
      excess: average of the squared norm of the codecs' sum minus that of the exact
        sum. For unbiased codecs it is the squared error of the sum.
      local: mean of the squared norms of the groups' gradients in the last measured
        step.
      total: squared norm of the mean gradient in the last measured step.
      left_out: paths of the parameters whose gradients were not found.
    """

    sqr: float
    var: float
    rows: int
    groups: int
    steps: int
    skipped: int
    biased: bool
    excess: float
    local: float
    total: float
    left_out: tuple[str, ...] = ()

    @property
    def phi(self) -> float:
        """The noise scale in rows, var / sqr.

        The noise scale is infinite if ``sqr`` is zero but ``var`` is not. It is NaN
        before the first measured step.
        """
        if math.isnan(self.sqr):
            return math.nan
        if self.var <= 0:
            return 0.0
        return self.var / self.sqr if self.sqr > 0 else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """The numbers of groups and of rows.

    Attributes:
      counts: for each gradient the number of groups n; 1 if the gradient is compared
        with the gradient of the step before.
      rows: number of rows of the batch, M.
    """

    counts: tuple[int, ...]
    rows: int

    @property
    def alone(self) -> np.ndarray:
        """Whether each gradient has only one group, bool (gradients,)."""
        return np.asarray(self.counts) == 1


def estimates(norms: Any, groups: Groups) -> tuple[Any, Any]:
    """Returns ``sqr`` and ``var`` of one step.

    Args:
      norms: (gradients, 3). Column 0 is the sum over the groups of the squared norms of
        their partial gradients; these partial gradients add up to the gradient. Column
        1 is the squared norm of the gradient, column 2 the squared norm of the codec's
        sum. If a gradient has only one group, its two groups are half the gradient of
        this step and half the gradient of the step before.
      groups: the number of groups of each gradient.
    """
    alone = groups.alone
    n = np.where(alone, 2, np.asarray(groups.counts)).astype(np.float32)
    rows = np.where(alone, 2, 1) * np.float32(groups.rows)
    local, total = n * norms[:, 0], norms[:, 1]
    sqr = (n * total - local) / (n - 1)
    var = (local - total) * rows / (n - 1)
    return sqr.sum(), var.sum()


# Names of the averages, and of the counters of steps.
_AVERAGES = ("weight", "sqr", "var", "excess", "local", "total")
_COUNTS = ("step", "steps", "skipped", "last")


def fresh(base_batch: float) -> State:
    """Returns the averages before the first step, scalars."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return {
        "base_batch": jnp.asarray(base_batch, jnp.float32),
        **dict.fromkeys(_AVERAGES, zero),
        **dict.fromkeys(_COUNTS, none),
    }


def update_averages(
    state: Mapping[str, Any],
    norms: jax.Array,
    groups: Groups,
    decay: float,
    measured: jax.Array,
    *,
    unitless: bool = False,
) -> State:
    """Returns the averages after a step.

    Args:
      state: the averages before the step, made by `fresh` or by this function.
      norms: as for `estimates`.
      groups: the number of groups of each gradient.
      decay: factor by which a step with M0 rows multiplies the old averages.
      measured: whether the norms were measured in this step.
      unitless: whether the norms are divided by ``local``, as those of preconditioned
        gradients must be. A step whose ``local`` is zero, such as the first, is not
        measured then.
    """
    n = np.where(groups.alone, 2, np.asarray(groups.counts)).astype(np.float32)
    if unitless:
        local = jnp.sum(n * norms[:, 0])
        measured &= local != 0
        norms = norms / jnp.where(local == 0, 1.0, local)
    finite = jnp.all(jnp.isfinite(norms))
    counts = measured & finite
    sqr, var = estimates(norms, groups)
    keep = jnp.float32(decay) ** (groups.rows / state["base_batch"])
    new = {
        "weight": keep * state["weight"] + (1 - keep),
        "sqr": keep * state["sqr"] + (1 - keep) * sqr,
        "var": keep * state["var"] + (1 - keep) * var,
        "excess": keep * state["excess"]
        + (1 - keep) * jnp.sum(norms[:, 2] - norms[:, 1]),
        "local": jnp.sum(n * norms[:, 0]),
        "total": jnp.sum(norms[:, 1]),
        "last": state["step"] + 1,
    }
    kept = {k: jnp.where(counts, x, state[k]) for k, x in new.items()}
    return {
        **kept,
        "base_batch": state["base_batch"],
        "step": state["step"] + 1,
        "steps": state["steps"] + counts,
        "skipped": state["skipped"] + (measured & ~finite),
    }


def noise_scale(
    state: Mapping[str, Any], groups: Groups, left_out: Sequence[str] = ()
) -> NoiseScale:
    """Computes the noise scale from the averages.

    Args:
      state: the averages after the last step.
      groups: the number of groups of each gradient in the last step.
      left_out: paths of the parameters whose gradients were not found.
    """
    names = (*_AVERAGES, *_COUNTS)
    read = {name: float(np.asarray(state[name])) for name in names}
    weight = read["weight"]
    return NoiseScale(
        sqr=max(read["sqr"] / weight, 0.0) if weight else math.nan,
        var=max(read["var"] / weight, 0.0) if weight else math.nan,
        rows=groups.rows,
        groups=min(groups.counts),
        steps=int(read["steps"]),
        skipped=int(read["skipped"]),
        biased=bool(groups.alone.any() or left_out),
        excess=read["excess"] / weight if weight else math.nan,
        local=read["local"],
        total=read["total"],
        left_out=tuple(left_out),
    )


@dataclasses.dataclass(frozen=True)
class NoiseSpec:
    """The gradients that are measured in a step, and the state that holds the averages.

    The state also holds the previous value of each gradient that has only one group.
    Such a gradient is compared with its value in the step before.

    Attributes:
      sources: the measured gradients, with their partial gradients.
      options: how the gradients are measured.
      everywhere: the sharding of the averages, with a copy on each device.
      homes: name of a gradient with only one group -> the sharding of its previous
        value.
      structs_of: name of a gradient with only one group -> shape and dtype.
      coded: gradients that codecs send.
    """

    sources: Sources
    options: NoiseOptions
    everywhere: Any
    homes: Mapping[str, Any]
    structs_of: Mapping[str, jax.ShapeDtypeStruct]
    coded: frozenset[int] = frozenset()

    @functools.cached_property
    def groups(self) -> Groups:
        """The number of groups of each gradient."""
        counts = tuple(s.groups for s in self.sources.found)
        return Groups(counts, self.sources.rows)

    @property
    def alone(self) -> tuple[GradientSource, ...]:
        """The gradients with only one group, compared with the step before."""
        return tuple(s for s in self.sources.found if s.groups == 1)

    @property
    def every(self) -> int:
        """Number of steps from one measurement to the next."""
        return self.options.every or (SPARSE if self.coded else 1)

    def is_measured(self, step: jax.Array) -> jax.Array:
        """Whether a step is measured, a bool scalar.

        Args:
          step: number of the step, an int32 scalar.
        """
        if self.every == 1:
            return jnp.bool_(True)
        due = step % self.every == 0
        if self.options.every is None:
            due |= (step < self.every) & (step % EARLY == 0)
        return due

    def create(self) -> State:
        """Returns the state before the first step."""
        previous = {
            name: jnp.zeros(s.shape, s.dtype) for name, s in self.structs_of.items()
        }
        base = self.options.base_batch or self.sources.rows
        none = jnp.zeros((), jnp.int32)
        return {**fresh(base), "compared": none, "previous": previous}

    def structs(self) -> State:
        """Returns the shapes and dtypes of the state."""
        return jax.eval_shape(self.create)

    def shardings(self) -> State:
        """Returns the shardings of the state."""
        found = jax.tree.map(lambda _: self.everywhere, self.structs())
        return {**found, "previous": dict(self.homes)}

    def init(self) -> State:
        """Returns the state before the first step, created in its shardings."""
        return jax.jit(self.create, out_shardings=self.shardings())()
