"""Runs a step on one device and under a plan, and compares all results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from flax import nnx

import autopar

STEPS = 4
# Largest allowed relative difference of an array.
TOLERANCE = 1e-5
# Some arrays are mostly rounding errors, such as the momentum of a bias before a batch
# norm, whose gradient is 0. If one rounding of the initial state changes an array by
# more than a tenth of `TOLERANCE`, the array may differ by this multiple of the change.
TIMES_ROUNDING = 10.0
ULP = 2.0**-23
SEEDS = (0, 1, 2)

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of a few steps, and the last state, as arrays by path."""

    returned: Arrays
    state: Arrays


@dataclasses.dataclass(frozen=True)
class Difference:
    """How the arrays of two runs differ.

    Attributes:
      arrays: number of arrays.
      largest: largest relative difference of an array, among arrays that rounding
        hardly changes.
      path: path of this array.
      rounded: number of arrays that one rounding of the initial state changes.
      times: largest ratio of such an array's difference to the change by rounding.
      wrong: paths of arrays that differ by more than allowed.
    """

    arrays: int
    largest: float
    path: str
    rounded: int
    times: float
    wrong: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The results of a case on one device.

    Attributes:
      one: the run of the authors' step.
      moved: runs of the same step from rounded states.
    """

    one: Run
    moved: tuple[Run, ...]


def referred(case: Case) -> Reference:
    """Runs a case on one device, from its state and from rounded states."""
    one = ran(case, case.plain, case.state())
    moved = (ran(case, case.plain, perturbed(case, seed)) for seed in SEEDS)
    return Reference(one, tuple(moved))


def compared(case: Case, reference: Reference, cluster: str) -> dict[str, Any]:
    """Runs a case under a plan, and compares it with one device."""
    planned = autopar.parallelize(case.step, cluster=cluster, **case.options)
    other = ran(case, planned, case.state())
    plan = planned.plan
    found: dict[str, Any] = {
        "mesh": plan.mesh["axes"],
        "inputs split": sum(any(spec) for spec in plan.inputs.values()),
        "inputs": len(plan.inputs),
        "operators split": sum(any(node.axes) for node in plan.nodes),
        "operators": len(plan.nodes),
    }
    return found | differences(reference.one, other, reference.moved)


def compared_way(
    case: Case, reference: Reference, cluster: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Does the same under options that decide how the step runs.

    If a plan computes some values for each microbatch alone, such as batch statistics,
    the comparison is with one device and as many microbatches.
    """
    try:
        planned = autopar.parallelize(
            case.step, cluster=cluster, **case.options, **options
        )
        other = ran(case, planned, case.state())
    except autopar.AutoparError as error:
        return {"refused": str(error)}
    plan, one = planned.plan, reference.one
    if plan.local:
        count = options["microbatches"]
        alone = autopar.parallelize(
            case.step, cluster="1:cpu", **case.options, microbatches=count
        )
        one = ran(case, alone, case.state())
    found = {"local": list(plan.local), "stages": len(plan.stages)}
    return found | differences(one, other, reference.moved, reference.one)


def differences(
    one: Run, other: Run, moved: Sequence[Run], unmoved: Run | None = None
) -> dict[str, Any]:
    """The differences between two runs, by name of the result.

    Args:
      one: the run on one device.
      other: the run under a plan.
      moved: runs on one device from rounded states.
      unmoved: the run from which those differ only by rounding; None: ``one``.
    """
    found = {}
    for name in ("returned", "state"):
        difference = differ(
            getattr(one, name),
            getattr(other, name),
            [getattr(x, name) for x in moved],
            getattr(unmoved or one, name),
        )
        found[name] = dataclasses.asdict(difference)
    return found


def ran(case: Case, step: Any, state: Any) -> Run:
    """Runs a few steps from a state."""
    returned: dict[str, np.ndarray] = {}
    for number in range(STEPS):
        state, out = case.call(step, state, number)
        returned |= {f"step {number}: {k}": x for k, x in arrays(out).items()}
    return Run(returned, arrays(state))


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Path -> array, for all arrays of a tree of any objects."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(nnx.to_tree(tree))
    found = {}
    for path, leaf in keyed:
        if hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float)):
            found[jax.tree_util.keystr(path)] = _array(leaf)
    return found


def _array(leaf: Any) -> np.ndarray:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    # The array is copied, because a later step may reuse its memory.
    return np.array(leaf)


def differ(
    one: Arrays, other: Arrays, rounded: Sequence[Arrays], unrounded: Arrays
) -> Difference:
    """Compares two runs array by array.

    Args:
      one: the arrays of the run on one device.
      other: the arrays of the planned run.
      rounded: the arrays of runs on one device from rounded states.
      unrounded: the arrays of the run from the state without rounding.
    """
    if list(one) != list(other):
        missing = tuple(sorted(set(one) ^ set(other)))
        return Difference(len(one), np.inf, "paths differ", 0, 0.0, missing)
    largest, where, times, count = 0.0, "", 0.0, 0
    wrong: list[str] = []
    for path, a in one.items():
        gap = relative(a, other[path])
        exact = unrounded[path]
        noise = max((relative(exact, x[path]) for x in rounded), default=0.0)
        if noise > TOLERANCE / 10 and np.isfinite(gap):
            count += 1
            times = max(times, gap / noise)
            if gap > max(TOLERANCE, TIMES_ROUNDING * noise):
                wrong.append(path)
            continue
        if gap > largest:
            largest, where = gap, path
        if gap > TOLERANCE:
            wrong.append(path)
    return Difference(len(one), largest, where, count, times, tuple(wrong))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the largest number.

    The result is infinite if shapes, dtypes or integers differ, or if one array is not
    finite.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return 0.0 if np.array_equal(a, b) else np.inf
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    known = np.isfinite(x)
    if not np.array_equal(known, np.isfinite(y)):
        return np.inf
    gap = np.abs(x - y)[known]
    if not gap.any():
        return 0.0
    scale = np.abs(x)[known].max()
    return float(gap.max() / scale) if scale else np.inf


def perturbed(case: Case, seed: int) -> Any:
    """The initial state, each floating-point number changed by about one rounding."""
    rng = np.random.default_rng(seed)

    def moved(x: Any) -> Any:
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        signs = rng.choice((1.0 - ULP, 1.0 + ULP), np.shape(x)).astype(np.float32)
        return (x * signs).astype(x.dtype)

    state = case.state()
    if any(_is_object(x) for x in jax.tree.leaves(state, is_leaf=_is_object)):
        nodes, values = nnx.split(state)
        return nnx.merge(nodes, jax.tree.map(moved, values))
    return jax.tree.map(moved, state)


def _is_object(x: Any) -> bool:
    return nnx.graphlib.is_graph_node(x)
