"""Carries the state of codecs over to another plan, and saves and restores it.

The state has two parts. The residual of a worker is the part of its gradients that was
not sent yet. The sum of the residuals over all workers must not change, because it is
still to be applied. If a new plan has another number of workers or other layouts, each
worker gets an equal part of this sum. The codec's own state (such as a basis, a mask or
a threshold) fits only the same codec with the same shapes; otherwise the codec starts
from a new state. If a parameter of the codec is an input of the program, arrays of its
own state are padded with zeros, or cut, to the size of the new limit.

A plan of several stages may sum a gradient in several parts. The gradient of stacked
layers has one part for each stage (``kernel@0:2``). The gradient of a parameter that
several stages use also has one part for each stage (``table (stage 0)``). If a new plan
has other parts, the residuals of the old parts are joined and then divided among the
new parts. In shapes, d is the number of devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.compression.adjusting import is_adjusted, set_amounts
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.gradient import MOST_LOST, init_state
from autopar.compression.synchronise import ERROR, NON_FINITE, WANTED
from autopar.errors import PlanError
from autopar.runtime import placement
from autopar.runtime.gradients.sums import AnySums, Member, State
from autopar.runtime.stages.transport import Links
from autopar_errors import warn_user
from autopar_passes.layer_loops.split import whole_path

# Entries of a saved codec state that earlier versions of autopar did not save.
_SINCE = {"skipped", "codecs"}


def carry_over(state: State, new: AnySums) -> State:
    """The codecs' state for a new plan, from the state under another plan of the step.

    Args:
      state: the old state, as JAX or NumPy arrays.
      new: the sums of gradients under the new plan.
    """
    wanted, shardings = new.structs(), new.shardings()
    members = {m.decision.name: m for m in new.members.values()}
    gradients: dict[str, Any] = {}
    fresh: State | None = None
    before = {
        **state["gradients"],
        **regroup_gradients(state["gradients"], wanted["gradients"]),
    }
    for name, struct in wanted["gradients"].items():
        old = before.get(name, {"residual": (), "codec": ()})
        where = shardings["gradients"][name]
        levels = _levels(struct["codec"], new)
        kept = [_old_level(old["codec"], level, k) for k, level in enumerate(levels)]
        kept[0] = adjusted_state(old["codec"], kept[0], levels[0], members[name])
        if any(level is None for level in kept):
            fresh = fresh or new.init()
            made = _levels(_of(fresh, name), new)
            kept = [m if k is None else k for k, m in zip(kept, made, strict=True)]
        gradients[name] = {
            "residual": _residual(name, old["residual"], struct["residual"]),
            "codec": kept[0] if new.fallback is None else tuple(kept),
        }
        gradients[name] = jax.tree.map(placement.place, gradients[name], where)
    step = placement.place(state["step"], shardings["step"])
    # A state that was saved by an earlier version has no count of skipped steps.
    skipped = jnp.asarray(state.get("skipped", 0), jnp.int32)
    # Because ``due`` is 0, the next step measures its telemetry.
    counters = {"skipped": skipped, "due": jnp.int32(0)}
    placed = {
        name: placement.place(value, shardings[name])
        for name, value in counters.items()
        if name in wanted
    }
    return {"step": step, **placed, "gradients": gradients}


def gather_state(state: State, links: Links) -> State:
    """Copies the whole state to every process; all processes must call this.

    Args:
      state: the state after a step, on devices of any processes.
      links: the connections to the other processes.
    """
    leaves, tree = jax.tree.flatten(state["gradients"])
    whole: list[Any] = []
    for k, x in enumerate(leaves):
        here = x if x.sharding.addressable_devices else None
        whole.append(links.everywhere(("residual", k), x, x.sharding, here))
    counters = {k: np.asarray(x) for k, x in state.items() if k != "gradients"}
    return {**counters, "gradients": jax.tree.unflatten(tree, whole)}


def place_state(state: Any, new: AnySums) -> State:
    """Places a saved state on the devices of a plan.

    Raises:
      PlanError: ``state`` has no entries ``step`` and ``gradients``, or it has
        gradients that this step does not compress.
    """
    known = {"step", "gradients"}
    if not isinstance(state, dict) or not known <= set(state) <= known | _SINCE:
        raise PlanError(
            "compression_state: expected {'step': ..., 'gradients': {...}} as read "
            "from step.compression_state; got " + type(state).__name__ + "."
        )
    names = {parameter_of(m.decision.name) for m in new.members.values()}
    if unknown := sorted(n for n in state["gradients"] if parameter_of(n) not in names):
        raise PlanError(
            "compression_state: it holds gradients that this step does not compress: "
            f"{', '.join(unknown[:4])}. Restore it into the step it was saved from."
        )
    return carry_over(state, new)


def _of(fresh: State | None, name: str) -> Any:
    assert fresh is not None
    return fresh["gradients"][name]["codec"]


def _levels(codec: Any, how: AnySums) -> tuple[Any, ...]:
    """Returns a gradient's new state for the plan's codec, then for each fallback."""
    return (codec,) if how.fallback is None else codec


def _old_level(old: Any, struct: Any, level: int) -> Any:
    """Returns a level's old codec state; None if no old state has the right shapes.

    An old state that was made without fallback codecs belongs to level 0, the codec of
    the plan.
    """
    found = [old] if level == 0 else []
    if isinstance(old, tuple) and len(old) > level:
        found.append(old[level])
    fitted = (_fit_tree(x, struct) for x in found)
    return next((x for x in fitted if x is not None), None)


def _fit_tree(old: Any, struct: Any) -> Any:
    """Returns the old arrays in the tree structure of the new state.

    Named tuples and tuples count as equal, because a checkpoint stores named tuples as
    tuples. The result is None if the number, shapes or dtypes of the arrays differ.
    """
    structure = jax.tree.structure
    if structure(_drop_types(old)) != structure(_drop_types(struct)):
        return None
    leaves, structs = jax.tree.leaves(old), jax.tree.leaves(struct)
    for a, b in zip(leaves, structs, strict=True):
        if (tuple(a.shape), jnp.dtype(a.dtype)) != (b.shape, b.dtype):
            return None
    return jax.tree.unflatten(structure(struct), leaves)


def _drop_types(tree: Any) -> Any:
    """Returns the tree with each named tuple replaced by a tuple."""
    if isinstance(tree, tuple):
        return tuple(_drop_types(x) for x in tree)
    if isinstance(tree, list):
        return [_drop_types(x) for x in tree]
    if isinstance(tree, dict):
        return {k: _drop_types(x) for k, x in tree.items()}
    return tree


def _residual(name: str, old: Any, struct: Any) -> Any:
    """The residual for another number of workers, with the same sum over workers."""
    if isinstance(struct, tuple):
        if not isinstance(old, tuple) and (norm := _norm(old)):
            warn_user(
                f"the residual of '{name}', of L2 norm {norm:.3g}, is dropped: under "
                "this plan its codec has no feedback; give it one that has, like int4."
            )
        return ()
    if isinstance(old, tuple):
        return jnp.zeros(struct.shape, struct.dtype)
    _check_residual(name, old, struct)
    if tuple(old.shape[1:]) != struct.shape[1:]:
        old = jnp.reshape(old, (old.shape[0], *struct.shape[1:]))
    if old.shape[0] == struct.shape[0]:
        return old if old.dtype == struct.dtype else old.astype(struct.dtype)
    total = jnp.sum(jnp.asarray(old, jnp.float32), axis=0)
    part = (total / struct.shape[0]).astype(struct.dtype)
    return jnp.broadcast_to(part, struct.shape)


def check_fits(state: State, new: AnySums) -> None:
    """Checks that `carry_over` accepts a state; moves no arrays.

    Raises:
      PlanError: the shape of a residual differs from the shape of its gradient.
    """
    for name, struct in new.structs()["gradients"].items():
        old = state["gradients"].get(name, {"residual": ()})["residual"]
        if not isinstance(old, tuple) and not isinstance(struct["residual"], tuple):
            _check_residual(name, old, struct["residual"])


def _check_residual(name: str, old: Any, struct: Any) -> None:
    if not _alike(tuple(old.shape[1:]), struct.shape[1:]):
        raise PlanError(
            f"compression_state: the residual of '{name}' is of shape "
            f"{tuple(old.shape[1:])}, its gradient of {struct.shape[1:]}."
        )


def _alike(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether two shapes are equal, except that one may split a dim into two."""
    if math.prod(old) != math.prod(new):
        return False
    # Take the products of the first 1, 2, ... dims of each shape. If one shape only
    # splits dims of the other, its products include all of the other's products.
    begins = [set(itertools.accumulate(s, operator.mul)) for s in (old, new)]
    return begins[0] <= begins[1] or begins[1] <= begins[0]


def _norm(array: Any) -> float:
    return float(jnp.sqrt(jnp.sum(jnp.square(jnp.asarray(array, jnp.float32)))))


_STAGE = re.compile(r" \(stage \d+\)$")


def parameter_of(name: str) -> str:
    """Returns the path of the parameter that a part of a gradient belongs to.

    >>> parameter_of("params/kernel@0:2"), parameter_of("table (stage 1)")
    ('params/kernel', 'table')
    """
    alone = _STAGE.sub("", name)
    return whole_path(alone) or alone


def regroup_gradients(
    gradients: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Divides residuals among the parts that gradients have under a new plan.

    Args:
      gradients: name of a part -> residual and codec state, under the old plan.
      wanted: name of a part -> shapes of residual and codec state, under the new plan.

    Returns:
      Name of a part -> its state, for parameters whose parts differ between the plans.
      Each residual is as for one worker, ``(1, *shape)``. The codec state is empty, so
      the codec starts from a new state.
    """
    old, new = _by_parameter(gradients), _by_parameter(wanted)
    out: dict[str, Any] = {}
    for parameter, names in new.items():
        before = old.get(parameter, [])
        if not before or set(before) == set(names):
            continue
        shares = _divide(
            {name: gradients[name]["residual"] for name in before},
            {name: wanted[name]["residual"] for name in names},
        )
        out |= {name: {"residual": x, "codec": ()} for name, x in shares.items()}
    return out


def _by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = defaultdict(list)
    for name in names:
        out[parameter_of(name)].append(name)
    return out


def _layers(name: str) -> tuple[int, int]:
    """The first layer of a part of stacked layers, and the layer after its last.

    For a part that is not made of stacked layers, the result is (0, 0).
    """
    alone = _STAGE.sub("", name)
    if not whole_path(alone):
        return 0, 0
    begin, end = alone.rpartition("@")[2].split(":")
    return int(begin), int(end)


def _divide(
    residuals: Mapping[str, Any], structs: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Divides the sum of residuals over workers among other parts of a parameter.

    Residuals of parts with the same layers are added. Layers of which no old part has a
    residual count as zeros. If several new parts have the same layers, the first part
    with feedback gets the residual and the others get zeros. If a part's codec has no
    feedback, its share is added to rows of layers of the other parts.

    Args:
      residuals: name of an old part -> its residual; a tuple if it has none.
      structs: name of a new part -> the struct of its residual; a tuple if it has none.
    """
    old: dict[str, np.ndarray] = {}
    for name, residual in residuals.items():
        if not isinstance(residual, tuple):
            whole = jnp.sum(jnp.asarray(residual, jnp.float32), axis=0)
            old[name] = np.asarray(whole).reshape(-1)
    if not old:
        return {}
    new = {
        name: math.prod(struct.shape[1:])
        for name, struct in structs.items()
        if not isinstance(struct, tuple)
    }
    sizes = [*((name, x.size) for name, x in old.items()), *new.items()]
    parts = [(*_layers(name), size) for name, size in sizes]
    # `each` is the number of elements of a layer, `count` the number of layers. A
    # gradient that is not stacked counts as one layer.
    each = next((n // (end - begin) for begin, end, n in parts if end), parts[0][2])
    count = max(end or n // each for _, end, n in parts)
    total = np.zeros((count, each), np.float32)
    for name, flat in old.items():
        begin, end = _layers(name)
        total[begin : end or count] += flat.reshape(-1, each)
    out: dict[str, np.ndarray] = {}
    given = set[tuple[int, int]]()
    for name in sorted(structs, key=lambda n: (n not in new, _layers(n), n)):
        struct, (begin, end) = structs[name], _layers(name)
        part = total[begin : end or count]
        part = np.zeros_like(part) if (begin, end) in given else part
        given.add((begin, end))
        shape = part.shape if isinstance(struct, tuple) else struct.shape[1:]
        out[name] = part.reshape(1, *shape)
    return out


def adjusted_state(old: Any, kept: Any, struct: Any, member: Member) -> Any:
    """Returns the codec state of a gradient if the old or the new codec has inputs.

    A codec has inputs if some of its parameters are inputs of the compiled program
    (`autopar.compression.adjusting`). The values of these inputs are called *amounts*.

    Args:
      old: the state under the old plan; with a fallback, a tuple with the state of each
        level.
      kept: the result if neither codec has inputs; None: the old state does not fit.
      struct: shapes of the new state.
      member: the gradient under the new plan.

    Returns:
      The state with the amounts of the new plan; None: the old state does not fit.
    """
    found = [old, old[0]] if isinstance(old, tuple) and old else [old]
    before = next((x for x in found if is_adjusted(x)), None)
    if member.amounts is not None:
        given = found if before is None else [before]
        made = (_with_inputs(x, struct, member) for x in given)
        return next((x for x in made if x is not None), None)
    return kept if before is None else _without_inputs(before, struct, member)


def _with_inputs(old: Any, struct: Any, member: Member) -> Any:
    """Returns a state with inputs, from an old state with or without inputs.

    The result is None if the old state does not fit.
    """
    assert member.amounts is not None
    adjusted = is_adjusted(old)
    own = _resize_arrays(old["own"] if adjusted else old, struct["own"])
    if own is None:
        return None
    devices = next(iter(struct["now"].values())).shape[0]
    now = _arrays(member.amounts, devices)
    # Codecs compare the amounts of this step ("now") with those of the last step
    # ("last"), and some restart if they differ. Amounts are never zero, so zeros in
    # "last" make such a codec restart.
    last = _arrays(dict.fromkeys(now, 0), devices)
    if adjusted and set(old["last"]) == set(now):
        last = old["last"]
    elif not adjusted and _fits_constants(old, member, devices):
        last = _arrays(member.amounts, devices)
    return set_amounts({"own": own, "last": last}, now)


def _without_inputs(old: Any, struct: Any, member: Member) -> Any:
    """A state without inputs, from an old state with inputs; None: it does not fit."""
    own = _resize_arrays(old["own"], struct)
    gradient = member.gradient
    amounts = gradient.codec.amounts(
        gradient.shape, member.summation.workers, scatter=gradient.scatter
    )
    names = gradient.codec.restarts
    if own is None or not set(names) <= set(old["last"]):
        return None
    for name in names:
        same = jnp.asarray(old["last"][name]) == amounts[name]
        own = jax.tree.map(lambda x, same=same: _where(same, x), own)
    return own


def _fits_constants(old: Any, member: Member, devices: int) -> bool:
    """Whether a state has the shapes of the codec with constant parameters."""
    codec = parse_codec(member.decision.codec)
    gradient = dataclasses.replace(member.gradient, codec=codec)
    plain = jax.eval_shape(lambda: init_state(gradient, member.summation.workers))
    shapes = [x.shape for x in jax.tree.leaves(plain["codec"])]
    return [tuple(x.shape) for x in jax.tree.leaves(old)] == [
        (devices, *shape) for shape in shapes
    ]


def _arrays(amounts: Mapping[str, int], devices: int) -> dict[str, np.ndarray]:
    return {k: np.full((devices,), v, np.int32) for k, v in amounts.items()}


def _where(same: Any, values: Any) -> Any:
    """Returns the values (d, ...), with zeros for devices where ``same`` is false."""
    return jnp.where(same.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _resize_arrays(old: Any, struct: Any) -> Any:
    """Arrays whose last dim is padded with zeros, or cut, to the shapes of ``struct``.

    The result is None if the arrays differ from ``struct`` in more than the last dim.
    """
    if jax.tree.structure(old) != jax.tree.structure(struct):
        return None
    made = [
        _resized_array(a, b)
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(struct), strict=True)
    ]
    if any(x is None for x in made):
        return None
    return jax.tree.unflatten(jax.tree.structure(struct), made)


def _resized_array(old: Any, struct: Any) -> Any:
    shape, wanted = tuple(old.shape), tuple(struct.shape)
    if old.dtype != struct.dtype or len(shape) != len(wanted):
        return None
    if shape == wanted:
        return old
    # The first dim has one entry for each device.
    if len(shape) < 2 or shape[:-1] != wanted[:-1]:
        return None
    more = wanted[-1] - shape[-1]
    if more < 0:
        return lax.slice_in_dim(jnp.asarray(old), 0, wanted[-1], axis=-1)
    return jnp.pad(old, [(0, 0)] * (len(shape) - 1) + [(0, more)])


# Warns of skipped steps and of large errors of codecs, from the steps' telemetry.


# Largest number of steps with unread telemetry. If there are more, the reader waits for
# the oldest step.
UNREAD = 64
# Least weight of the latest step in the running mean of squared errors.
LATEST = 0.1
# An error is too large if it exceeds TIMES * the error that the plan expects. This
# limit is raised to LITTLE, an error that does not harm training, and lowered to
# MOST_LOST. The first EARLY steps with a set of codecs give no warning.
TIMES, LITTLE, EARLY = 2.0, 0.1, 16


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredGradient:
    """A gradient whose error a step may measure.

    Attributes:
      name: name of the gradient.
      codec: the codec as text; '' if each step chooses one of several codecs.
      error: relative error that the plan expects.
    """

    name: str
    codec: str
    error: float

    @property
    def most(self) -> float:
        """The largest relative error without a warning."""
        return min(MOST_LOST, max(LITTLE, TIMES * self.error))


class TelemetryReader:
    """Warns of skipped steps and of large errors, without waiting for the devices.

    The telemetry of a step is read when the devices have computed it, usually during a
    later call.

    Attributes:
      errors: name of a gradient -> codec -> relative error, a root mean square over the
        latest steps.
    """

    def __init__(self, *, warns: bool) -> None:
        """Creates a reader without telemetry.

        Args:
          warns: whether large errors give warnings.
        """
        self.errors: dict[str, dict[str, float]] = {}
        self._unread: deque[tuple[int, int, Sequence[MeasuredGradient], Any]] = deque()
        self._warns = warns
        self._measured: Counter[MeasuredGradient] = Counter()
        # Gradients whose last measured relative error was too large.
        self._lossy: set[MeasuredGradient] = set()
        self._told: set[str] = set()

    def add(
        self,
        step: int,
        turn: int,
        gradients: Sequence[MeasuredGradient],
        telemetry: Any,
    ) -> None:
        """Adds the telemetry of a step.

        Args:
          step: number of the step.
          turn: number of earlier steps with the same codecs.
          gradients: the gradients that were sent, in the order of the rows of
            ``telemetry``.
          telemetry: one row for each gradient.
        """
        self._unread.append((step, turn, gradients, telemetry))

    def look(self, *, wait: bool = False) -> None:
        """Reads telemetry, and warns of skipped steps and large errors.

        Args:
          wait: whether to wait for the telemetry of all steps; otherwise only
            telemetry is read that is ready.
        """
        while self._unread:
            step, turn, gradients, telemetry = self._unread[0]
            if not (wait or len(self._unread) > UNREAD or telemetry.is_ready()):
                return
            self._unread.popleft()
            rows = np.asarray(telemetry, dtype=float)
            bad = rows[:, NON_FINITE] != 0
            if not bad.any():
                self._learn(step, turn, gradients, rows)
                continue
            names = [g.name for g, x in zip(gradients, bad, strict=True) if x]
            warn_user(
                f"step {step}: the gradients of {_first_names(names)} are not finite; "
                "the step was skipped: what they would have spoilt is as it was before."
            )

    def _learn(
        self,
        step: int,
        turn: int,
        gradients: Sequence[MeasuredGradient],
        rows: np.ndarray,
    ) -> None:
        lossy: dict[MeasuredGradient, float] = {}
        for gradient, row in zip(gradients, rows, strict=True):
            if not gradient.codec or not 0 < row[WANTED] < np.inf or row[ERROR] < 0:
                continue
            squared = row[ERROR] / row[WANTED]
            known = self.errors.setdefault(gradient.name, {})
            before = known.get(gradient.codec, math.sqrt(squared)) ** 2
            self._measured[gradient] += 1
            # With the weight 1 / number of steps, the mean begins as the plain mean.
            # The first step is not typical, because it has no residual to send.
            weight = max(LATEST, 1 / self._measured[gradient])
            mean = (1 - weight) * before + weight * squared
            known[gradient.codec] = math.sqrt(mean)
            twice = gradient in self._lossy
            self._lossy.discard(gradient)
            if squared > gradient.most**2:
                self._lossy.add(gradient)
                if twice and turn >= EARLY and gradient.codec not in self._told:
                    lossy[gradient] = math.sqrt(squared)
        if lossy and self._warns:
            self._told |= {gradient.codec for gradient in lossy}
            _warn_of_loss(step, lossy)


def _warn_of_loss(step: int, lossy: dict[MeasuredGradient, float]) -> None:
    said = [
        f"{g.name!r} ({g.codec}: {error:.2g}, expected {g.error:.2g})"
        for g, error in sorted(lossy.items(), key=lambda item: -item[1])
    ]
    name = max(lossy, key=lambda g: lossy[g]).name
    warn_user(
        f"step {step}: codecs lose more of a gradient than planned, or nearly all of "
        f"it; relative errors: {_first_names(said)}. Training falls behind that with "
        f"dense gradients. Try another codec, as by recode({{{name!r}: 'int8'}}), or "
        "plan with compression='auto' and a smaller error_budget=."
    )


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
