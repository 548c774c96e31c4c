"""Computes attention that a step writes out in blocks of scores.

Attention is written out if its scores are the result of one product and, as a softmax,
the operand of another one. This pass replaces the products, and all operators between
them, by the primitives of `autopar_passes.rules.blockwise`, or by cuDNN's attention.
They compute blocks of scores, so that a ring of devices may share the sequence.

`autopar_passes.graph.attention_products` finds the products. Equations between them may
be written in any form, also in the backward pass. Nothing is matched against a pattern:
`autopar_passes.graph.attention_scores` runs the equations on random numbers of small
sizes, and compares what they compute with the softmax and with its gradient as JAX
derives it. Values that no product of scores reaches are random too, one array for each
value. Two values count as one if equal operators compute them from the same values.

A group of equations is replaced only if nothing else reads an array with an entry for
each pair of a query and a key.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.attention_products import (
    Labels,
    NotAttentionError,
    Products,
    RefusedError,
    Search,
)
from autopar_passes.graph.attention_scores import Checked, Scores, find_scores
from autopar_passes.program.equations import (
    Equation,
    Program,
    Region,
    needed_equations,
)
from autopar_passes.program.flatten import Builder, next_index
from autopar_passes.rules import blockwise
from autopar_passes.rules.blockwise import Form, ScoreMap
from autopar_passes.rules.factor_rule import FactorRule

# The dtypes and the elements of a head for which cuDNN has kernels on all GPUs.
_CUDNN_DTYPES, _CUDNN_ELEMENTS = {"bfloat16", "float16"}, range(8, 129, 8)
# The sizes of scores for which a map is compared with a scale: a limit on scores, or a
# number that is added to them, is seen.
_SCORES = 10.0 ** np.arange(-3, 9)


@dataclasses.dataclass(frozen=True, slots=True)
class FoundAttention:
    """What the pass found.

    Attributes:
      replaced: the number of products of scores that are computed in blocks.
      refused: why attention stays written out, one line for each reason.
    """

    replaced: int
    refused: tuple[str, ...]


def attend_in_blocks(
    program: Program, rules: Mapping[int, FactorRule], *, cudnn: bool = False
) -> tuple[Program, FoundAttention]:
    """Returns the program that computes its attention in blocks.

    Values and equations that stay keep their numbers.

    Args:
      program: a flat program.
      rules: the sharding rules, by equation.
      cudnn: whether cuDNN's attention may be used. It is used for scores in bfloat16 or
        float16 that are only scaled, with a causal mask or none.
    """
    rewrite = _Rewrite(program, rules, cudnn=cudnn)
    body = rewrite.region(program.body)
    found = FoundAttention(rewrite.replaced, tuple(dict.fromkeys(rewrite.refused)))
    if not rewrite.replaced:
        return program, found
    values = tuple(rewrite.builder.values)
    return dataclasses.replace(program, values=values, body=body), found


class _Rewrite:
    """Replaces attention in a region, and in the regions within it."""

    def __init__(
        self, program: Program, rules: Mapping[int, FactorRule], *, cudnn: bool
    ) -> None:
        self.rules, self.cudnn = rules, cudnn
        self.builder = Builder(program.values, next_index(program))
        self.replaced = 0
        self.refused: list[str] = []
        self.checked: Checked = {}

    def region(self, region: Region) -> Region:
        inner = [self.inside(eqn) for eqn in region.equations]
        region = dataclasses.replace(region, equations=tuple(inner))
        search = Search(region, self.builder.values, self.rules)
        for product in search.products():
            try:
                products = Products(search, product)
                scores = find_scores(products, self.checked)
                region = _Group(self, products, scores).replace()
            except NotAttentionError:
                continue
            except RefusedError as error:
                self.refused.append(str(error))
                continue
            self.replaced += 1
            search = Search(region, self.builder.values, self.rules)
        return region

    def inside(self, eqn: Equation) -> Equation:
        if not eqn.regions:
            return eqn
        return dataclasses.replace(eqn, regions=tuple(map(self.region, eqn.regions)))


class _Group:
    """The new equations of one attention."""

    def __init__(self, rewrite: _Rewrite, products: Products, scores: Scores) -> None:
        self.rewrite, self.products, self.scores = rewrite, products, scores
        self.builder, self.values = rewrite.builder, products.values
        self.search, self.parts = products.search, products.parts

    def replace(self) -> Region:
        """The region with the primitives of attention in blocks."""
        search, parts, builder = self.search, self.parts, self.builder
        named = self._naming()
        value, value_labels = self.products.value()
        made, operands, leaves = self.scores.operands(builder, named)
        out_labels = self.products.out_labels()
        weights = parts.out or parts.of_value
        assert weights is not None
        weight = weights[0].inputs[weights[1]]
        assert isinstance(weight, int)
        (product,) = self.products.product.outputs
        out_dtype = self.values[value].dtype
        if parts.out is not None:
            out_dtype = self.values[parts.out[0].outputs[0]].dtype
        inputs = self.products.query_labels, self.products.key_labels, value_labels
        form = Form(
            operands=(*map(named, inputs), *leaves),
            out=named(out_labels),
            scores=self.scores.map,
            product_dtype=str(self.values[product].dtype),
            weight_dtype=str(self.values[weight].dtype),
            out_dtype=str(out_dtype),
            precision=self.products.product.params["precision"],
        )
        arrays = [self.products.query, self.products.key, value, *operands]
        back: _Back | None = None
        if parts.of_value is not None or parts.of_weights is not None:
            back = self._back(arrays, named)
            form = dataclasses.replace(form, given=back.given, gradients=back.results)
        scale = self._scale(form) if self.rewrite.cudnn else None
        if scale is None:
            forward, backward = self._in_blocks(form, arrays, back, weights[0])
        else:
            made = []
            forward, backward = self._on_cudnn(form, arrays, back, scale, weights[0])
        insert: dict[int, list[Equation]] = collections.defaultdict(list)
        replaced = self.products.replaced()
        first = min(search.place[k] for k in replaced)
        if parts.out is not None:
            first = search.place[parts.out[0].index]
        insert[first] += [*made, *forward]
        if back is not None:
            insert[back.place] += backward
        return self._with_inserted(insert, replaced)

    def _naming(self) -> Callable[[Labels], tuple[str, ...]]:
        """A function that gives the names of a `Form` to labels of dimensions."""
        name = {
            self.products.keys: "k",
            self.products.queries: "q",
            self.products.depth: "d",
            "E": "e",
        }
        batch = [n for n in self.products.names() if n[0] == "B"]
        groups = [n for n in self.products.rows if n != self.products.queries]
        name |= {n: f"b{k}" for k, n in enumerate(batch)}
        name |= {n: f"g{k}" for k, n in enumerate(groups)}
        return lambda labels: tuple(name[n[0]] if n else "" for n in labels)

    def _with_inserted(
        self, insert: Mapping[int, list[Equation]], replaced: Collection[int]
    ) -> Region:
        """The region without replaced equations, and with new ones at their places."""
        equations: list[Equation] = []
        for k, eqn in enumerate(self.search.region.equations):
            equations += insert.get(k, ())
            if eqn.index not in replaced:
                equations.append(eqn)
        return self._checked_region(equations)

    def _in_blocks(
        self, form: Form, arrays: list[int], back: _Back | None, like: Equation
    ) -> tuple[list[Equation], list[Equation]]:
        """The equations of both passes, as attention in blocks."""
        builder = self.builder
        alone = dataclasses.replace(form, given=(), gradients=())
        forward = self._equation(blockwise.forward_p, arrays, alone, like)
        out, logs = (builder.value(*_aval(forward, k)) for k in range(2))
        if self.parts.out is not None:
            out = self.parts.out[0].outputs[0]
        forward = dataclasses.replace(forward, outputs=(out, logs))
        if back is None:
            return [forward], []
        given = [*arrays, logs, out, back.gradient]
        backward = self._equation(blockwise.backward_p, given, form, back.like)
        return [forward], [dataclasses.replace(backward, outputs=back.outputs)]

    def _scale(self, form: Form) -> float | None:
        """The scale of the scores, if cuDNN's attention computes the same."""
        hidden, own = self.scores.hidden, self.products.size(self.products.keys) - 1
        if hidden is None or not self.scores.only_positions:
            return None
        if hidden[own:].any() or not (form.scores.causal or not hidden.any()):
            return None
        value, _ = self.products.value()
        shapes = [
            self.values[a] for a in (self.products.query, self.products.key, value)
        ]
        dtypes = {str(v.dtype) for v in shapes} | {form.out_dtype}
        elements = {
            v.shape[labels.index(n)]
            for v, labels, n in zip(shapes, form.operands[:3], "dde", strict=True)
        }
        if len(dtypes) > 1 or not dtypes <= _CUDNN_DTYPES or len(elements) > 1:
            return None
        if form.precision is not None or elements.pop() not in _CUDNN_ELEMENTS:
            return None
        positions = [
            ("k" if label == self.products.keys else "q", dtype)
            for _, label, dtype in list(self.scores.leaves)[1:]
        ]
        return _scale_of(form.scores, positions, np.flatnonzero(hidden != 1) - own)

    def _on_cudnn(
        self,
        form: Form,
        arrays: list[int],
        back: _Back | None,
        scale: float,
        like: Equation,
    ) -> tuple[list[Equation], list[Equation]]:
        """The equations of both passes, with cuDNN's attention."""
        builder, arrays = self.builder, arrays[:3]
        sizes = {
            n: size
            for array, labels in zip(arrays, form.operands, strict=False)
            for n, size in zip(labels, self.values[array].shape, strict=True)
        }

        def attend(*given: Any) -> Any:
            pairs = zip(given, form.operands, strict=False)
            q, k, v = (_in_heads(x, labels, sizes) for x, labels in pairs)
            made = jax.nn.dot_product_attention(
                *(q, k, v),
                scale=scale,
                is_causal=form.scores.causal,
                implementation="cudnn",
            )
            return _from_heads(made, form.out, sizes)

        def run(*given: Any) -> Any:
            out, pull = jax.vjp(attend, *given[:3])
            if back is None:
                return (out,)
            found = pull(_turned(given[3], form.given, form.out, sizes))
            ends = zip(found, form.operands, form.gradients, strict=False)
            return (
                out,
                *(_turned(x, a, b, sizes).astype(t) for x, a, (b, t) in ends),
            )

        part, start = self.parts.out, len(builder.equations)
        v = self.values[arrays[0]]
        shape = tuple(sizes[n] if n else 1 for n in form.out)
        out = builder.value(shape, v.dtype) if part is None else part[0].outputs[0]
        atoms, results = arrays, (out,)
        if back is not None:
            atoms, results = [*arrays, back.gradient], (out, *back.outputs)
        with jax_compat.without_devices():
            builder.calls(run, atoms, "", results)
        new = builder.equations[start:]
        first = {eqn.index for eqn in needed_equations(new, [out])}
        ends = like.name_stack, "" if back is None else back.like.name_stack
        passes = (
            [
                dataclasses.replace(eqn, name_stack=stack)
                for eqn in new
                if (eqn.index in first) == early
            ]
            for stack, early in zip(ends, (True, False), strict=True)
        )
        forward, backward = passes
        return forward, backward

    def _back(self, arrays: list[int], named: Any) -> _Back:
        """The backward pass."""
        search, parts, builder = self.search, self.parts, self.builder
        gradient, labels = self.products.gradient()
        given = [
            (
                parts.of_query,
                self.products.query,
                self.products.query_labels,
                self.products.depth,
            ),
            (
                parts.of_key,
                self.products.key,
                self.products.key_labels,
                self.products.depth,
            ),
            (parts.of_value, arrays[2], self.products.value()[1], "E"),
        ]
        results: list[tuple[tuple[str, ...], str]] = []
        outputs: list[int] = []
        for part, array, own, free in given:
            if part is None:
                results.append((named(own), str(self.values[array].dtype)))
                outputs.append(builder.like(self.values[array]))
                continue
            made = part[0].outputs[0]
            ends = named(self.products.side(part, free)[2])
            results.append((ends, str(self.values[made].dtype)))
            outputs.append(made)
        late = [p[0] for p in (parts.of_value, parts.of_query, parts.of_key) if p]
        place = min(search.place[eqn.index] for eqn in late)
        return _Back(
            gradient, named(labels), tuple(results), tuple(outputs), late[0], place
        )

    def _equation(
        self, primitive: Any, arrays: Sequence[int], form: Form, like: Equation
    ) -> Equation:
        builder = self.builder
        made = [self.values[a] for a in arrays]
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in made]
        closed = jax.make_jaxpr(lambda *x: primitive.bind(*x, form=form))(*structs)
        (source,) = closed.jaxpr.eqns
        return Equation(builder.index(), source, tuple(arrays), (), like.name_stack)

    def _checked_region(self, equations: list[Equation]) -> Region:
        """The region, if no equation reads what is not computed yet.

        Raises:
          RefusedError: another equation reads scores, or values come too late.
        """
        region = self.search.region
        live = needed_equations(equations, region.outputs, effects=True)
        ours = {v for eqn in equations for v in eqn.outputs}
        known = set[int]()
        for eqn in live:
            if any(a in ours and a not in known for a in eqn.arrays):
                raise RefusedError("its backward pass does not follow its forward pass")
            known.update(eqn.outputs)
        (product,) = self.products.product.outputs
        if product in known:
            readers = [e for e in live if product in e.arrays]
            what = f"'{readers[0].primitive}'" if readers else "the step's results"
            raise RefusedError(f"{what} reads its scores, too")
        return dataclasses.replace(region, equations=live)


@dataclasses.dataclass(frozen=True, slots=True)
class _Back:
    """The backward pass of an attention.

    Attributes:
      gradient: the gradient of the output.
      given: its labels.
      results: labels and dtypes of the gradients of queries, keys and values.
      outputs: these gradients.
      like: the first product that computes one of them.
      place: the place of that product among the equations.
    """

    gradient: int
    given: tuple[str, ...]
    results: tuple[tuple[tuple[str, ...], str], ...]
    outputs: tuple[int, ...]
    like: Equation
    place: int


def _scale_of(
    scores: ScoreMap, positions: Sequence[tuple[str, str]], seen: np.ndarray
) -> float | None:
    """The scale of scores; None if scores that are seen are not only scaled.

    Args:
      scores: operators that read positions only, and depend on their difference only.
      positions: for each array that they read, 'q' or 'k', and its dtype.
      seen: the differences of positions that no mask hides.
    """
    places = {"q": np.maximum(seen, 0), "k": np.maximum(-seen, 0)}
    sizes = np.concatenate([-_SCORES, _SCORES])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        given = [jnp.asarray(sizes, jnp.float32).reshape(1, 1, 1, -1)]
        given += [
            jnp.asarray(places[name], dtype).reshape(1, 1, -1, 1)
            for name, dtype in positions
        ]
        made = blockwise.run_steps(scores.steps, given, wide=True)
        y = np.asarray(made[scores.result], float).reshape(-1, len(sizes))
    scale = float(y[0, -1] / sizes[-1])
    return scale if scale > 0 and np.allclose(y, scale * sizes, 1e-5, 0) else None


def _heads_first(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Batch dimensions, and the dimensions that are heads, of cuDNN's attention."""
    batch = sorted(n for n in labels if n[:1] == "b")
    return batch[:-1], [*batch[-1:], *sorted(n for n in labels if n[:1] == "g")]


def _heads_order(labels: Sequence[str]) -> tuple[list[str], list[int]]:
    """Labels in the order (batch, sequence, heads, elements), and the dims of each."""
    batch, heads = _heads_first(labels)
    ends = [next(n for n in labels if n and n in pair) for pair in ("qk", "de")]
    return [*batch, ends[0], *heads, ends[1]], [len(batch), 1, len(heads), 1]


def _in_heads(x: Any, labels: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """Brings an array into the shape (batch, sequence, heads, elements)."""
    order, counts = _heads_order(labels)
    named = [n for n in labels if n]
    x = x.reshape([sizes[n] for n in named])
    x = jnp.transpose(x, [named.index(n) for n in order])
    shape: list[int] = []
    for count in counts:
        shape.append(math.prod(sizes[n] for n in order[:count]))
        order = order[count:]
    return x.reshape(shape)


def _from_heads(x: Any, labels: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """The inverse of `_in_heads`."""
    order, _ = _heads_order(labels)
    x = x.reshape([sizes[n] for n in order])
    x = jnp.transpose(x, [order.index(n) for n in labels if n])
    return x.reshape([sizes[n] if n else 1 for n in labels])


def _turned(
    x: Any, labels: Sequence[str], other: Sequence[str], sizes: Mapping[str, int]
) -> Any:
    """Brings an array into the order of other labels."""
    if tuple(labels) == tuple(other):
        return x
    return _from_heads(_in_heads(x, labels, sizes), other, sizes)


def _aval(eqn: Equation, slot: int) -> tuple[tuple[int, ...], Any]:
    aval = eqn.source.outvars[slot].aval
    return tuple(aval.shape), aval.dtype
