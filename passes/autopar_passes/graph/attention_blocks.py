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
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.attention_heads import Sum, repeated_heads
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
        self.heads = repeated_heads(products)

    def replace(self) -> Region:
        """The region with the primitives of attention in blocks."""
        products, parts, named = self.products, self.parts, self._naming()
        given = [
            (products.query, products.query_labels),
            (products.key, products.key_labels),
            products.value(),
        ]
        if self.heads is not None:
            given[1:] = self.heads.key, self.heads.value
        like, made = products.product, list[Equation]()
        arrays = [self._parted(*x, like, made) for x in given]
        parted = list[Equation]()
        positions, operands, leaves = self.scores.operands(
            self.builder,
            named,
            lambda value, labels: self._parted(value, labels, like, parted),
        )
        form = self._form([named(labels) for _, labels in given], leaves, named)
        back: _Back | None = None
        if parts.of_value is not None or parts.of_weights is not None:
            back = self._back(given, named)
            form = dataclasses.replace(form, given=back.given, gradients=back.results)
        out, after = None, list[Equation]()
        if parts.out is not None:
            end, labels = parts.out[0], products.out_labels()
            out = self._whole(end.outputs[0], labels, end, after)
        scale = self._scale(form, arrays) if self.rewrite.cudnn else None
        weights = parts.out or parts.of_value
        assert weights is not None
        if scale is None:
            made += [*positions, *parted]
            whole = [*arrays, *operands]
            forward, backward = self._in_blocks(form, whole, back, out, weights[0])
        else:
            ends = back, out, weights[0]
            forward, backward = self._on_cudnn(form, arrays, scale, *ends)
        insert: dict[int, list[Equation]] = collections.defaultdict(list)
        replaced = products.replaced()
        first = min(self.search.place[k] for k in replaced)
        if parts.out is not None:
            first = self.search.place[parts.out[0].index]
        insert[first] += [*made, *forward, *after]
        if back is not None:
            insert[back.place] += [*back.before, *backward, *back.after]
        if self.heads is not None:
            replaced |= {eqn.index for eqn in self.heads.sums}
        return self._with_inserted(insert, replaced)

    def _form(
        self,
        given: Sequence[tuple[str, ...]],
        leaves: Sequence[tuple[str, ...]],
        named: Callable[[Labels], tuple[str, ...]],
    ) -> Form:
        """How the step writes the forward pass."""
        products, parts = self.products, self.parts
        weights = parts.out or parts.of_value
        assert weights is not None
        weight = weights[0].inputs[weights[1]]
        assert isinstance(weight, int)
        (product,) = products.product.outputs
        out_dtype = self.values[products.value()[0]].dtype
        if parts.out is not None:
            out_dtype = self.values[parts.out[0].outputs[0]].dtype
        return Form(
            operands=(*given, *leaves),
            out=named(products.out_labels()),
            scores=self.scores.map,
            product_dtype=str(self.values[product].dtype),
            weight_dtype=str(self.values[weight].dtype),
            out_dtype=str(out_dtype),
            precision=products.product.params["precision"],
        )

    def _shape(self, value: int, labels: Labels) -> tuple[int, ...]:
        """The shape of an array with a dimension for each part of repeated heads."""
        shape = self.values[value].shape
        return shape if self.heads is None else self.heads.shape(labels, shape)

    def _parted(
        self, value: int, labels: Labels, like: Equation, made: list[Equation]
    ) -> int:
        """Splits repeated heads of an array; adds the equation to a list."""
        shape, start = self._shape(value, labels), len(self.builder.equations)
        if shape == self.values[value].shape:
            return value
        found = self.builder.call(lambda x: x.reshape(shape), [value], like.name_stack)
        made += self.builder.equations[start:]
        assert isinstance(found, int)
        return found

    def _whole(
        self, value: int, labels: Labels, like: Equation, made: list[Equation]
    ) -> int:
        """A value of split heads, from which an equation computes an array.

        Args:
          value: the array.
          labels: its labels.
          like: an equation with the name stack of the new one.
          made: the list to which the equation is added.
        """
        shape, whole = self._shape(value, labels), self.values[value]
        if shape == whole.shape:
            return value
        found = self.builder.value(shape, whole.dtype)
        start = len(self.builder.equations)
        self.builder.call(
            lambda x: x.reshape(whole.shape), [found], like.name_stack, value
        )
        made += self.builder.equations[start:]
        return found

    def _naming(self) -> Callable[[Labels], tuple[str, ...]]:
        """A function that gives the names of a `Form` to labels of dimensions."""
        name = {
            "": "",
            self.products.keys: "k",
            self.products.queries: "q",
            self.products.depth: "d",
            "E": "e",
        }
        batch = [n for n in self.products.names() if n[0] == "B"]
        groups = [n for n in self.products.rows if n != self.products.queries]
        heads = self.heads
        if heads is not None:
            parts = heads.split(tuple((n,) for n in batch))
            batch = [n for dims in parts for n in dims if n != heads.group]
            groups.append(heads.group)
        name |= {n: f"b{k}" for k, n in enumerate(batch)}
        name |= {n: f"g{k}" for k, n in enumerate(groups)}

        def named(labels: Labels) -> tuple[str, ...]:
            found = labels if heads is None else heads.split(labels)
            return tuple(name[n] for dims in found for n in dims or ("",))

        return named

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
        self,
        form: Form,
        arrays: list[int],
        back: _Back | None,
        out: int | None,
        like: Equation,
    ) -> tuple[list[Equation], list[Equation]]:
        """The equations of both passes, as attention in blocks."""
        builder = self.builder
        alone = dataclasses.replace(form, given=(), gradients=())
        forward = self._equation(blockwise.forward_p, arrays, alone, like)
        made, logs = (builder.value(*_aval(forward, k)) for k in range(2))
        out = made if out is None else out
        forward = dataclasses.replace(forward, outputs=(out, logs))
        if back is None:
            return [forward], []
        given = [*arrays, logs, out, back.gradient]
        backward = self._equation(blockwise.backward_p, given, form, back.like)
        return [forward], [dataclasses.replace(backward, outputs=back.outputs)]

    def _scale(self, form: Form, arrays: Sequence[int]) -> float | None:
        """The scale of the scores, if cuDNN's attention computes the same."""
        hidden, own = self.scores.hidden, self.products.size(self.products.keys) - 1
        if hidden is None or not self.scores.only_positions:
            return None
        if hidden[own:].any() or not (form.scores.causal or not hidden.any()):
            return None
        shapes = [self.values[a] for a in arrays]
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
        scale: float,
        back: _Back | None,
        out: int | None,
        like: Equation,
    ) -> tuple[list[Equation], list[Equation]]:
        """The equations of both passes, with cuDNN's attention."""
        builder = self.builder
        sizes = {
            n: size
            for array, labels in zip(arrays, form.operands, strict=False)
            for n, size in zip(labels, self.values[array].shape, strict=True)
        }

        attend = functools.partial(_attend_on_cudnn, form, scale, sizes)

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

        start = len(builder.equations)
        if out is None:
            shape = tuple(sizes[n] if n else 1 for n in form.out)
            out = builder.value(shape, self.values[arrays[0]].dtype)
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

    def _back(self, given: Sequence[tuple[int, Labels]], named: Any) -> _Back:
        """The backward pass.

        Args:
          given: queries, keys and values, and their labels.
          named: gives labels the names of a `Form`.
        """
        products, parts, heads = self.products, self.parts, self.heads
        late = [p[0] for p in (parts.of_value, parts.of_query, parts.of_key) if p]
        before, after = list[Equation](), list[Equation]()
        gradient, labels = products.gradient()
        own = self._parted(gradient, labels, late[0], before)
        sums: tuple[Sum | None, Sum | None] = (None, None)
        if heads is not None:
            sums = heads.key_gradient, heads.value_gradient
        ends = (
            (parts.of_query, products.depth, None),
            (parts.of_key, products.depth, sums[0]),
            (parts.of_value, "E", sums[1]),
        )
        results: list[tuple[tuple[str, ...], str]] = []
        outputs: list[int] = []
        for (part, free, total), (array, array_labels) in zip(ends, given, strict=True):
            if part is None:
                shape = self._shape(array, array_labels)
                made = self.builder.value(shape, self.values[array].dtype)
                end = array_labels
            elif total is not None:
                made, end = total[0].outputs[0], total[1]
            else:
                end = products.side(part, free)[2]
                made = self._whole(part[0].outputs[0], end, part[0], after)
            results.append((named(end), str(self.values[made].dtype)))
            outputs.append(made)
        return _Back(
            gradient=own,
            given=named(labels),
            results=tuple(results),
            outputs=tuple(outputs),
            like=late[0],
            place=min(self.search.place[eqn.index] for eqn in late),
            before=tuple(before),
            after=tuple(after),
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
      before: equations that split heads of the gradient of the output.
      after: equations that join heads of gradients.
    """

    gradient: int
    given: tuple[str, ...]
    results: tuple[tuple[tuple[str, ...], str], ...]
    outputs: tuple[int, ...]
    like: Equation
    place: int
    before: tuple[Equation, ...]
    after: tuple[Equation, ...]


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


def _attend_on_cudnn(
    form: Form, scale: float, sizes: Mapping[str, int], *given: Any
) -> Any:
    """The output of attention, of queries, keys and values in a form's dimensions."""
    pairs = zip(given, form.operands, strict=False)
    q, k, v = (_in_heads(x, labels, sizes) for x, labels in pairs)
    made = jax.nn.dot_product_attention(
        *(q, k, v),
        scale=scale,
        is_causal=form.scores.causal,
        implementation="cudnn",
    )
    return _from_heads(made, form.out, sizes)


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
