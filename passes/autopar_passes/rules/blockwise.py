"""Attention in blocks of queries and keys: two primitives, their rules and their work.

`FORWARD` and `BACKWARD` compute the attention that a step writes out as products with a
softmax between them (`autopar_passes.graph.attention_blocks` finds it). No array has
an entry for each pair of tokens: a loop computes one block of scores after another, and
an online softmax in float32 merges the blocks (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867; Dao et al., "FlashAttention",
arXiv 2205.14135, algorithms 1 and 4). The step's own operators between the product of
queries and keys and the softmax, such as a scale, a cap or a mask, are a `ScoreMap`,
which runs on each block.

Dimensions of operands and results have labels:

    b0, b1, ...   batch dimensions of all products, such as rows and key heads
    g0, g1, ...   further dimensions of the queries, such as the heads of a group
    q, k          the positions of queries and of keys
    d, e          the elements of queries and keys, and of values
    t             the two numbers of a row that stand for its log-sum-exp

A dimension of size one may have the label ''. Within the primitives, arrays have the
dimensions (b, g, sequence, elements), and scores have (b, g, q, k).

The log-sum-exp of a row is kept as its largest score, and the logarithm of the sum of
the exponentials of the differences to it. One number would lose the second part if a
mask sets all scores of a row to a number as low as -1e9.

A row whose scores are all ``-inf`` gets the output 0, where a written-out softmax gives
NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar_passes.rules.factor_rule import (
    Dims,
    Exchange,
    FactorKind,
    FactorRule,
    KernelWork,
)

Array = Any

FORWARD = "attention_in_blocks"
BACKWARD = "attention_in_blocks_backward"
PRIMITIVES = frozenset({FORWARD, BACKWARD})
# Primitives that change the dimensions of an array and none of its elements. Between
# scores, whose dimensions have fixed places, they do nothing.
LAYOUTS = frozenset(
    {
        "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy",
        "optimization_barrier", "stop_gradient", "name",
    }
)  # fmt: skip
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
# The most elements of a block of scores, and the most rows or columns. About four
# arrays of this size are in memory at once, in float32.
_BLOCK, _SIDE, _HELD = 2**24, 2048, 4
# Products of blocks reach about this share of the peak (as large products of XLA do).
EFFICIENCY = 0.6
# Products of the backward pass, which computes scores again, and of the forward pass.
_BACKWARD_PRODUCTS = 2.5
_HALVED = 0.5
# The dimensions of the log-sum-exp of rows: batch, heads and sequence.
_ROW_DIMS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A scalar operand of a `Step`."""

    value: Any
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operator on scores.

    Attributes:
      primitive: the primitive.
      params: its parameters, sorted by name.
      inputs: its operands: constants, or numbers of given arrays and earlier results.
      axes: the axes that a reduction removes, which its result has with size one.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[int | Constant, ...]
    axes: tuple[int, ...] = ()


def run_steps(
    steps: Sequence[Step],
    given: Sequence[Array],
    sizes: Sequence[int] = (),
    *,
    wide: bool = False,
) -> list[Array]:
    """Runs operators on arrays whose dimensions are (b, g, q, k), or of size one.

    Args:
      steps: the operators.
      given: the arrays that they read.
      sizes: the sizes of the dimensions, if there are reductions.
      wide: whether floating-point numbers are in JAX's widest type, float32 or float64.

    Returns:
      The given arrays, and the result of each operator.
    """
    arrays = list(given)
    for step in steps:
        read = [
            jnp.asarray(x.value, x.dtype) if isinstance(x, Constant) else arrays[x]
            for x in step.inputs
        ]
        arrays.append(_run_step(step, read, sizes, wide=wide))
    return arrays


def _run_step(
    step: Step, read: list[Array], sizes: Sequence[int], *, wide: bool
) -> Array:
    name, params = step.primitive.name, dict(step.params)
    if name in LAYOUTS:
        return read[0]
    if name in REDUCTIONS:
        (x,) = read
        shape = [
            size if axis in step.axes else own
            for axis, (size, own) in enumerate(zip(sizes, x.shape, strict=True))
        ]
        reduce = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
        made = reduce[name](jnp.broadcast_to(x, shape), step.axes, keepdims=True)
        return made.astype(x.dtype)
    if wide:
        widest = jnp.result_type(float)
        read = [
            x.astype(widest) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in read
        ]
        new = params.get("new_dtype")
        if new is not None and jnp.issubdtype(new, jnp.floating):
            params["new_dtype"] = np.dtype(widest)
    shape = np.broadcast_shapes(*(x.shape for x in read))
    read = [jnp.broadcast_to(x, shape) for x in read]
    return step.primitive.bind(*read, **params)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreMap:
    """The operators from the product of queries and keys to the softmax.

    Attributes:
      steps: the operators. They read the product, which has number 0, and arrays that
        have no entry for each pair of a query and a key.
      result: the number of the softmax's operand.
      causal: whether the result is so low for every key after its query that the
        softmax is 0.
    """

    steps: tuple[Step, ...]
    result: int
    causal: bool

    def __call__(self, product: Array, leaves: Sequence[Array]) -> Array:
        """The operand of the softmax for a block of scores."""
        return run_steps(self.steps, [product, *leaves])[self.result]


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How a step writes its attention.

    Attributes:
      operands: labels of the dimensions of queries, keys, values, and the arrays that
        the scores read.
      out: labels of the dimensions of the output.
      scores: the operators between products.
      product_dtype: dtype of the product of queries and keys.
      weight_dtype: dtype of the operand of the product with the values.
      out_dtype: dtype of the output.
      precision: parameter of the product of queries and keys.
      given: labels of the gradient of the output; () in the forward pass.
      gradients: labels and dtypes of the gradients of queries, keys and values; () in
        the forward pass.
    """

    operands: tuple[tuple[str, ...], ...]
    out: tuple[str, ...]
    scores: ScoreMap
    product_dtype: str
    weight_dtype: str
    out_dtype: str
    precision: Any
    given: tuple[str, ...] = ()
    gradients: tuple[tuple[tuple[str, ...], str], ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """The labels of the log-sum-exp of rows."""
        return (*(x for x in self.out if x and x != "e"), "t")


# Places of labels in an array of queries, keys or values.
_PLACES = {"b": 0, "g": 1, "q": 2, "k": 2, "d": 3, "e": 3, "t": 3}


def _split(form: Form, arrays: Sequence[Array]) -> tuple[list[Array], ...]:
    """What stays with queries, what goes with keys, and the rest, as (b, g, s, d)."""
    sizes = _label_sizes(form, arrays)
    own, moved, fixed = list[Array](), list[Array](), list[Array]()
    for labels, array in zip(form.operands, arrays, strict=True):
        x = _in_places(labels, array, sizes)
        (own if "q" in labels else moved if "k" in labels else fixed).append(x)
    return own, moved, fixed


def _label_sizes(form: Form, arrays: Sequence[Array]) -> dict[str, int]:
    return {"t": 2} | {
        name: size
        for labels, array in zip(form.operands, arrays, strict=False)
        for name, size in zip(labels, array.shape, strict=True)
        if name
    }


def _in_places(labels: Sequence[str], array: Array, sizes: dict[str, int]) -> Array:
    """Brings an array into the dimensions (b, g, sequence, elements)."""
    shape = list[int]()
    names = sorted({n for n in sizes if n[0] in "bg"})
    order = [n for n in names if n[0] == "b"], [n for n in names if n[0] == "g"]
    dims = [labels.index(n) for part in order for n in part if n in labels]
    last = [d for d, n in enumerate(labels) if n and n[0] not in "bg"]
    last.sort(key=lambda d: _PLACES[labels[d][0]])
    empty = [d for d, n in enumerate(labels) if not n]
    x = jnp.transpose(array, (*dims, *last, *empty))
    for part in order:
        shape += [sizes[n] if n in labels else 1 for n in part]
    ends = {_PLACES[labels[d][0]]: array.shape[d] for d in last}
    x = x.reshape((*shape, ends.get(2, 1), ends.get(3, 1)))
    first = len(order[0])
    full = [
        # Batch dimensions are joined, so an array that has some of them gets all.
        *(sizes[n] if any(m in labels for m in order[0]) else 1 for n in order[0]),
        *(sizes[n] if any(m in labels for m in order[1]) else 1 for n in order[1]),
        *x.shape[-2:],
    ]
    x = jnp.broadcast_to(x, full)
    b, g = math.prod(full[:first]), math.prod(full[first:-2])
    return x.reshape(b, g, *full[-2:])


def _back(
    labels: Sequence[str], shape: Sequence[int], array: Array, sizes: dict[str, int]
) -> Array:
    """The inverse of `_in_places`, for an array with all dimensions of its labels."""
    names = sorted(n for n in sizes if n[0] in "bg" and n in labels)
    names = [n for n in names if n[0] == "b"] + [n for n in names if n[0] == "g"]
    last = sorted(
        (n for n in labels if n and n[0] not in "bg"), key=lambda n: _PLACES[n]
    )
    order = [*names, *last]
    split = array.reshape([sizes[n] for n in order])
    kept = [n for n in labels if n]
    return jnp.transpose(split, [order.index(n) for n in kept]).reshape(shape)


def _side(length: int, most: int) -> int:
    """The size of as few equal blocks as there may be; the last one may be padded."""
    return math.ceil(length / math.ceil(length / most))


def _sides(own: Sequence[Array], moved: Sequence[Array]) -> tuple[int, int]:
    b, g, rows, _ = own[0].shape
    most = max(1, min(_SIDE, math.isqrt(max(1, _BLOCK // (b * g)))))
    return _side(rows, most), _side(moved[0].shape[2], most)


def _cut(x: Array, side: int, mode: str = "edge") -> Array:
    """Cuts the sequence into blocks, stacked along a new first dimension.

    The last block is padded by its last row, which is a row without NaN, or by zeros.
    """
    b, g, s, d = x.shape
    if s == 1 and side > 1:
        return x[None]
    if s % side:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -s % side), (0, 0)), mode)
        s = x.shape[2]
    return jnp.moveaxis(x.reshape(b, g, s // side, side, d), 2, 0)


def _joined(x: Array, length: int) -> Array:
    """The inverse of `_cut`."""
    n, b, g, side, d = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(b, g, n * side, d)[:, :, :length]


def _unpadded(z: Array, block: Any, length: int) -> Array:
    """The scores of a block of keys, ``-inf`` for those that pad the sequence."""
    side = z.shape[-1]
    if length % side == 0:
        return z
    return jnp.where(block * side + jnp.arange(side) < length, z, -jnp.inf)


def _pairs(rows: int, columns: int, causal: bool) -> np.ndarray:
    """The blocks of queries and of keys that meet, ``[pairs, 2]``."""
    found = [(i, j) for i in range(rows) for j in range(columns)]
    if causal and rows == columns:
        found = [(i, j) for i, j in found if j <= i]
    return np.asarray(found, np.int32)


class Blocks:
    """The kernels of one attention, for blocks of a sequence.

    Attributes:
      form: how the step writes it.
      fixed: arrays that scores read and that have no positions.
    """

    def __init__(self, form: Form, fixed: Sequence[Array]) -> None:
        """Stores what all blocks share."""
        self.form, self.fixed = form, tuple(fixed)

    def _scores(
        self, own: Sequence[Array], moved: Sequence[Array]
    ) -> tuple[Array, Callable[[Array], Array]]:
        """The operand of the softmax, and the map of its gradients to the product's."""
        q, *rows = own
        k, _, *columns = moved
        product = jnp.einsum(
            "bgqd,bhkd->bgqk",
            q,
            k,
            precision=self.form.precision,
            preferred_element_type=self.form.product_dtype,
        )
        at_rows, at_columns = iter(rows), iter(columns)
        at_fixed = iter(self.fixed)
        leaves: list[Array] = []
        for labels in self.form.operands[3:]:
            if "q" in labels:
                leaves.append(next(at_rows))
            elif "k" in labels:
                leaves.append(jnp.swapaxes(next(at_columns), 2, 3))
            else:
                leaves.append(next(at_fixed))
        made, pull = jax.vjp(lambda x: self.form.scores(x, leaves), product)
        made = jnp.broadcast_to(made, product.shape)
        return made.astype(jnp.float32), lambda ds: pull(ds.astype(made.dtype))[0]

    def forward(
        self, own: Sequence[Array], moved: Sequence[Array], causal: bool
    ) -> tuple[Array, Array]:
        """The output in float32, and the log-sum-exp of each row (b, g, q, 2).

        Args:
          own: queries, and what goes with them, each (b, g, q, elements).
          moved: keys, values, and what goes with them, each (b, g, k, elements).
          causal: whether blocks of later keys than queries may be left out.
        """
        side, other = _sides(own, moved)
        rows, columns = (
            [_cut(x, n) for x in y] for y, n in ((own, side), (moved, other))
        )
        lead = rows[0].shape[:-1]
        wide = moved[1].shape[-1]
        first = (
            jnp.zeros((*lead, wide), jnp.float32),
            jnp.full((*lead, 1), -jnp.inf, jnp.float32),
            jnp.zeros((*lead, 1), jnp.float32),
        )

        def step(held: Any, at: Any) -> tuple[Any, None]:
            i, j = at[0], at[1]
            keys = [x[j] for x in columns]
            z, _ = self._scores([x[i] for x in rows], keys)
            z = _unpadded(z, j, moved[0].shape[2])
            acc, top, total = (x[i] for x in held)
            new = jnp.maximum(top, z.max(-1, keepdims=True))
            safe = jnp.where(new == -jnp.inf, 0.0, new)
            weights, kept = jnp.exp(z - safe), jnp.exp(top - safe)
            part = self._product(
                "bgqk,bhke->bgqe", weights.astype(self.form.weight_dtype), keys[1]
            )
            made = (
                kept * acc + part,
                new,
                kept * total + weights.sum(-1, keepdims=True),
            )
            return tuple(x.at[i].set(y) for x, y in zip(held, made, strict=True)), None

        pairs = _pairs(rows[0].shape[0], columns[0].shape[0], causal)
        acc, top, total = self._over(step, first, pairs)
        length = own[0].shape[2]
        out = _joined(acc / jnp.where(total == 0, 1.0, total), length)
        return out, _joined(jnp.concatenate([top, jnp.log(total)], -1), length)

    def backward(
        self,
        own: Sequence[Array],
        moved: Sequence[Array],
        out: Array,
        logs: Array,
        gradient: Array,
        causal: bool,
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values, in float32.

        Args:
          own: see `forward`.
          moved: see `forward`.
          out: the output of whole rows.
          logs: the log-sum-exp of whole rows.
          gradient: the gradient of the output.
          causal: see `forward`.
        """
        side, other = _sides(own, moved)
        turned = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(
            -1, keepdims=True
        )
        dead = logs[..., :1] == -jnp.inf
        rows = [
            *(_cut(x, side) for x in own),
            *(_cut(x, side, "constant") for x in (gradient, turned)),
            _cut(jnp.where(dead, 0.0, logs), side),
        ]
        columns = [_cut(x, other) for x in moved]
        first = tuple(jnp.zeros(x.shape, jnp.float32) for x in (rows[0], *columns[:2]))

        def step(held: Any, at: Any) -> tuple[Any, None]:
            i, j = at[0], at[1]
            *mine, given, turned, logs = (x[i] for x in rows)
            keys = [x[j] for x in columns]
            z, pull = self._scores(mine, keys)
            z = _unpadded(z, j, moved[0].shape[2])
            weights = jnp.exp((z - logs[..., :1]) - logs[..., 1:])
            of_weights = self._product("bgqe,bhke->bgqk", given, keys[1])
            ds = pull(weights * (of_weights - turned)).astype(self.form.product_dtype)
            weights = weights.astype(self.form.weight_dtype)
            made = (
                self._product("bgqk,bhkd->bgqd", ds, keys[0]),
                self._product("bgqk,bgqd->bkd", ds, mine[0])[:, None],
                self._product("bgqk,bgqe->bke", weights, given)[:, None],
            )
            places = i, j, j
            return tuple(
                x.at[n].add(y) for x, n, y in zip(held, places, made, strict=True)
            ), None

        pairs = _pairs(rows[0].shape[0], columns[0].shape[0], causal)
        of_query, of_key, of_value = self._over(step, first, pairs)
        found = zip((of_query, of_key, of_value), (own[0], *moved[:2]), strict=True)
        of_query, of_key, of_value = (_joined(x, y.shape[2]) for x, y in found)
        return of_query, of_key, of_value

    def _over(self, step: Any, first: Any, pairs: np.ndarray) -> Any:
        if len(pairs) == 1:
            return step(first, pairs[0])[0]
        return jax.lax.scan(step, first, jnp.asarray(pairs))[0]

    def _product(self, text: str, one: Array, other: Array) -> Array:
        return jnp.einsum(
            text,
            one,
            other,
            precision=self.form.precision,
            preferred_element_type=jnp.float32,
        )


def merge_rows(one: Array, other: Array) -> tuple[Array, Array, Array]:
    """The log-sum-exp of two parts of each row, and the share of each part.

    Rows have shape (batch, heads, sequence), or one more dimension for the two
    numbers that blocks have. The shares of a row without scores are 0.
    """
    pairs = one.ndim > _ROW_DIMS
    tops, logs = zip(
        *((x[..., 0], x[..., 1]) if pairs else (x, 0.0) for x in (one, other)),
        strict=True,
    )
    top = jnp.maximum(*tops)
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    first, second = (jnp.exp(t - safe + x) for t, x in zip(tops, logs, strict=True))
    total = first + second
    log, whole = jnp.log(total), jnp.where(total == 0, 1.0, total)
    merged = jnp.stack((top, log), -1) if pairs else top + log
    return merged, first / whole, second / whole


def _shape(labels: Sequence[str], sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes[n] if n else 1 for n in labels)


def run(
    primitive: str,
    form: Form,
    arrays: Sequence[Array],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> list[Array]:
    """Runs a call on the arrays of one device.

    Args:
      primitive: one of `PRIMITIVES`.
      form: how the step writes its attention.
      arrays: the operands.
      forward: runs a kernel of the forward pass on all blocks, as
        `autopar_passes.replay.ring.Ring.forward` does.
      backward: the same for the backward pass.
    """
    count = len(form.operands)
    arrays, rest = arrays[:count], arrays[count:]
    own, moved, fixed = _split(form, arrays)
    sizes = _label_sizes(form, arrays)
    blocks = Blocks(form, fixed)
    if primitive == FORWARD:
        made = forward(blocks.forward, own, moved)
        like = forward_results(form)
    else:
        logs, out, gradient = rest
        places = [
            _in_places(form.out, out, sizes),
            _in_places(form.rows, logs, sizes),
            _in_places(form.given, gradient, sizes),
        ]
        made, like = backward(blocks.backward, own, moved, *places), form.gradients
    return [
        _back(labels, _shape(labels, sizes), x, sizes).astype(dtype)
        for x, (labels, dtype) in zip(made, like, strict=True)
    ]


def _alone(form: Form) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Runs the kernels of one device that has the whole sequence."""
    causal = form.scores.causal
    return (
        lambda block, own, moved: block(own, moved, causal),
        lambda block, own, moved, *rest: block(own, moved, *rest, causal),
    )


def _run_forward(*arrays: Array, form: Form) -> list[Array]:
    return run(FORWARD, form, arrays, *_alone(form))


def _run_backward(*arrays: Array, form: Form) -> list[Array]:
    return run(BACKWARD, form, arrays, *_alone(form))


def forward_results(form: Form) -> list[tuple[Sequence[str], str]]:
    """Labels and dtypes of the output and of the log-sum-exp of rows."""
    return [(form.out, form.out_dtype), (form.rows, "float32")]


def _primitive(name: str, run: Any) -> Primitive:
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(jax.jit(run, static_argnames=("form",)))
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=True))
    return made


forward_p = _primitive(FORWARD, _run_forward)
backward_p = _primitive(BACKWARD, _run_backward)


@forward_p.def_abstract_eval
def _abstract_forward(*arrays: Any, form: Form) -> list[Any]:
    sizes = _label_sizes(form, arrays)
    return [
        ShapedArray(_shape(labels, sizes), jnp.dtype(dtype))
        for labels, dtype in forward_results(form)
    ]


@backward_p.def_abstract_eval
def _abstract_backward(*arrays: Any, form: Form) -> list[Any]:
    sizes = _label_sizes(form, arrays)
    return [
        ShapedArray(_shape(labels, sizes), jnp.dtype(dtype))
        for labels, dtype in form.gradients
    ]


def rule(
    primitive: str, operands: Sequence[Any], results: Sequence[Any], form: Form
) -> FactorRule:
    """The rule of a call: all dimensions but those of elements may be split.

    Queries and keys have the same positions, which are one factor.
    """
    sizes = _label_sizes(form, operands)
    names = sorted(n for n in sizes if n != "k" and sizes[n] > 1)
    number = {n: f for f, n in enumerate(names)}
    if "q" in number:
        number["k"] = number["q"]
    kinds = {
        "q": FactorKind.EXCHANGED,
        "d": FactorKind.BLOCKED,
        "e": FactorKind.BLOCKED,
        "t": FactorKind.BLOCKED,
    }

    def dims(labels: Sequence[str]) -> Dims:
        return tuple((number[n],) if n in number else () for n in labels)

    given = [dims(labels) for labels in form.operands]
    made, sums = [dims(form.out), dims(form.rows)], ()
    if primitive == BACKWARD:
        groups = tuple(f for n, f in number.items() if n[0] == "g")
        given += [dims(form.rows), dims(form.out), dims(form.given)]
        made = [dims(labels) for labels, _ in form.gradients]
        sums = ((), groups, groups) if groups else ()
    return FactorRule(
        tuple(sizes[n] for n in names),
        tuple(kinds.get(n, FactorKind.PASS) for n in names),
        tuple(given),
        tuple(made),
        sums=sums,
        exchanges=_exchanges(primitive, form, number.get("q"), results),
    )


def _exchanges(
    primitive: str, form: Form, factor: int | None, results: Sequence[Any]
) -> tuple[Exchange, ...]:
    if factor is None:
        return ()
    moved = [k for k, labels in enumerate(form.operands) if "k" in labels]
    found = [Exchange(factor, slot, around=True) for slot in moved]
    if primitive == BACKWARD:
        wider = max(1, 4 // results[1].dtype.itemsize)
        found += [
            Exchange(factor, slot, result=True, around=True, widened=wider)
            for slot in (1, 2)
        ]
    if form.scores.causal:
        count = len(form.operands)
        given = [k for k, x in enumerate(form.operands) if {"q", "k"} & {*x}]
        given += [count, count + 1, count + 2] if primitive == BACKWARD else []
        made = range(3 if primitive == BACKWARD else 2)
        found += [Exchange(factor, slot) for slot in given]
        found += [Exchange(factor, slot, result=True) for slot in made]
    return tuple(found)


def work(primitive: str, operands: Sequence[Any], form: Form) -> KernelWork:
    """The FLOPs and the bytes of a call on whole operands.

    The forward pass takes ``2 (d + e)`` FLOPs for each pair of a query and a key. Each
    score is written once and read twice, and each weight is written once and read once.
    The backward pass also has the gradients of both, which are read twice.
    """
    sizes = _label_sizes(form, operands)
    backward = primitive == BACKWARD
    others = math.prod(n for name, n in sizes.items() if name[0] in "bg")
    pairs = float(others) * sizes["q"] * sizes["k"]
    model = 2.0 * (sizes["d"] + sizes["e"]) * pairs
    part = _HALVED if form.scores.causal else 1.0
    score, weight = np.dtype("float32").itemsize, operands[2].dtype.itemsize
    per_pair = 3 * score + 2 * weight
    if backward:
        per_pair = 5 * score + 5 * weight
    model *= 2.0 if backward else 1.0
    whole = model * (_BACKWARD_PRODUCTS / 2.0 if backward else 1.0)
    return KernelWork(
        name="attention in blocks" + (" backward" if backward else ""),
        flops=whole * part,
        matrix=True,
        dtype=str(operands[0].dtype),
        efficiency=EFFICIENCY,
        inner_bytes=per_pair * pairs * part,
        held_bytes=float(_HELD * score * _BLOCK),
        own_model_flops=model,
        causal_flops=model if form.scores.causal else 0.0,
    )
